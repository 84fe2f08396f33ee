"""When the policy is asked, and what it is shown."""

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from gangway.scheduler.apply import Execution
from gangway.scheduler.gangs import Gang
from gangway.scheduler.policies import turns
from gangway.scheduler.policy import (
    Decision,
    Query,
    Reject,
    Replan,
    Resize,
    RunningBlock,
    Snapshot,
    Start,
    StartOver,
    Stop,
    Wake,
)
from gangway.scheduler.state import SchedulerState
from gangway.scheduler.timeline import BatchPart
from gangway.scheduler.units import Unit
from gangway.scheduler.waiting import WaitingQueries, earlier

NO_UNITS: Mapping[int, Unit] = MappingProxyType({})


class Dispatcher:
    """Asks the policy when something has changed, or at the time that it asked for, and has its decisions applied.

    While no core is free, newcomers wait for the next decision: they could only take cores from others, at a layer
    boundary, and in an overload, when decisions take longest, hundreds come in a second. How long they wait:

    - with a deadline, or of a class above that of anybody who runs: as long as the last decision took, 5 ms at most;
    - others: 50 ms, and nobody need wake the scheduler for them, but no longer than until a Python model's turn may be
      over (`policies/turns.py`).

    `PolicyConfig` has the numbers.
    With a `former` the policy is shown batches: units that are made of waiting requests when one of them is to start.
    """

    def __init__(self, state: SchedulerState, execution: Execution) -> None:
        self._policy = state.policy
        self._execution = execution
        self._requests = state.requests
        self._workers = state.workers
        self._models = state.models
        self._former = state.former
        self._trace = state.trace
        self._log = state.log
        self._way_back_us = state.way_back_us
        self._next_us = 0.0  # when to decide about newcomers that may take cores, if nothing happens before,
        self._next_best_effort_us = 0.0  # and about others
        self._may_preempt = False  # one that has come since the last decision may take cores,
        self._highest = float("inf")  # and this is their highest class
        self.wake_us: float | None = None  # when policy or former want to be asked, if nothing happens before
        self._unserved: Sequence[Query] = ()  # could begin if a core were free, as of the last decision
        self._turn_end_us: float | None = None  # when a query's turn is over that workers can leave

    @property
    def next_us(self) -> float | None:
        """When there is something to do, if nothing happens before; None: never."""
        return earlier(self.wake_us, self._turn_end_us)

    def arrived(self, query: Query) -> None:
        """A query waits from now on. One that has to wait for an instance is no reason to ask the policy."""
        execution = self._execution
        before = self._models.limits.refused_before(query)
        if before is not None and self._requests.waiting.get(before) is not None:
            return
        execution.queue_changed = True
        if query.deadline_us is not None:
            self._may_preempt = True
        if query.priority < self._highest:  # no need to compare others like it
            self._highest = float(query.priority)
            if any(query.priority < gang.unit.query.priority for gang in execution.gangs.all()):
                self._may_preempt = True

    def skip_best_effort_us(self, now_us: float) -> float:
        """Return how long nothing need be heard of newcomers without a deadline, of class 0 or lower; 0: no time.

        Front ends do not ring for them then.
        """
        execution = self._execution
        until_us = self._next_best_effort_us
        if execution.changed or self._workers.free or now_us >= until_us:
            return 0.0
        above_all = all(gang.unit.query.priority <= 0 for gang in execution.gangs.all())
        return until_us - now_us if execution.gangs.count and above_all else 0.0

    def dispatch(self, now_us: float) -> None:
        """Ask the policy if there may be something to decide."""
        execution = self._execution
        woken = self.wake_us is not None and now_us >= self.wake_us
        turn_ends = self._turn_end_us is not None and now_us >= self._turn_end_us
        if not execution.changed and not woken and not (turn_ends and execution.queue_changed):
            if not execution.queue_changed:
                if turn_ends:  # the policy has seen all there is
                    self._end_turns(self._holders(), now_us)
                return
            until_us = self._next_us if self._may_preempt else self._next_best_effort_us
            if now_us < until_us and not self._workers.free:
                self._wake_at(until_us)
                return
        if execution.gangs.settling(now_us):
            execution.changed = True  # and asked soon, when the policy can see that query, too
            return
        execution.settled()
        self._may_preempt, self._highest = False, float("inf")
        self.wake_us = self._turn_end_us = None
        if not self._workers.in_service:
            return  # nothing to plan with, until a worker is there
        waiting = self._requests.queries
        running = execution.gangs.running(now_us, self._models.tables)
        if woken or waiting or (running and self._workers.free):
            self._decide(waiting, running, now_us)

    def _decide(self, waiting: WaitingQueries, running: Sequence[RunningBlock], now_us: float) -> None:
        snapshot, units, wake_us = self._snapshot(waiting, running, now_us)
        decisions = self._policy.decide(snapshot)
        if units:
            self._make_batches(decisions, units)
        if self._trace is not None:
            self._trace.add(decisions, snapshot, self._batch_part)
        if self._log.is_watched and decisions:
            self._log.add(decisions, snapshot)
        for decision in decisions:
            self._apply(decision, now_us)
        self._execution.gangs.begin_together()
        if wake_us is not None:
            self._wake_at(wake_us)
        holders = self._holders()
        if holders and not self._workers.free:
            begun = {each.query_id for each in decisions if isinstance(each, Start)}
            self._unserved = [query for query in snapshot.waiting if query.query_id not in begun]
            holders = self._end_turns(holders, now_us)
        self._space_decisions(holders, now_us, time.monotonic_ns() / 1e3)

    def _end_turns(self, holders: list[turns.Holder], now_us: float) -> list[turns.Holder]:
        """Have those leave whose turn is over, if others wait for their cores; return those that stay."""
        leaving = sum(gang.leaving for gang in self._execution.gangs.all())
        ended, self._turn_end_us = turns.over(self._unserved, holders, leaving, now_us)
        for query_id in ended:
            self._execution.stop(Stop(query_id))
        return [holder for holder in holders if holder.query.query_id not in ended] if ended else holders

    def _holders(self) -> list[turns.Holder]:
        return [self._holder(gang) for gang in self._execution.gangs.yielding() if not gang.stopping]

    def _holder(self, gang: Gang) -> turns.Holder:
        query = gang.unit.query
        profile = self._models.tables.get(gang.artifact_id)
        usual_us = profile.rows_us(1, query.rows) if profile and profile.latency_us else 0.0
        return turns.Holder(query, gang.started_us, usual_us)

    def _space_decisions(self, holders: Sequence[turns.Holder], begin_us: float, end_us: float) -> None:
        """Set until when newcomers wait, after a decision that took so long and left these holders."""
        config = self._policy.config
        gap = config.decision_gap
        gap_us = min(gap.min_gap_factor * (end_us - begin_us), gap.max_gap_us) if gap.enabled else 0.0
        self._next_us = self._next_best_effort_us = end_us + gap_us
        if config.best_effort_gap.enabled:
            turn_end_us = max(self._next_us, turns.first_end_us(holders, turns.TURN_US))
            self._next_best_effort_us = min(end_us + config.best_effort_gap.gap_us, turn_end_us)

    def _wake_at(self, at_us: float) -> None:
        self.wake_us = earlier(at_us, self.wake_us)

    def _snapshot(
        self, queued: WaitingQueries, running: Sequence[RunningBlock], now_us: float
    ) -> tuple[Snapshot, Mapping[int, Unit], float | None]:
        """Return what the policy sees, the batches among it, and when others could be formed."""
        models, gangs = self._models, self._execution.gangs
        times, config = self._execution.times, self._policy.config
        free_cores, in_service, profiles = self._workers.free, self._workers.in_service, models.profiles
        errors = times.errors.factors if config.prediction_error.enabled else {}
        units: Mapping[int, Unit] = NO_UNITS
        wake_us = None
        waiting: Sequence[Query] = queued.in_order
        if self._former is None and models.any_loading:
            waiting = [query for query in waiting if query.model_id in profiles]
        if self._former is not None and waiting:
            formed = self._former.form(queued, now_us, profiles, in_service, len(free_cores), running, errors)
            waiting, units, wake_us = formed.queries, formed.units, formed.wake_us
        if models.limits:
            wake_us = earlier(wake_us, models.limits.next_us(now_us))
            stopped = len(gangs.models_under_way()) - len(running)
            waiting = models.limits.admissible(waiting, gangs.models_begun(), in_service + stopped)
        snapshot = Snapshot(
            now_us,
            waiting,
            running,
            free_cores,
            in_service,
            profiles,
            times.interference.level(now_us),
            gangs.free,
            self._way_back_us,
            errors,
            times.errors.gang_slowdown,
            queued.oldest_us,
            len(queued),
        )
        return snapshot, units, wake_us

    def _make_batches(self, decisions: Sequence[Decision], units: Mapping[int, Unit]) -> None:
        """Let units wait instead of the requests that they were formed of, in those batches that begin now."""
        started = [each.query_id for each in decisions if isinstance(each, Start) and each.query_id in units]
        for batch in dict.fromkeys(units[query_id].batch for query_id in started):
            assert batch is not None, "what is formed is part of a batch"
            self._requests.form(batch)

    def _batch_part(self, query: Query) -> BatchPart:
        unit = self._requests.waiting.get(query.query_id)
        if unit is None and (gang := self._execution.gangs.of_query(query.query_id)) is not None:
            unit = gang.unit
        return BatchPart(query.rows) if unit is None else unit.batch_part

    def _apply(self, decision: Decision, now_us: float) -> None:
        if isinstance(decision, Start):
            self._execution.start(decision, now_us)
            return
        match decision:
            case Stop():
                self._execution.stop(decision)
            case Resize():
                self._execution.resize(decision)
            case Replan():
                self._execution.replan(decision)
            case Reject():
                self._execution.reject(decision)
            case StartOver():
                self._execution.start_over(decision)
            case Wake(at_us):
                self.wake_us = at_us
