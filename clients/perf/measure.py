"""Runs of a workload: one at a given rate, or as many as the search for the highest rate asks for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gangway.clients.connection import ClientError, Connection, RefusedError, Tls
from gangway.clients.open_loop import OpenLoopRun, drive
from gangway.clients.perf.prepare import Workload
from gangway.workload.arrivals import Arrivals, poisson, poisson_for
from gangway.workload.mix import capacity_per_s
from gangway.workload.outcomes import Outcomes, Summary, summarise
from gangway.workload.search import Found, highest_rate

# What the server says of a run: the difference of two ModelStatistics answers.

OWN_PREFIX = "gangway_"


@dataclass(frozen=True)
class ServerSide:
    """Of one model: requests answered, nanoseconds in queue and compute altogether, counts that only Gangway has."""

    requests: int
    queue_ns: int
    compute_ns: int
    own: Mapping[str, int]

    def since(self, before: "ServerSide") -> "ServerSide":
        """Return what happened after `before`."""
        return ServerSide(
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


def server_side(connection: Connection, names: Sequence[str]) -> dict[str, ServerSide]:
    """Return the counters of each model since it was loaded; of none if the server keeps no statistics."""
    try:
        answers = {name: connection.model_statistics(name) for name in names}
    except RefusedError:
        return {}
    found = {}
    for name, answer in answers.items():
        stats = [model.inference_stats for model in answer.model_stats]
        own = {
            key.removeprefix(OWN_PREFIX): value.success.count
            for model in answer.model_stats
            for key, value in model.response_stats.items()
            if key.startswith(OWN_PREFIX)
        }
        found[name] = ServerSide(
            sum(stat.success.count for stat in stats),
            sum(stat.queue.ns for stat in stats),
            sum(stat.compute_infer.ns for stat in stats),
            own,
        )
    return found


FIRST_LOAD = 0.3  # where a search begins, as a share of the capacity
LOWEST_LOAD = 0.01  # and where it ends, if nothing carries
FEWEST_QUERIES = 20  # in a run of a search


@dataclass(frozen=True)
class Length:
    """How long a run is: so many seconds or so many queries, after a warm-up that is sent but does not count."""

    seconds: float
    queries: int | None
    warm_up_s: float


@dataclass(frozen=True)
class Run:
    """One run. `rate_per_s` is what was asked for; None: arrivals came from a file. `outcomes` begin after warm-up."""

    rate_per_s: float | None
    seed: int
    load: OpenLoopRun
    outcomes: Outcomes
    summary: Summary
    server: Mapping[str, ServerSide]

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
class Goal:
    """A share of queries in time: of all, or (`each`) of every model's."""

    share: float
    each: bool

    def share_of(self, summary: Summary, target: str) -> float:
        """Return the share that counts for the goal."""
        return summary.least_satisfied(target) if self.each else summary.total.satisfied[target] or 0.0


@dataclass
class Session:
    """Everything that stays the same from run to run, and the runs so far."""

    url: str
    requests: Mapping[str, bytes]
    workload: Workload
    length: Length
    seed: int
    timeout_s: float
    progress: Callable[[Run], None]
    tls: Tls | None = None
    runs: list[Run] = field(default_factory=list)
    _known: dict[tuple[float, int], Run] = field(default_factory=dict)

    @property
    def capacity_per_s(self) -> float:
        """The rate of a machine that runs one query at a time."""
        return capacity_per_s(self.workload.mix, self.workload.isolated_us)

    def at_rate(self, rate_per_s: float, attempt: int = 0) -> Run:
        """Measure a rate; the same one and attempt is measured once. Attempts are seeds of their own."""
        key = (rate_per_s, attempt)
        if key not in self._known:
            seed = self.seed + attempt
            self._known[key] = self.of_arrivals(self._arrivals(rate_per_s, seed), rate_per_s, seed)
        return self._known[key]

    def of_arrivals(self, arrivals: Arrivals, rate_per_s: float | None, seed: int) -> Run:
        """Measure given arrivals. Raises ClientError."""
        if not len(arrivals):
            raise ClientError("there are no queries: a longer run, or a higher rate")
        with Connection(self.url, self.timeout_s, self.tls) as connection:
            before = server_side(connection, list(self.requests))
            load = drive(self.url, self.requests, arrivals, self.timeout_s, tls=self.tls)
            after = server_side(connection, list(self.requests))
        counted = load.outcomes.since(self.length.warm_up_s * 1e6)
        run = Run(rate_per_s, seed, load, counted, self.summarise(counted), _differences(before, after))
        self.runs.append(run)
        self.progress(run)
        return run

    def summarise(self, outcomes: Outcomes) -> Summary:
        """Sum up outcomes under this workload's targets."""
        isolated = [self.workload.isolated_us[name] for name in outcomes.names]
        return summarise(outcomes, self.workload.targets_us, isolated)

    def search(self, goal: Goal, step: float, votes: int, start_per_s: float | None) -> dict[str, Found]:
        """Return the highest rate that reaches the goal, by name of the target. They share what they measure."""
        start = start_per_s or FIRST_LOAD * self.capacity_per_s
        fewest = 0.0 if self.length.queries else FEWEST_QUERIES / self.length.seconds
        lowest = min(start, max(LOWEST_LOAD * self.capacity_per_s, fewest))

        def search_for(target: str) -> Found:
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


def _differences(before: Mapping[str, ServerSide], after: Mapping[str, ServerSide]) -> dict[str, ServerSide]:
    return {name: after[name].since(before[name]) for name in after if name in before}
