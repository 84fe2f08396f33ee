"""The live scheduler: applies a policy to the requests in shared memory. `scheduler/process.py` is its process.

One loop, one thing to wait on (the bell): messages come in from front ends, workers and the supervisor; the policy
decides; Run messages go out. Everything kept here can be rebuilt from shared memory (`process.py`), so the process may
be killed at any time.
"""

import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gangway.base.host_limits import memory_limit_bytes
from gangway.base.logs import LogLevels
from gangway.base.peer import Peer
from gangway.executor.control import ControlSegment, ModelAccount, SchedulerStatus
from gangway.executor.messages import Cancel, Exit, Held, Kept, LeaseLeft, Loaded, Submit, Unloaded, WorkerReady, unpack
from gangway.executor.segment import Segment
from gangway.executor.slots import SlotStatus, SlotTable
from gangway.scheduler import messages
from gangway.scheduler.admission import Admission
from gangway.scheduler.apply import Execution
from gangway.scheduler.decide import Dispatcher
from gangway.scheduler.fast_path import FastPathScheduler
from gangway.scheduler.gangs import SETTLE_US, GangTable
from gangway.scheduler.model_lifecycle import ModelLifecycle
from gangway.scheduler.models import ModelState, ModelTable
from gangway.scheduler.observability import Accounts, DecisionLog, SchedulerCounters
from gangway.scheduler.policies.base import Policy
from gangway.scheduler.policies.registry import build_policy
from gangway.scheduler.requests import Request, RequestTable
from gangway.scheduler.resources import ArenaPool, WorkerTable
from gangway.scheduler.stages.compound_policy import StagePlan
from gangway.scheduler.stages.schedule_file import ScheduleFileError, read_schedule
from gangway.scheduler.state import DEFAULT_OPTIONS, SchedulerOptions, SchedulerState
from gangway.scheduler.watchdog import StallWatch

IDLE_WAIT_US = 400_000  # whoever looks on sees that it gets on
WATCH_WAIT_US = 100_000  # while a gang is under way: perhaps it has ended, and its ranks did not ring, or hang
UPKEEP_PERIOD_US = 250e3  # at least, between two rounds of what nobody waits for: most turns of a calm server are such
KEPT_SHARE = 1 / 8  # of the memory limit stays taken for idle arenas
STATUS_PERIOD_US = 500e3  # between two writes of the status block: not with every event
_NOTHING = SchedulerCounters()
UNLOADING: Final = ModelState.UNLOADING
_log = logging.getLogger(__name__)


class StatusWriter:
    """Writes what the scheduler says of itself for metrics (`executor/control.py`)."""

    def __init__(self, state: SchedulerState, execution: Execution) -> None:
        self._block = state.control.scheduler_block
        self._leases = len(state.control.leases)
        self._requests = state.requests
        self._execution = execution
        self._models = state.models
        self._arenas = state.arenas
        self._counters = state.accounts.counters
        self._compounds = state.policy
        self._next_us = 0.0

    def write(self, now_us: float) -> None:
        """Write how things are, unless that was done less than a period ago."""
        if now_us < self._next_us:
            return
        self._next_us = now_us + STATUS_PERIOD_US
        self._block.write(
            SchedulerStatus(
                waiting=len(self._requests.queries),
                leases=self._leases - self._execution.gangs.free,
                arena_bytes=self._arenas.committed_bytes,
                level=self._execution.times.interference.level(now_us),
                compounds=self._compounds.results(),
                models=self._accounts(),
            )
        )

    def _accounts(self) -> dict[int, ModelAccount]:
        """Return what there is to say of each model, in all its precisions together."""
        found: dict[int, ModelAccount] = {}
        for spec in self._models.specs():
            number = spec.model_id if spec.fp32_id < 0 else spec.fp32_id
            own = self._account(spec.model_id, spec.name)
            found[number] = ModelAccount(*map(sum, zip(found.get(number, ModelAccount()), own, strict=True)))
        return found

    def _account(self, model_id: int, name: str) -> ModelAccount:
        counters = self._counters.models.get(name, _NOTHING)
        arenas = self._arenas.usage(model_id)
        return ModelAccount(
            growths=counters.grown,
            shrinks=counters.shrunk,
            layers=counters.layers,
            version_layers=counters.versions,
            planned_blocks=counters.planned_blocks,
            arenas=arenas.in_use,
            arena_bytes=arenas.size_bytes,
        )


class LiveScheduler:
    """Takes in all messages, then lets the policy decide."""

    def __init__(
        self,
        control: ControlSegment,
        tables: Sequence[SlotTable],
        arenas: Segment,
        supervisor: Peer[messages.ControlMessage],
        policy: Policy,
        options: SchedulerOptions = DEFAULT_OPTIONS,
    ) -> None:
        self.control = control
        self.supervisor = supervisor
        in_bf16: dict[int, int] = {}
        self.requests = RequestTable(tables, in_bf16)
        self.workers = WorkerTable(control)
        self._former = None
        if policy.batches:
            self._former = options.make_former(self.requests.next_id, options.way_back_us, options.dispatch_us)
        widest = max(map(len, options.nodes), default=control.layout.workers)
        self._models = ModelTable(widest, self._former, in_bf16)
        self._arenas = ArenaPool(arenas, int(KEPT_SHARE * memory_limit_bytes()))
        self._trace = options.trace
        self._set_log = options.set_log
        self._policy = self.compounds = build_policy(policy)
        self.accounts = Accounts(options.timeline)
        self._log = DecisionLog(control.decision_block)
        state = SchedulerState(
            control,
            self.requests,
            self.workers,
            self._models,
            self._arenas,
            self.compounds,
            self._former,
            self.accounts,
            self._log,
            options.trace,
            options.way_back_us,
        )
        self._execution = execution = Execution(state, self._model_crashed)
        self.fast_path: FastPathScheduler | None = None
        if options.trace is None and options.timeline is None:
            self.fast_path = FastPathScheduler(state, execution)
        close = (lambda model_id: None) if self.fast_path is None else self.fast_path.forget
        self.lifecycle = ModelLifecycle(state, supervisor, execution, close, options.models_bytes)
        self._admission = Admission(state, execution)
        self._dispatcher = Dispatcher(state, execution)
        self._stalls = StallWatch(control)
        self._status = StatusWriter(state, execution)
        self._spin_us = options.spin_us
        self._dying_front_ends: set[int] = set()
        self._stopping = False
        self._control_seq = -1  # of the bell, when the supervisor's socket was read last
        self._maintenance_us = 0.0
        self._upkeep_us = 0.0

    def run(self) -> None:
        """Serve until Stop."""
        bell = self.control.scheduler_bell
        seen = bell.seen()
        self.step()
        while not self._stopping:
            self._wait(seen)
            seen = bell.seen()
            self.step()

    @property
    def gangs(self) -> GangTable:
        """The gangs, for whoever looks on."""
        return self._execution.gangs

    def step(self) -> None:
        """Take in all messages there are, then let the policy decide."""
        self.control.heartbeats.beat(self.control.heartbeats.scheduler)
        self._poll_workers(_now_us())
        arrived = self._poll_front_ends()
        control_seq = self.control.scheduler_bell.control_seq()
        if control_seq != self._control_seq:
            self._control_seq = control_seq
            self._poll_supervisor()
        now_us = _now_us()
        self.requests.expire(now_us, self._execution.drop)
        self._admission.refuse_late(now_us)
        self._admission.end_waiting(now_us)
        self._dispatcher.dispatch(now_us)
        if now_us >= self._maintenance_us + (WATCH_WAIT_US if arrived else 0):  # better not beside gangs that begin
            self._maintain(now_us)

    def _wait(self, seen: int) -> None:
        """Wait for something to do; requests about which there is nothing to decide may begin meanwhile."""
        if self.fast_path is None or not self._begin_undecided(self.fast_path):
            self._wait_for_bell(seen)

    def _begin_undecided(self, fast_path: FastPathScheduler) -> bool:
        """Let requests begin as long as nothing else happens; False if there may be something to decide at once."""
        has_waited, end_us = False, _now_us() + WATCH_WAIT_US  # whoever looks on sees that it gets on
        while self._may_skip_completions() and fast_path.may_begin():
            self._execution.settled()  # nobody could begin, and nobody grow: there is nothing to decide
            fast_path.poll(self._control_seq, self._spin_us, self._wait_us(), WATCH_WAIT_US)
            has_waited, now_us = True, _now_us()
            if not self._poll_workers(now_us) or now_us >= end_us:
                break  # it is something else; after one of them has left others may come as before
        return has_waited

    def _wait_for_bell(self, seen: int) -> None:
        """Wait until somebody rings whose message may change a decision."""
        # Woken when the last gang ends, an open fast path begins the next request without a decision.
        is_open = self.fast_path is not None and bool(self.fast_path.models)
        skip_completions = self._may_skip_completions() and not is_open
        skip_us = 0.0 if skip_completions else self._dispatcher.skip_best_effort_us(_now_us())
        wait_us = min(self._wait_us(), int(skip_us)) if skip_us else self._wait_us()
        self.control.scheduler_bell.wait(seen, self._spin_us, wait_us, skip_completions, skip_us > 0)

    def _may_skip_completions(self) -> bool:
        """Whether nobody could use the cores of a query that is answered, and nothing else waits for its gang's end."""
        waited_for = self.requests.queries or self._dying_front_ends or self._models.any_unloading
        return not waited_for and (self.gangs.count <= 1 or not self._execution.could_grow)

    def _maintain(self, now_us: float) -> None:
        self._maintenance_us = now_us + WATCH_WAIT_US
        self._report_stuck(now_us)
        self._admission.shed(now_us)
        if now_us < self._upkeep_us:
            return
        self._upkeep_us = now_us + UPKEEP_PERIOD_US
        self._poll_supervisor()  # or that it is gone: nobody rings for that
        self.lifecycle.retry_loads(now_us)
        self.lifecycle.rest_idle(now_us)
        if self.fast_path is not None:
            self.fast_path.close_idle(now_us)
        self._arenas.reclaim(now_us)
        self.accounts.counters.write(now_us)
        self._status.write(now_us)
        self._log.poll(now_us)
        if self._trace is not None:
            self._trace.tick(now_us)

    # -- messages

    def _poll_supervisor(self) -> None:
        while (message := self.supervisor.receive()) is not None:
            self._execution.changed = True
            self._handle(message)

    def _handle(self, message: messages.ControlMessage) -> None:
        """Do what the supervisor says. No `match`: mypyc has none for msgspec's classes."""
        if isinstance(message, messages.LoadModel):
            self.lifecycle.load(message)
        elif isinstance(message, messages.UnloadModel):
            self.lifecycle.unload(message.model_id)
        elif isinstance(message, messages.SetProfile):
            self._models.set_profile(message)
        elif isinstance(message, messages.UseProfile):
            self.lifecycle.use_profile(message.model_id, Path(message.path))
        elif isinstance(message, messages.UseSchedule):
            plan = self._plan(message.model_ids, Path(message.path)) if message.path else None
            self.compounds.use(message.number, plan)
        elif isinstance(message, messages.WorkerDied):
            self._worker_died(message)
        elif isinstance(message, messages.WorkerMissing):
            self.workers.miss(message.core)
            self.lifecycle.worker_missing()
        elif isinstance(message, messages.FrontEndDied):
            self._front_end_died(message.front_end)
        elif isinstance(message, messages.SetLog):
            self._set_log(LogLevels.from_number(message.levels))
        elif isinstance(message, messages.StopScheduler):
            self._stop()
        else:
            raise ValueError(f"unexpected {message}")

    def _plan(self, model_ids: Sequence[int], path: Path) -> StagePlan | None:
        """Return the schedule in a file; None if it cannot be used, as the log says."""
        models = [self._models.get(model_id) for model_id in model_ids]
        try:
            found = read_schedule(path)
        except ScheduleFileError as error:
            _log.warning("a schedule is not used, so its ensemble's steps run as others do: %s", error)
            return None
        if found.keys != tuple(model.spec.key for model in models if model is not None):
            return None  # one is being unloaded
        return StagePlan(tuple(model_ids), found.stages, found.cores, found.time_us)

    def _poll_front_ends(self) -> bool:
        """Return whether there was anything to hear."""
        received = self.control.all_submit_rings.drain()
        for front_end, raw in received:
            message = unpack(raw)
            if isinstance(message, Submit):
                self._submit(front_end, message.slot, message.generation)
            elif isinstance(message, Cancel):
                self._cancel(front_end, message.slot, message.generation)
            elif isinstance(message, Held):
                self._hold(front_end, message)
        return bool(received)

    def _poll_workers(self, now_us: float) -> bool:
        """Return whether there was anything to hear."""
        received = self.control.all_completion_rings.drain()
        for core, raw in received:
            message = unpack(raw)
            if isinstance(message, LeaseLeft):
                if self._execution.left(core, message, now_us):
                    self._gang_ended()
                continue
            if isinstance(message, Loaded):
                self.lifecycle.loaded(core, message.model_id, message.ok, message.error)
            elif isinstance(message, Unloaded):
                self.lifecycle.unloaded(core, message.model_id)
            elif isinstance(message, WorkerReady):
                self.worker_ready(core, message.pid)
            elif isinstance(message, Kept):  # nobody can begin because of it
                self._models.limits.keep(message.model_id, now_us)
                self._note_held(message.model_id)
                continue
            self._execution.changed = True
        return bool(received)

    # -- requests

    def _submit(self, front_end: int, slot: int, generation: int) -> None:
        request = self.requests.admit(front_end, slot, generation)
        if request is not None:
            self._dispatcher.arrived(request.query)
            self._admission.arrived(request)
            self.accept(request)
            if not request.dropped:
                self._policy.arrived(request.query)
                if self.fast_path is not None:
                    self.fast_path.arrived(request.query)
                if self._former is not None:
                    self._former.arrived(request.query)

    def accept(self, request: Request) -> None:
        """Refuse a request for a model that is not there any more; keep an eye on others."""
        model = self._models.get(request.query.model_id)
        if model is None or model.state is UNLOADING:
            self._execution.drop(request, SlotStatus.UNAVAILABLE if model is None else model.refusal)
        elif not request.dropped:
            self.lifecycle.asked(model, request.query.arrival_us)
            self._admission.watch(request)

    def _cancel(self, front_end: int, slot: int, generation: int) -> None:
        request = self.requests.find(front_end, slot, generation)
        if request is not None:
            self._execution.drop(request)

    def _hold(self, front_end: int, held: Held) -> None:
        is_less = self._models.limits.hold(front_end, held.model_id, held.count)
        self._note_held(held.model_id)
        self._execution.changed |= is_less and bool(self.requests.queries)

    def _note_held(self, model_id: int) -> None:
        if self.fast_path is not None and self._models.limits.is_held(model_id):
            self.fast_path.held(model_id)

    # -- processes

    def worker_ready(self, core: int, pid: int) -> None:
        """A new process serves this core; its predecessor, if any, is dead."""
        self._lose_worker(core)
        self.workers.start(core, pid, self._models.loads())

    def _worker_died(self, died: messages.WorkerDied) -> None:
        self._poll_workers(_now_us())  # what it said before it died; a successor's Ready may be there, too
        worker = self.workers[died.core]
        if worker.pid == died.pid:
            self._lose_worker(died.core, died.lease)
            if died.crashed and died.lease < 0 and worker.commands:
                self.lifecycle.crashed(worker.commands[0].model_id)

    def _model_crashed(self, model_id: int) -> None:
        self.lifecycle.crashed(model_id)

    def _lose_worker(self, core: int, crashed_lease: int = -1) -> None:
        self.workers.lose(core)
        self._execution.lose_core(core, _now_us(), crashed_lease)
        self._gang_ended()

    def _front_end_died(self, front_end: int) -> None:
        self._poll_front_ends()  # what it submitted last must be ended, too
        self._models.limits.forget(front_end)
        self._dying_front_ends.add(front_end)
        for request in self.requests.of_front_end(front_end):
            self._execution.drop(request)
        self._quiet_front_ends()

    def _gang_ended(self) -> None:
        if self._models.any_unloading:
            self.lifecycle.finish_unloads()
        if self._dying_front_ends:
            self._quiet_front_ends()

    def _quiet_front_ends(self) -> None:
        for front_end in sorted(self._dying_front_ends):
            if not self.requests.of_front_end(front_end):
                self._dying_front_ends.discard(front_end)
                self.supervisor.send(messages.FrontEndQuiet(front_end))

    def _report_stuck(self, now_us: float) -> None:
        gangs = self.gangs
        for gang in self._stalls.stalled(gangs.all(), now_us):
            _log.error(
                "%s: its batch makes no progress on cores %s; its workers are asked to give it up",
                gang.model,
                gang.cores,
            )
            gangs.give_up(gang, now_us)
        for core in self._stalls.stuck_cores(gangs.ending, now_us):
            _log.error(
                "worker %d (process %d) keeps a batch waiting; the supervisor kills it", core, self.workers[core].pid
            )
            self.supervisor.send(messages.WorkerStuck(core, self.workers[core].pid))

    def _stop(self) -> None:
        for worker in self.workers.workers:
            self.control.command(worker.index, Exit().pack())
        self.accounts.counters.write_now()
        self._stopping = True

    def _wait_us(self) -> int:
        if self._execution.changed:
            return int(SETTLE_US) if self.gangs.any_ending else 0
        wait_us = WATCH_WAIT_US if self.gangs.count else IDLE_WAIT_US
        first_us = math.inf
        for at_us in (self.requests.next_expiry_us(), self._admission.next_us, self._dispatcher.next_us):
            if at_us is not None and at_us < first_us:
                first_us = at_us
        if first_us < math.inf:
            wait_us = min(wait_us, int(first_us - _now_us()) + 1)
        return max(0, wait_us)


def _now_us() -> float:
    return time.monotonic_ns() / 1e3
