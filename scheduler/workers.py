"""The workers as the scheduler sees them: who lives, who has which models, who is free."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from gangway.executor.control import ControlSegment
from gangway.executor.messages import Load, Unload


@dataclass(slots=True, eq=False)
class Worker:
    """One worker. `pid` 0: none is there.

    `lease`: what it works on, as far as others are concerned: None already when it is sure to leave at once. `owed`: so
    many leases that it was told to run has it not left.
    """

    index: int
    pid: int = 0
    models: set[int] = field(default_factory=set)
    jobs: deque[Load | Unload] = field(default_factory=deque)  # the first one has been sent
    lease: int | None = None
    owed: int = 0
    in_service: bool = False


class WorkerTable:
    """All workers. One takes part in gangs (is in service) when it has every model that is being served.

    Loads and unloads go out one at a time per worker, so that no number of models overflows a ring.
    """

    def __init__(self, control: ControlSegment) -> None:
        self._control = control
        self.workers = [Worker(index) for index in range(control.layout.workers)]
        self._served: set[int] = set()
        self._missing: set[int] = set()  # dead, and nobody comes in their place for now
        self._free: tuple[int, ...] | None = ()  # None: to be found again
        self._in_service = 0

    def __getitem__(self, index: int) -> Worker:
        return self.workers[index]

    @property
    def free(self) -> tuple[int, ...]:
        """Indices of workers that can be given work now: also those that load a model, which they do beside it."""
        if self._free is None:
            idle = [worker for worker in self.workers if worker.in_service and worker.lease is None]
            self._free = tuple([worker.index for worker in idle])
        return self._free

    def are_free(self, cores: tuple[int, ...]) -> bool:
        """Return whether these are different cores, all of them free."""
        if len(cores) == 1:
            return cores[0] in self.free
        return len(set(cores)) == len(cores) and all(core in self.free for core in cores)

    @property
    def in_service(self) -> int:
        """How many workers take part in gangs."""
        return self._in_service

    def occupy(self, index: int, lease: int) -> None:
        """It is told to run this lease."""
        worker = self.workers[index]
        worker.lease = lease
        worker.owed += 1
        self._free = None

    def left(self, index: int, lease: int) -> bool:
        """It has left this lease; return whether it came free by that."""
        worker = self.workers[index]
        worker.owed = max(worker.owed - 1, 0)
        return self._release(worker, lease)

    def leaves(self, index: int, lease: int) -> bool:
        """It will leave this lease at once; return whether it may be given work now: not twice, in case it hangs."""
        worker = self.workers[index]
        return worker.owed == 1 and self._release(worker, lease)

    def start(self, index: int, pid: int, loads: Iterable[Load]) -> None:
        """A new process introduced itself: it has no model; give it these."""
        self._missing.discard(index)
        self.workers[index] = Worker(index, pid)
        self._review()
        worker = self.workers[index]
        for load in loads:
            self.order(worker, load)

    def lose(self, index: int) -> None:
        """The process is gone."""
        self.workers[index] = Worker(index)
        self._review()

    def miss(self, index: int) -> None:
        """Nobody comes in the place of a dead worker for now."""
        if not self.workers[index].pid:
            self._missing.add(index)

    def order(self, worker: Worker, job: Load | Unload) -> None:
        """Send a job now or after those before it."""
        if worker.pid:
            worker.jobs.append(job)
            self._free = None
            if len(worker.jobs) == 1:
                self._send_job(worker)

    def order_all(self, job: Load | Unload) -> None:
        """Give every living worker a job."""
        for worker in self.workers:
            self.order(worker, job)

    def answer(self, index: int, model_id: int, has_model: bool) -> None:
        """A worker has done its first job; send the next one."""
        worker = self.workers[index]
        if not worker.jobs or worker.jobs[0].model_id != model_id:
            return  # the answer to a job of a scheduler before this one
        worker.jobs.popleft()
        (worker.models.add if has_model else worker.models.discard)(model_id)
        self._review()
        if worker.jobs:
            self._send_job(worker)

    def all_have(self, model_id: int) -> bool:
        """Whether every worker has the model; a dead one's successor is waited for, unless it is missing."""
        present = [worker for worker in self.workers if worker.index not in self._missing]
        return bool(present) and all(model_id in worker.models for worker in present)

    def any_has(self, model_id: int) -> bool:
        """Whether there is a worker that has the model."""
        return any(model_id in worker.models for worker in self.workers)

    def none_has(self, model_id: int) -> bool:
        """Whether no worker has the model, or has yet to load it."""
        return not any(
            model_id in worker.models or any(job.model_id == model_id for job in worker.jobs) for worker in self.workers
        )

    def serve(self, model_id: int, served: bool) -> None:
        """From now on a worker in service must have this model, or need not."""
        (self._served.add if served else self._served.discard)(model_id)
        self._review()

    def _review(self) -> None:
        for worker in self.workers:
            worker.in_service = worker.pid != 0 and self._served <= worker.models
        self._in_service = sum(worker.in_service for worker in self.workers)
        self._free = None

    def _release(self, worker: Worker, lease: int) -> bool:
        if worker.lease != lease:
            return False
        worker.lease = None
        self._free = None
        return True

    def _send_job(self, worker: Worker) -> None:
        job = worker.jobs[0]
        if isinstance(job, Load):
            job = replace(job, at_once=not worker.in_service)
        if not self._control.command(worker.index, job.pack()):
            raise RuntimeError(f"the command ring of worker {worker.index} is full")
