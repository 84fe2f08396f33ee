"""When the policy is asked, and what it is shown."""

from collections.abc import Sequence

from gangway.scheduler.apply import Execution
from gangway.scheduler.models import ModelTable
from gangway.scheduler.policy import Decision, Policy, Query, Reject, Resize, RunningBlock, Snapshot, Start, Stop, Wake
from gangway.scheduler.requests import RequestBook
from gangway.scheduler.trace import TraceWriter
from gangway.scheduler.workers import WorkerTable


class Dispatcher:
    """Asks the policy when something has changed, or at the time that it asked for, and has its decisions applied."""

    def __init__(
        self,
        policy: Policy,
        execution: Execution,
        requests: RequestBook,
        workers: WorkerTable,
        models: ModelTable,
        trace: TraceWriter | None,
        way_back_us: float,
    ) -> None:
        self._policy = policy
        self._execution = execution
        self._requests = requests
        self._workers = workers
        self._models = models
        self._trace = trace
        self._way_back_us = way_back_us
        self.wake_us: float | None = None  # when the policy wants to be asked, if nothing happens before

    def dispatch(self, now_us: float) -> None:
        """Ask the policy if there may be something to decide."""
        execution = self._execution
        woken = self.wake_us is not None and now_us >= self.wake_us
        if not execution.changed and not woken:
            return
        if execution.gangs.settling(now_us):
            execution.changed = True  # and asked soon, when the policy can see that query, too
            return
        execution.changed = False
        self.wake_us = None
        waiting = self._requests.queries
        running = execution.gangs.running(now_us)
        if woken or waiting or (running and self._workers.free):
            snapshot = self._snapshot(waiting, running, now_us)
            decisions = self._policy.decide(snapshot)
            if self._trace is not None:
                self._trace.add(decisions, snapshot)
            for decision in decisions:
                self._apply(decision, now_us)

    def _snapshot(self, waiting: Sequence[Query], running: Sequence[RunningBlock], now_us: float) -> Snapshot:
        profiles = self._models.profiles
        if self._models.any_loading:
            waiting = [query for query in waiting if query.model_id in profiles]
        if self._models.limits:
            waiting = self._models.limits.admissible(waiting, self._execution.gangs.models_under_way())
        return Snapshot(
            now_us=now_us,
            waiting=waiting,
            running=running,
            free_cores=self._workers.free,
            core_count=self._workers.in_service,
            models=profiles,
            level=self._execution.interference.level(now_us),
            stretches=self._execution.stretches.factors,
            free_leases=self._execution.gangs.free,
            way_back_us=self._way_back_us,
        )

    def _apply(self, decision: Decision, now_us: float) -> None:
        match decision:
            case Start():
                self._execution.start(decision, now_us)
            case Stop():
                self._execution.stop(decision)
            case Resize():
                self._execution.resize(decision)
            case Reject():
                self._execution.reject(decision)
            case Wake(at_us):
                self.wake_us = at_us
