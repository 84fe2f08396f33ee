"""The live scheduler: applies a policy to the requests in shared memory. `scheduler/process.py` is its process.

One loop, one thing to wait on (the bell): messages come in from front ends, workers and the supervisor; the policy
decides; Run messages go out. Everything kept here can be rebuilt from shared memory (`recovery.py`), so the process may
be killed at any time.
"""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from gangway.artifact.profile import ProfileError, read_profile
from gangway.executor.control import ControlSegment
from gangway.executor.messages import Cancel, Exit, Left, LeftReason, Loaded, Ready, Submit, Unload, Unloaded, unpack
from gangway.executor.segment import Segment
from gangway.executor.slots import SlotStatus, SlotTable
from gangway.scheduler import control as slow
from gangway.scheduler.arenas import ArenaPool
from gangway.scheduler.gangs import Gang, GangTable
from gangway.scheduler.models import ModelState, ModelTable
from gangway.scheduler.packets import PacketSocket
from gangway.scheduler.policy import Policy, Snapshot, Start
from gangway.scheduler.requests import Request, RequestBook
from gangway.scheduler.stalls import StallWatch
from gangway.scheduler.workers import WorkerTable

IDLE_WAIT_US = 1_000_000
WATCH_WAIT_US = 100_000  # while a gang has ended, but not all of its ranks have left
_log = logging.getLogger(__name__)


class LiveScheduler:
    """Queue, gangs and models, and the messages between them."""

    def __init__(
        self,
        control: ControlSegment,
        tables: Sequence[SlotTable],
        arenas: Segment,
        supervisor: PacketSocket[slow.ControlMessage],
        policy: Policy,
        spin_us: int = 0,
    ) -> None:
        self.control = control
        self.supervisor = supervisor
        self.requests = RequestBook(tables)
        self.workers = WorkerTable(control)
        self.models = ModelTable()
        self._gangs = GangTable(control)
        self._stalls = StallWatch(control)
        self._arenas = ArenaPool(arenas)
        self._policy = policy
        self._spin_us = spin_us
        self._dying_front_ends: set[int] = set()
        self._stopping = False

    def run(self) -> None:
        """Serve until Stop."""
        bell = self.control.scheduler_bell
        seen = bell.seen()
        self.step()
        while not self._stopping:
            bell.wait(seen, self._spin_us, self._wait_us())
            seen = bell.seen()
            self.step()

    def step(self) -> None:
        """Take in all messages there are, then let the policy decide."""
        self._hear_supervisor()
        self._hear_workers()
        self._hear_front_ends()
        now_us = time.monotonic_ns() / 1e3
        self.requests.expire(now_us, self._end)
        self._report_stuck(now_us)
        self._dispatch(now_us)

    # -- messages

    def _hear_supervisor(self) -> None:
        while (message := self.supervisor.receive()) is not None:
            match message:
                case slow.LoadModel():
                    self.load_model(message)
                case slow.UnloadModel(model_id):
                    self._unload_model(model_id)
                case slow.SetProfile():
                    self.models.set_profile(message)
                case slow.UseProfile(model_id, path):
                    self._use_profile(model_id, Path(path))
                case slow.WorkerDied(core, pid):
                    self._worker_died(core, pid)
                case slow.FrontEndDied(front_end):
                    self._front_end_died(front_end)
                case slow.Stop():
                    self._stop()
                case _:
                    raise ValueError(f"unexpected {message}")

    def _hear_front_ends(self) -> None:
        for front_end, ring in enumerate(self.control.submit_rings):
            while (raw := ring.receive()) is not None:
                match unpack(raw):
                    case Submit(slot, sequence):
                        self._submit(front_end, slot, sequence)
                    case Cancel(slot, sequence):
                        self._cancel(front_end, slot, sequence)

    def _hear_workers(self) -> None:
        for core in range(len(self.workers.workers)):
            self._hear_worker(core)

    def _hear_worker(self, core: int) -> None:
        ring = self.control.completion_rings[core]
        while (raw := ring.receive()) is not None:
            match unpack(raw):
                case Left() as left:
                    self._left(core, left)
                case Loaded(model_id, ok, error):
                    self._loaded(core, model_id, ok, error)
                case Unloaded(model_id):
                    self.workers.answer(core, model_id, has_model=False)
                    self._finish_unloads()
                case Ready(pid):
                    self.worker_ready(core, pid)

    # -- requests

    def _submit(self, front_end: int, slot: int, sequence: int) -> None:
        request = self.requests.admit(front_end, slot, sequence)
        if request is not None:
            self.refuse_unknown(request)

    def refuse_unknown(self, request: Request) -> None:
        """Answer UNAVAILABLE to a request for a model that is not there any more."""
        model = self.models.get(request.query.model_id)
        if model is None or model.state is ModelState.UNLOADING:
            self.requests.finish(request, SlotStatus.UNAVAILABLE)

    def _cancel(self, front_end: int, slot: int, sequence: int) -> None:
        request = self.requests.find(front_end, slot, sequence)
        if request is not None:
            self._drop(request)

    def _drop(self, request: Request) -> None:
        """End a waiting request now, a running one when its gang has stopped."""
        request.dropped = True
        if self.requests.is_waiting(request):
            self._end(request, SlotStatus.CANCELLED)
        elif (gang := self._gangs.of_request(request)) is not None:
            self._gangs.stop(gang)

    def _end(self, request: Request, status: SlotStatus) -> None:
        """Answer a waiting request; a paused one gives back what it holds."""
        if request.started and (gang := self._gangs.of_request(request)) is not None:
            self._close(gang)
        self.requests.finish(request, status)

    # -- gangs

    def _dispatch(self, now_us: float) -> None:
        free = self.workers.free
        profiles = self.models.profiles
        waiting = [request.query for request in self.requests.waiting if request.query.model_id in profiles]
        if not free or not waiting:
            return
        snapshot = Snapshot(now_us, waiting, self._gangs.running(), free, self.workers.in_service, profiles)
        for decision in self._policy.decide(snapshot):
            if isinstance(decision, Start):
                self._start(decision, now_us)

    def _start(self, dispatch: Start, now_us: float) -> None:
        request = self.requests.get_waiting(dispatch.query_id)
        gang = self._gangs.of_request(request) if request.started else self._form(request)
        if gang is None:
            return
        if not self.requests.start(request):
            self._close(gang)
            return
        spec = self._spec(request)
        for core in dispatch.cores:
            self.workers[core].lease = gang.lease
        self._gangs.send(gang, dispatch, spec.arena_bytes, spec.layers, now_us)

    def _form(self, request: Request) -> Gang | None:
        """Return a gang with lease and arena for a query; None if it has to wait for one, or can never have one."""
        if not self._gangs.has_free:
            return None
        try:
            arena_offset = self._arenas.acquire(request.query.model_id, request.query.rows)
        except OSError as error:
            _log.error("no memory for %d rows of %s: %s", request.query.rows, self._spec(request).name, error)
            self.requests.finish(request, SlotStatus.UNAVAILABLE)
            return None
        if arena_offset is None:
            return None
        return self._gangs.open(request, arena_offset, self._spec(request).indivisible)

    def _left(self, core: int, message: Left) -> None:
        gang = self._gangs.leave(message, time.monotonic_ns() / 1e3)
        if gang is None:
            return
        self.workers[core].lease = None
        if not gang.outstanding:
            self._gang_ended(gang)

    def _gang_ended(self, gang: Gang) -> None:
        """All ranks have left: the query is answered, or paused, or must be ended or run again."""
        request = gang.request
        next_layer = None if gang.lost else self._gangs.stopped_at(gang)
        if next_layer is not None and not request.dropped and LeftReason.INVALID not in gang.reasons:
            self.requests.pause(request, next_layer)
            return
        self._close(gang)
        if request.dropped:
            self.requests.finish(request, SlotStatus.CANCELLED)
            self._quiet_front_ends()
        elif LeftReason.INVALID in gang.reasons:
            if self.requests.finish(request, SlotStatus.INTERNAL):
                _log.error("a worker could not run %s", self._spec(request).name)
        else:
            self.requests.run_again(request)  # forgets it if a rank has answered
        self._finish_unloads()

    def _close(self, gang: Gang) -> None:
        self._arenas.release(gang.request.query.model_id, gang.arena_offset)
        self._gangs.close(gang)

    def _spec(self, request: Request) -> slow.LoadModel:
        model = self.models.get(request.query.model_id)
        assert model is not None, "a model stays until its last gang has ended"
        return model.spec

    # -- models

    def load_model(self, spec: slow.LoadModel) -> None:
        """Reserve arenas and let every worker load the model."""
        try:
            self._arenas.add_model(spec.model_id, spec.arena_bytes, spec.max_rows, len(self.control.leases))
        except MemoryError as error:
            self.supervisor.send(slow.ModelFailed(spec.model_id, str(error)))
            return
        self.workers.order_all(self.models.add(spec).load)

    def _use_profile(self, model_id: int, path: Path) -> None:
        try:
            self.models.use_profile(model_id, read_profile(path))
        except ProfileError as error:
            _log.warning("profile ignored: %s", error)

    def _loaded(self, core: int, model_id: int, ok: bool, error: str) -> None:
        self.workers.answer(core, model_id, has_model=ok)
        model = self.models.get(model_id)
        if model is None or model.state is ModelState.UNLOADING:
            self._finish_unloads()
        elif not ok:
            reason = f"worker {core} cannot load the compiled model; its log line says why, it begins: {error}"
            self.supervisor.send(slow.ModelFailed(model_id, reason))
            self._unload_model(model_id)
        elif model.state is ModelState.LOADING and self.workers.all_have(model_id):
            self.models.serve(model)
            self.workers.serve(model_id, True)
            self.supervisor.send(slow.ModelLoaded(model_id))

    def _unload_model(self, model_id: int) -> None:
        model = self.models.get(model_id)
        if model is None:
            self.supervisor.send(slow.ModelUnloaded(model_id))
        elif model.state is not ModelState.UNLOADING:
            self.models.begin_unload(model)
            self.workers.serve(model_id, False)
            for request in list(self.requests.waiting):
                if request.query.model_id == model_id:
                    self._end(request, SlotStatus.UNAVAILABLE)
            self.workers.order_all(Unload(model_id))  # a worker in a gang takes it afterwards
            self._finish_unloads()

    def _finish_unloads(self) -> None:
        for model in self.models.in_state(ModelState.UNLOADING):
            model_id = model.spec.model_id
            in_use = any(gang.request.query.model_id == model_id for gang in self._gangs.all())
            if not in_use and self.workers.none_has(model_id):
                self._arenas.remove_model(model_id)
                self.models.remove(model)
                self.supervisor.send(slow.ModelUnloaded(model_id))

    # -- processes

    def worker_ready(self, core: int, pid: int) -> None:
        """A new process serves this core; its predecessor, if any, is dead."""
        self._lose_worker(core)
        self.workers.start(core, pid, self.models.loads())

    def _worker_died(self, core: int, pid: int) -> None:
        self._hear_worker(core)  # what it said before it died; a successor's Ready may be there, too
        if self.workers[core].pid == pid:
            self._lose_worker(core)

    def _lose_worker(self, core: int) -> None:
        self.workers.lose(core)
        gang = self._gangs.lose_core(core)
        if gang is not None and not gang.outstanding:
            self._gang_ended(gang)
        self._finish_unloads()

    def _front_end_died(self, front_end: int) -> None:
        self._hear_front_ends()  # what it submitted last must be ended, too
        self._dying_front_ends.add(front_end)
        for request in self.requests.of_front_end(front_end):
            self._drop(request)
        self._quiet_front_ends()

    def _quiet_front_ends(self) -> None:
        for front_end in sorted(self._dying_front_ends):
            if not self.requests.of_front_end(front_end):
                self._dying_front_ends.discard(front_end)
                self.supervisor.send(slow.FrontEndQuiet(front_end))

    def _report_stuck(self, now_us: float) -> None:
        for core in self._gangs.stuck_cores(now_us) + self._stalls.stalled_cores(self._gangs.all(), now_us):
            _log.error("worker %d makes no progress", core)
            self.supervisor.send(slow.WorkerStuck(core, self.workers[core].pid))

    def _stop(self) -> None:
        for worker in self.workers.workers:
            self.control.command(worker.index, Exit().pack())
        self._stopping = True

    def _wait_us(self) -> int:
        if self._gangs.any_ending:
            return WATCH_WAIT_US
        limit_us = self.requests.next_limit_us()
        if limit_us is None:
            return IDLE_WAIT_US
        return max(0, min(IDLE_WAIT_US, int(limit_us - time.monotonic_ns() / 1e3) + 1))
