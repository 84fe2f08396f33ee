"""A live scheduler process and real workers on a model that obeys orders; the test is supervisor and front end."""

import itertools
import os
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from gangway.artifact.format import staging_bytes
from gangway.artifact.reader import read_manifest
from gangway.base.peer import peer_sockets
from gangway.executor.launch import WorkerPlan, available_cores, start_worker
from gangway.executor.leases import LeaseProgress
from gangway.executor.segment import BELL
from gangway.executor.slots import SlotOutcome, SlotStatus
from gangway.scheduler import messages
from gangway.scheduler.batching.former import BatchFormer
from gangway.scheduler.loop import LiveScheduler
from gangway.scheduler.messages import SchedulerPlan, start_scheduler
from gangway.scheduler.observability import TraceWriter
from gangway.scheduler.policies.base import Policy
from gangway.scheduler.policy import Decision, Query, Snapshot
from gangway.scheduler.state import SchedulerOptions
from gangway.scheduler.timeline import TimelineWriter
from gangway.server.control.supervisor.shared_memory import FRONT_END, SLOTS, SUPERVISOR, SharedMemory
from gangway.server.control.supervisor.workers import CRASHES
from gangway.server.requests.data_plane import DataPlane, RequestLayout, Scheduling, Submission
from testing.waiting import until
from tests.helpers.tiny_model import TASKS, make_artifact

TIMEOUT_SECONDS = 20.0
LAYERS = 6


class Server:
    """What `gangway serve` consists of, without the supervisor. `plane` is the front end's."""

    def __init__(
        self, cache_dir: Path, key: str, policy: str = "model_fcfs", models_bytes: int = 0, **fields: Any
    ) -> None:
        cores = available_cores()
        self.memory = SharedMemory.create(workers=2)
        self.new_front_end()
        stride = arena_bytes(cache_dir / key)
        spec = messages.LoadModel(7, "tiny", key, LAYERS, max_ranks=2, arena_bytes=stride, max_rows=4)
        self.specs = [structs.replace(spec, **fields)]
        fds = (self.memory.control.segment.fd, self.memory.arenas.fd, self.memory.io_fds)
        self._plans = [WorkerPlan(i, cores[i % len(cores)], *fds, cache_dir) for i in range(2)]
        self._scheduler_plan = SchedulerPlan(*fds, -1, SLOTS, policy, models_bytes=models_bytes)
        self.workers: list[subprocess.Popen[bytes]] = [start_worker(plan) for plan in self._plans]
        self.start_scheduler()
        self.expect(messages.ModelLoaded)

    def new_front_end(self) -> None:
        """What a successor of a front end does: a data plane on a fresh table."""
        memory = self.memory
        memory.tables[FRONT_END].init()
        self.plane = DataPlane(
            memory.io[FRONT_END],
            memory.tables[FRONT_END],
            memory.control.submit_rings[FRONT_END],
            memory.control.scheduler_bell,
        )

    def start_scheduler(self) -> None:
        ours, theirs = peer_sockets()
        self.scheduler = start_scheduler(replace(self._scheduler_plan, supervisor_fd=theirs.fileno()))
        theirs.close()
        self.link = messages.control_peer(ours)
        for message in (*self.specs, messages.BeginServing()):
            self.tell(message)

    def tell(self, message: messages.ControlMessage) -> None:
        self.link.send(message)
        self.memory.control.scheduler_bell.ring_for_control()

    def expect(self, kind: type[Any]) -> Any:
        """The next message of this kind from the scheduler."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            message = self.link.receive()
            if isinstance(message, kind):
                return message
            if message is None:
                time.sleep(0.001)
        raise TimeoutError(f"no {kind.__name__}")

    def request(
        self,
        task_us: float = 0,
        crash: int = 0,
        hang: int = 0,
        rows: int = 1,
        model_id: int = 7,
        alone: bool = False,
        last: bool = True,
        **fields: int,
    ) -> Submission:
        """Submit a query whose tasks last so long; `crash` and `hang`: 1 + the task of layer 0 that does it."""
        request = self.open(rows, model_id)
        for row in range(rows):
            self.order(request, row, task_us, crash, hang)
        request.submit(Scheduling(**fields), alone=alone, last=last)
        return request

    def open(self, rows: int = 1, model_id: int = 7) -> Submission:
        """Return a request that has not been submitted, whose tasks take no time."""
        request = self.plane.open(RequestLayout(model_id, (64,), (LAYERS * TASKS * 4,)), rows)
        for tensor in (request.inputs[0], request.outputs[0]):
            tensor[:] = bytes(len(tensor))
        return request

    def order(self, request: Submission, row: int, task_us: float = 0, crash: int = 0, hang: int = 0) -> None:
        """Say what the tasks of one row do."""
        struct.pack_into("<4i", request.inputs[0], row * 64, int(task_us * 1000), hang, crash, 0)

    def outcome(self, request: Submission) -> SlotOutcome:
        """Wait for the end of a request."""
        outcome = request.wait(time.monotonic_ns() + int(TIMEOUT_SECONDS * 1e9))
        assert outcome is not None, "no answer"
        return outcome

    def counters(self, request: Submission) -> set[int]:
        """Distinct values of the counters of all tasks; {1}: each was executed exactly once."""
        return set(request.outputs[0].cast("i"))

    def executed(self, request: Submission) -> int:
        """How many tasks have been executed so far."""
        return sum(request.outputs[0].cast("i"))

    def await_running(self, request: Submission) -> None:
        """Wait until a first task of the query has been executed."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not any(request.outputs[0]):
            assert time.monotonic() < deadline, "does not start"
            time.sleep(0.0005)

    def await_lease(self, condition: Callable[[LeaseProgress], bool]) -> None:
        """Wait until some lease is like that."""
        leases = self.memory.control.leases
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not any(condition(leases[index].progress()) for index in range(len(leases))):
            assert time.monotonic() < deadline, "no lease is like that"
            time.sleep(0.0005)

    def await_gang(self, ranks: int) -> None:
        """Wait until so many ranks are in one lease."""
        self.await_lease(lambda progress: progress.present.bit_count() == ranks)

    def hurry(self, request: Submission) -> None:
        """From now on no task of a request hangs or takes any time."""
        for at in range(0, len(request.inputs[0]), 64):
            request.inputs[0][at : at + 16] = bytes(16)

    def await_heard(self) -> None:
        """Wait until the scheduler has done what it was told until now: it hears a front end in order."""
        with self.request() as last:
            last.cancel()
            assert self.outcome(last).status in (SlotStatus.CANCELLED, SlotStatus.OK)

    def await_quiet(self) -> None:
        """Wait until no worker is in a gang, or has been told to be."""
        control = self.memory.control
        until(lambda: all(control.quiet(rank) for rank in range(control.layout.workers)))

    def kill_worker(self, index: int) -> None:
        self.workers[index].kill()
        self.replace_worker(index)

    def replace_dead_worker(self) -> int:
        """Wait for the death of a worker and replace it; return how it ended."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            for index, worker in enumerate(self.workers):
                if worker.poll() is not None:
                    self.replace_worker(index)
                    return worker.returncode
            time.sleep(0.001)
        raise TimeoutError("no worker died")

    def replace_worker(self, index: int) -> None:
        """What a supervisor does when a worker has died."""
        crashed = -self.workers[index].wait(TIMEOUT_SECONDS) in CRASHES
        lease = self.memory.control.status(index).lease if crashed else None
        self.memory.control.forget_worker(index)
        self.tell(messages.WorkerDied(index, self.workers[index].pid, crashed, -1 if lease is None else lease))
        self.workers[index] = start_worker(self._plans[index])

    def kill_scheduler(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Kill it and start another; `meanwhile` is called while there is none."""
        self.scheduler.kill()
        self.scheduler.wait(TIMEOUT_SECONDS)
        meanwhile()
        self.link.close()
        self.start_scheduler()

    def stop(self) -> None:
        self.tell(messages.StopScheduler())
        assert self.scheduler.wait(TIMEOUT_SECONDS) == 0
        assert [worker.wait(TIMEOUT_SECONDS) for worker in self.workers] == [0, 0]

    def kill_all(self) -> None:
        for process in (self.scheduler, *self.workers):
            process.kill()
            process.wait()
        self.link.close()
        self.close_descriptors()

    def close_descriptors(self) -> None:
        """Close those of the segments. What is mapped goes with the last slice of it."""
        memory = self.memory
        segments = (memory.control.segment, memory.arenas, memory.statistics.segment, memory.cancellations.segment)
        others = (*memory.io_fds, *memory.bell_fds, *memory.custom_metrics.fds)
        for descriptor in (*(segment.fd for segment in segments), *others):
            os.close(descriptor)


def arena_bytes(artifact: Path) -> int:
    """What a row of a model needs in an arena, as a server says it."""
    manifest = read_manifest(artifact)
    return manifest.arena_bytes + staging_bytes(manifest)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Cache folder and key of the tiny model."""
    made = make_artifact(tmp_path_factory.mktemp("cache"), LAYERS)
    return made.cache_dir, made.key


class Script(Policy):
    """Does what the test says: `answer` is called with each snapshot, which is kept in `seen`."""

    name = "script"

    def __init__(self) -> None:
        self.seen: list[Snapshot] = []
        self.answer: Callable[[Snapshot], Sequence[Decision]] = lambda snapshot: []
        self.came: list[int] = []
        self.done: list[int] = []

    def decide(self, snapshot: Snapshot) -> Sequence[Decision]:
        kept = replace(snapshot, waiting=list(snapshot.waiting), models=dict(snapshot.models))
        self.seen.append(kept)
        return self.answer(kept)

    def arrived(self, query: Query) -> None:
        self.came.append(query.query_id)

    def finished(self, query: Query, now_us: float) -> None:
        self.done.append(query.query_id)


class ScriptedServer(Server):
    """The scheduler is a thread here, so that the test is its policy, too. Workers are processes as ever."""

    policy = Script
    traced = True  # decisions, and the timeline
    _numbers = itertools.count()

    def configure(self, part: str, **numbers: float) -> None:
        """Change numbers of a part of the policy's configuration."""
        config = self.script.config
        changed = structs.replace(config, **{part: structs.replace(getattr(config, part), **numbers)})
        self.script.config = self.live.compounds.config = changed

    def make_former(self, next_id: Callable[[], int], *costs_us: float) -> BatchFormer:
        """Return what forms batches, if the policy is shown such."""
        return BatchFormer(next_id, *costs_us)

    def start_scheduler(self) -> None:
        self.script = self.policy()
        ours, theirs = (messages.control_peer(end) for end in peer_sockets())
        self.link = ours
        self._theirs = theirs
        folder = self._plans[0].cache_dir
        number = next(self._numbers)
        self.trace = TraceWriter(folder / f"decisions-{number}.jsonl")
        self.timeline_path = folder / f"timeline-{number}.json"
        self.timeline = TimelineWriter(self.timeline_path, cores=2)
        memory = self.memory
        live = self.live = LiveScheduler(
            memory.control,
            memory.tables,
            memory.arenas,
            theirs,
            self.script,
            SchedulerOptions(
                trace=self.trace if self.traced else None,
                timeline=self.timeline if self.traced else None,
                make_former=self.make_former,
            ),
        )
        self.tell(self.specs[0])
        self._thread = threading.Thread(target=live.run)
        self._thread.start()

    def is_asleep(self, skips_completions: bool = False, skips_best_effort: bool = False) -> bool:
        """Whether the scheduler waits for its bell, and wants to be woken only for what cannot wait.

        `skips_completions`: not woken for answered queries, `skips_best_effort`: nor for requests that preempt nobody.
        """
        control = self.memory.control
        at = control.layout.scheduler_bell
        names = ("sleeping", "skip_completion_wakeups", "skip_best_effort_wakeups")
        words = [struct.unpack_from("<I", control.segment.view, at + BELL.offset(name))[0] for name in names]
        return words == [1, skips_completions, skips_best_effort]

    def workers_are_asleep(self) -> bool:
        """Whether all workers wait for their bells: what they had to say is said."""
        control = self.memory.control
        bells = [control.layout.worker(rank) for rank in range(control.layout.workers)]
        return all(struct.unpack_from("<I", control.segment.view, at + BELL.offset("sleeping"))[0] for at in bells)

    def ask(self) -> None:
        """Have the policy asked again, by a message that changes nothing."""
        self.tell(messages.FrontEndDied(SUPERVISOR))

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for what the policy shows."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def await_ends(self, count: int) -> None:
        """Wait until so many queries' gangs have left: a client has its answer before that."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while len(self.script.done) < count:
            assert time.monotonic() < deadline, "gangs do not end"
            time.sleep(0.0005)

    def await_snapshot(self, condition: Callable[[Snapshot], bool]) -> Snapshot:
        """Wait for a snapshot like that, from the first one on."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            for snapshot in list(self.script.seen):
                if condition(snapshot):
                    return snapshot
            time.sleep(0.0005)
        raise TimeoutError(f"not among {len(self.script.seen)} snapshots")

    def stop(self) -> None:
        if self._thread.is_alive():
            self.tell(messages.StopScheduler())
            self._thread.join(TIMEOUT_SECONDS)
        self.trace.close()
        self.timeline.close()

    def kill_all(self) -> None:
        self.stop()
        for worker in self.workers:
            worker.kill()
            worker.wait()
        self.link.close()
        self._theirs.close()
        self.close_descriptors()


@pytest.fixture
def server(tiny_model: tuple[Path, str], request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server; its parameter is the policy, model_fcfs without one."""
    server = Server(*tiny_model, getattr(request, "param", "model_fcfs"))
    yield server
    server.kill_all()


@pytest.fixture
def scripted(tiny_model: tuple[Path, str]) -> Iterator[ScriptedServer]:
    server = ScriptedServer(*tiny_model)
    yield server
    server.kill_all()
