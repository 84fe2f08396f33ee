"""When the policy is asked, and what it is shown."""

import time
from collections.abc import Mapping, Sequence

from gangway.scheduler.apply import Execution
from gangway.scheduler.batching.former import BatchFormer
from gangway.scheduler.models import ModelTable
from gangway.scheduler.observability import TraceWriter
from gangway.scheduler.policy import (
    Decision,
    Policy,
    Query,
    Reject,
    Resize,
    RunningBlock,
    Snapshot,
    Start,
    StartOver,
    Stop,
    Wake,
)
from gangway.scheduler.requests import RequestTable
from gangway.scheduler.resources import WorkerTable
from gangway.scheduler.timeline import Place
from gangway.scheduler.units import Unit
from gangway.scheduler.waiting import WaitingQueries

PATIENCE = 4.0  # a decision's times may pass before the next one that is only about who waits for a core,
HURRIED = 1.0  # or so many, if somebody who runs may yield
MOST_PATIENCE_US = 5000.0  # whatever held up the scheduler
MOST_REST_US = 20_000.0  # whatever the policy says of those that run
CALM_US = 50_000.0  # that long may pass until one that is only about those who take no cores from others
# Newcomers: without a deadline, with one, for whom somebody who runs makes room (of a class below, or it is brief).
CALM, TIMED, ABOVE = range(3)


class Dispatcher:
    """Asks the policy when something has changed, or at the time that it asked for, and has its decisions applied.

    While no core is free, newcomers wait for the next decision if the last one was just now. They could only take cores
    from others, at the next layer boundary; and in an overload, when decisions take longest, hundreds come in a second.
    They wait longer while the policy knows that nobody who runs would yield, and hardly at all if somebody would. Those
    without a deadline, whose class is not above that of anybody who runs, take no cores from others: they wait longest,
    and nobody need wake the scheduler for them (`calm_us`).
    With a `former` the policy is shown batches: units that are made of waiting requests when one of them is to start.
    """

    def __init__(
        self,
        policy: Policy,
        execution: Execution,
        requests: RequestTable,
        workers: WorkerTable,
        models: ModelTable,
        former: BatchFormer | None,
        trace: TraceWriter | None,
        way_back_us: float,
    ) -> None:
        self._policy = policy
        self._execution = execution
        self._requests = requests
        self._workers = workers
        self._models = models
        self._former = former
        self._trace = trace
        self._way_back_us = way_back_us
        self._next_us = [0.0, 0.0, 0.0]  # when to decide about newcomers of each kind, if nothing happens before
        self._came = CALM  # those who may change most of those who have come since the last decision,
        self._highest = float("inf")  # and their highest class
        self.wake_us: float | None = None  # when policy or former want to be asked, if nothing happens before

    def came(self, query: Query) -> None:
        """A query waits from now on."""
        execution = self._execution
        execution.queue_changed = True
        if self._came < ABOVE and query.deadline_us is not None:
            self._came = ABOVE if self._is_let_through(query) else TIMED
        if query.priority < self._highest:  # no need to compare others like it
            self._highest = query.priority
            if any(query.priority < gang.unit.query.priority for gang in execution.gangs.all()):
                self._came = ABOVE

    def _is_let_through(self, query: Query) -> bool:
        """Whether others make room for it at once, as for one of a class above theirs."""
        model = self._models.profiles.get(query.model_id) if self._policy.brief_first else None
        return model is not None and model.is_brief

    def calm_us(self, now_us: float) -> float:
        """Return how long nothing need be heard of newcomers without a deadline, of class 0 or lower; 0: no time.

        Front ends do not ring for them then.
        """
        execution = self._execution
        calm_until_us = self._next_us[CALM]
        if execution.changed or self._workers.free or now_us >= calm_until_us:
            return 0.0
        above_all = all(gang.unit.query.priority <= 0 for gang in execution.gangs.all())
        return calm_until_us - now_us if execution.gangs.count and above_all else 0.0

    def dispatch(self, now_us: float) -> None:
        """Ask the policy if there may be something to decide."""
        execution = self._execution
        woken = self.wake_us is not None and now_us >= self.wake_us
        if not execution.changed and not woken:
            if not execution.queue_changed:
                return
            until_us = self._next_us[self._came]
            if now_us < until_us and not self._workers.free:
                self._wake_at(until_us)
                return
        if execution.gangs.settling(now_us):
            execution.changed = True  # and asked soon, when the policy can see that query, too
            return
        execution.settled()
        self._came, self._highest = CALM, float("inf")
        self.wake_us = None
        if not self._workers.in_service:
            return  # nothing to plan with, until a worker is there
        waiting = self._requests.queries
        running = execution.gangs.running(now_us)
        if woken or waiting or (running and self._workers.free):
            self._decide(waiting, running, now_us)
            self._be_patient(now_us, time.monotonic_ns() / 1e3)

    def _decide(self, waiting: WaitingQueries, running: Sequence[RunningBlock], now_us: float) -> None:
        snapshot, units, wake_us = self._snapshot(waiting, running, now_us)
        decisions = self._policy.decide(snapshot)
        if units:
            self._make_batches(decisions, units)
        if self._trace is not None:
            self._trace.add(decisions, snapshot, self._place)
        for decision in decisions:
            self._apply(decision, now_us)
        if wake_us is not None:
            self._wake_at(wake_us)

    def _be_patient(self, begin_us: float, end_us: float) -> None:
        """Set until when newcomers wait, after a decision that took so long."""
        yields_from_us = None if self._workers.free else self._policy.yields_from_us()
        times = PATIENCE if yields_from_us is None else HURRIED
        patient_until_us = timed_until_us = end_us + min(times * (end_us - begin_us), MOST_PATIENCE_US)
        if yields_from_us is not None:
            timed_until_us = max(patient_until_us, min(yields_from_us, end_us + MOST_REST_US))
        self._next_us = [end_us + CALM_US, timed_until_us, patient_until_us]

    def _wake_at(self, at_us: float) -> None:
        self.wake_us = at_us if self.wake_us is None else min(at_us, self.wake_us)

    def _snapshot(
        self, queued: WaitingQueries, running: Sequence[RunningBlock], now_us: float
    ) -> tuple[Snapshot, Mapping[int, Unit], float | None]:
        """Return what the policy sees, the batches among it, and when others could be formed."""
        models, gangs = self._models, self._execution.gangs
        workers, times = self._workers, self._execution.times
        units: Mapping[int, Unit] = {}
        wake_us = None
        waiting: Sequence[Query] = queued.in_order
        if self._former is None and models.any_loading:
            waiting = [query for query in waiting if query.model_id in models.profiles]
        if self._former is not None and queued:
            formed = self._former.form(
                queued,
                now_us,
                models.profiles,
                workers.in_service,
                len(workers.free),
                running,
                times.stretches.factors,
            )
            waiting, units, wake_us = formed.queries, formed.units, formed.wake_us
        if models.limits:
            waiting = models.limits.admissible(waiting, gangs.models_under_way())
        snapshot = Snapshot(
            now_us,
            waiting,
            running,
            workers.free,
            workers.in_service,
            models.profiles,
            times.interference.level(now_us),
            gangs.free,
            self._way_back_us,
            times.stretches.factors,
            times.stretches.wide_stretch,
        )
        return snapshot, units, wake_us

    def _make_batches(self, decisions: Sequence[Decision], units: Mapping[int, Unit]) -> None:
        """Let units wait instead of the requests that they were formed of, in those batches that begin now."""
        started = [each.query_id for each in decisions if isinstance(each, Start) and each.query_id in units]
        for batch in dict.fromkeys(units[query_id].batch for query_id in started):
            assert batch is not None, "what is formed is part of a batch"
            self._requests.form(batch)

    def _place(self, query: Query) -> Place:
        unit = self._requests.waiting.get(query.query_id)
        if unit is None and (gang := self._execution.gangs.of_query(query.query_id)) is not None:
            unit = gang.unit
        return Place(query.rows) if unit is None else unit.place

    def _apply(self, decision: Decision, now_us: float) -> None:
        if isinstance(decision, Start):
            self._execution.start(decision, now_us)
            return
        match decision:
            case Stop():
                self._execution.stop(decision)
            case Resize():
                self._execution.resize(decision)
            case Reject():
                self._execution.reject(decision)
            case StartOver():
                self._execution.start_over(decision)
            case Wake(at_us):
                self.wake_us = at_us
