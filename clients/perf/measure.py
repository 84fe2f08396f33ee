"""Runs of a workload: one at a given rate, or as many as the search for the highest rate asks for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gangway.clients.connection import ServerConnection
from gangway.clients.errors import ClientError, RefusedError, UnreachableError
from gangway.clients.open_loop import RAW, OpenLoopRun, drive
from gangway.clients.perf.prepare import Workload
from gangway.clients.perf.progress import progress_line
from gangway.clients.tls import Tls
from gangway.workload.arrivals import Arrivals, poisson, poisson_for
from gangway.workload.mix import capacity_per_s
from gangway.workload.outcomes import Outcomes, Summary, summarise
from gangway.workload.search import SearchResult, highest_rate

FIRST_LOAD = 0.3  # where a search begins, as a share of the capacity
MIN_LOAD = 0.01  # where it ends, if no rate reaches the goal
MIN_QUERIES = 20  # in a run of a search, of each model whose share counts
GANGWAY_PREFIX = "gangway_"  # of counts that only Gangway has


@dataclass(frozen=True)
class ServerCounters:
    """Of one model, by ModelStatistics: answered requests, nanoseconds in queue and compute, Gangway's own counts."""

    requests: int
    queue_ns: int
    compute_ns: int
    own: Mapping[str, int]

    def since(self, before: "ServerCounters") -> "ServerCounters":
        """Return what happened after `before`."""
        return ServerCounters(
            self.requests - before.requests,
            self.queue_ns - before.queue_ns,
            self.compute_ns - before.compute_ns,
            {name: count - before.own.get(name, 0) for name, count in self.own.items()},
        )

    @property
    def mean_queue_us(self) -> float:
        """Microseconds that a request waited."""
        return self.queue_ns / self.requests / 1000 if self.requests else 0.0

    @property
    def mean_compute_us(self) -> float:
        """Microseconds from a request's first layer to its last, pauses included."""
        return self.compute_ns / self.requests / 1000 if self.requests else 0.0


@dataclass(frozen=True)
class RunLength:
    """How long a run is: so many seconds or so many queries, after a warm-up that is sent but does not count."""

    seconds: float
    queries: int | None
    warm_up_s: float


@dataclass(frozen=True)
class LoadRun:
    """One run. `rate_per_s` is the scheduled rate; None: arrivals came from a file. `outcomes` begin after warm-up."""

    rate_per_s: float | None
    seed: int
    load: OpenLoopRun
    outcomes: Outcomes
    summary: Summary
    server: Mapping[str, ServerCounters]

    @property
    def lag_us(self) -> tuple[float, float] | None:
        """By how much requests left late: median and 99th percentile. None: not known."""
        if not self.load.lag_us.size:
            return None
        p50, p99 = np.percentile(self.load.lag_us, (50, 99)).tolist()
        return p50, p99

    @property
    def cpu_us(self) -> float:
        """CPU time of this process for a request."""
        return self.load.cpu_s / len(self.load.outcomes) * 1e6


@dataclass(frozen=True)
class PerfGoal:
    """A share of queries in time: of all, or (`each`) of every model's."""

    share: float
    each: bool

    def share_of(self, summary: Summary, target: str) -> float:
        """Return the share that counts for the goal."""
        return summary.least_satisfied(target) if self.each else summary.total.satisfied[target] or 0.0


class InterruptedRunError(Exception):
    """The user has ended a run, which is the last one of its session."""

    def __init__(self, run: LoadRun) -> None:
        super().__init__("interrupted")
        self.run = run


@dataclass
class Session:
    """Everything that stays the same from run to run, and the runs so far."""

    url: str
    requests: Mapping[str, bytes]
    workload: Workload
    length: RunLength
    seed: int
    timeout_s: float
    progress: Callable[[LoadRun], None]
    tls: Tls | None = None
    client: str = RAW
    runs: list[LoadRun] = field(default_factory=list)
    _measured: dict[tuple[float, int], LoadRun] = field(default_factory=dict)

    @property
    def capacity_per_s(self) -> float:
        """The rate of a machine that runs one query at a time."""
        return capacity_per_s(self.workload.mix, self.workload.isolated_us)

    def at_rate(self, rate_per_s: float, attempt: int = 0) -> LoadRun:
        """Measure a rate; the same one and attempt is measured once. Attempts are seeds of their own."""
        key = (rate_per_s, attempt)
        if key not in self._measured:
            seed = self.seed + attempt
            self._measured[key] = self.of_arrivals(self._arrivals(rate_per_s, seed), rate_per_s, seed)
        return self._measured[key]

    def of_arrivals(self, arrivals: Arrivals, rate_per_s: float | None, seed: int) -> LoadRun:
        """Measure given arrivals. Raises ClientError, InterruptedRunError.

        The run of a server that ends meanwhile is the last one of the session. Raises UnreachableError then.
        """
        if not len(arrivals):
            raise ClientError("there are no queries: a longer run, or a higher rate")
        with ServerConnection(self.url, self.timeout_s, self.tls) as connection:
            before = server_counters(connection, list(self.requests))
            load = drive(
                self.url, self.requests, arrivals, self.timeout_s, tls=self.tls, client=self.client, watch=progress_line
            )
            ended_by = load.ended_by
            after: dict[str, ServerCounters] = {}
            try:
                after = server_counters(connection, list(self.requests))
            except UnreachableError as error:
                ended_by = ended_by or error
        counted = load.outcomes.since(self.length.warm_up_s * 1e6)
        if ended_by is not None and not len(counted):  # during the warm-up
            raise ended_by
        run = LoadRun(rate_per_s, seed, load, counted, self.summarise(counted), _differences(before, after))
        self.runs.append(run)
        self.progress(run)
        if isinstance(ended_by, KeyboardInterrupt):
            raise InterruptedRunError(run)
        if ended_by is not None:
            raise ended_by
        return run

    def summarise(self, outcomes: Outcomes) -> Summary:
        """Sum up outcomes under this workload's targets."""
        isolated = [self.workload.isolated_us[name] for name in outcomes.names]
        return summarise(outcomes, self.workload.targets_us, isolated)

    def search(self, goal: PerfGoal, step: float, votes: int, start_per_s: float | None) -> dict[str, SearchResult]:
        """Return the highest rate that reaches the goal, by name of the target. They share what they measure."""
        start = start_per_s or FIRST_LOAD * self.capacity_per_s
        rarest = min(self.workload.mix.shares) if goal.each else 1.0
        fewest = 0.0 if self.length.queries else MIN_QUERIES / (self.length.seconds * rarest)
        lowest = min(start, max(MIN_LOAD * self.capacity_per_s, fewest))

        def search_for(target: str) -> SearchResult:
            def measure(rate_per_s: float, attempt: int) -> float:
                return goal.share_of(self.at_rate(rate_per_s, attempt).summary, target)

            return highest_rate(measure, goal.share, start, step, votes, lowest)

        return {target: search_for(target) for target in self.workload.targets_us}

    def _arrivals(self, rate_per_s: float, seed: int) -> Arrivals:
        mix, length = self.workload.mix, self.length
        if length.queries is None:
            return poisson_for(mix, rate_per_s, length.warm_up_s + length.seconds, seed)
        before = len(poisson_for(mix, rate_per_s, length.warm_up_s, seed)) if length.warm_up_s else 0
        return poisson(mix, rate_per_s, before + length.queries, seed)


def server_counters(connection: ServerConnection, names: Sequence[str]) -> dict[str, ServerCounters]:
    """Return the counters of each model since it was loaded; of none if the server keeps no statistics."""
    try:
        answers = {name: connection.model_statistics(name) for name in names}
    except RefusedError:
        return {}
    found = {}
    for name, answer in answers.items():
        stats = [model.inference_stats for model in answer.model_stats]
        own = {
            key.removeprefix(GANGWAY_PREFIX): value.success.count
            for model in answer.model_stats
            for key, value in model.response_stats.items()
            if key.startswith(GANGWAY_PREFIX)
        }
        found[name] = ServerCounters(
            sum(stat.success.count for stat in stats),
            sum(stat.queue.ns for stat in stats),
            sum(stat.compute_infer.ns for stat in stats),
            own,
        )
    return found


def _differences(
    before: Mapping[str, ServerCounters], after: Mapping[str, ServerCounters]
) -> dict[str, ServerCounters]:
    return {name: after[name].since(before[name]) for name in after if name in before}
