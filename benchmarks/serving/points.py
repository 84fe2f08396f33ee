"""What one open-loop run says, as a line of JSON, and which share of capacity a ladder of such runs carries. Pure."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gangway.workload.outcomes import OutcomeRow, Summary

EACH, ALL = "each", "all"  # whose queries a criterion is about: every model's, or all together
SATISFIED = 0.95
Z = 1.96  # of a two-sided interval of 95 %


Key = tuple[str, str, float, int, float, str]  # server, mix, share of capacity, seed, target, client


@dataclass(frozen=True)
class Counts:
    """One model's queries in one run, or all of them. `in_time` by multiple of the isolated latency: "3x"."""

    queries: int
    in_time: Mapping[str, int]
    mean_over_isolated: float | None  # of answered queries
    mean_us: float | None
    p99_us: float | None
    errors: Mapping[str, int]

    @property
    def answered(self) -> int:
        """Queries that were no errors."""
        return self.queries - sum(self.errors.values())


@dataclass(frozen=True)
class Point:
    """One run of one server: a mix at a share of capacity with a seed. `target`: the multiple that a server aims at."""

    server: str
    mix: str
    share: float
    seed: int
    target: float
    rate_per_s: float
    seconds: float
    models: Mapping[str, Counts]
    total: Counts
    server_cpu_s: float
    client_cpu_s: float
    latest_us: float  # the most that the client was behind its schedule
    slowness: float  # of the machine: isolated latencies before this run over those when the benchmark began
    stolen: float = 0.0  # share of the machine's time that the hypervisor gave to others
    drift: float = 1.0  # of the machine: a reference query after this run over the same before it
    client: str = "raw"  # of `gangway perf --client`
    by_precision: Mapping[str, int] = field(default_factory=dict)  # requests, where deadlines choose

    @property
    def key(self) -> Key:
        """What a run that goes on does not measure again."""
        return self.server, self.mix, self.share, self.seed, self.target, self.client


@dataclass(frozen=True, order=True)
class Criterion:
    """So many queries of each model, or of all, within a multiple of the isolated latency."""

    whose: str
    multiple: str

    def __str__(self) -> str:
        whose = "each model's" if self.whose == EACH else "all"
        return f"{SATISFIED:.0%} of {whose} queries within {self.multiple}"


def counts_of(row: OutcomeRow) -> Counts:
    """Turn shares into numbers of queries, which can be added up over runs."""
    in_time = {name: round(share * row.queries) for name, share in row.satisfied.items() if share is not None}
    return Counts(row.queries, in_time, row.over_isolated, row.mean_us, row.p99_us, dict(row.errors))


def models_of(summary: Summary) -> dict[str, Counts]:
    """Return the counts of every model of a run."""
    return {row.name: counts_of(row) for row in summary.models}


def encode(point: Point) -> str:
    """Return one line of JSON."""
    return json.dumps(asdict(point))


def decode(line: str) -> Point:
    """Read what `encode` wrote. Raises ValueError, TypeError, KeyError."""
    fields: dict[str, Any] = json.loads(line)
    models = {name: Counts(**counts) for name, counts in fields.pop("models").items()}
    return Point(models=models, total=Counts(**fields.pop("total")), **fields)


def encode_file(isolated_us: Mapping[str, float], points: Iterable[Point]) -> str:
    """Return a file of points: the isolated latencies that they were measured with, then a line for each."""
    return "".join(line + "\n" for line in (json.dumps({"isolated_us": dict(isolated_us)}), *map(encode, points)))


def decode_file(text: str) -> tuple[dict[str, float], list[Point]]:
    """Read such a file. What follows its last line break was being written when a run was killed: it is left out."""
    first, *rest = text.split("\n")[:-1] or ['{"isolated_us": {}}']
    return json.loads(first)["isolated_us"], [decode(line) for line in rest]


def satisfied(points: Sequence[Point], criterion: Criterion) -> float:
    """Return the share in time over all runs together; of each model's queries it is that of the worst model."""
    if criterion.whose == ALL:
        return _share([point.total for point in points], criterion.multiple)
    names = points[0].models
    return min(_share([point.models[name] for point in points], criterion.multiple) for name in names)


def _share(counts: Sequence[Counts], multiple: str) -> float:
    """A model that was not asked was not late either."""
    queries = sum(one.queries for one in counts)
    return sum(one.in_time.get(multiple, 0) for one in counts) / queries if queries else 1.0


def highest_share(points: Iterable[Point], criterion: Criterion) -> float:
    """Return the highest share of capacity at which the criterion holds, there and at all lower ones; 0 if nowhere."""
    by_share: dict[float, list[Point]] = {}
    for point in points:
        by_share.setdefault(point.share, []).append(point)
    best = 0.0
    for share in sorted(by_share):
        if satisfied(by_share[share], criterion) < SATISFIED:
            break
        best = share
    return best


def over_isolated(points: Sequence[Point]) -> float:
    """Return the mean latency over isolated, over all answered queries of these runs; NaN if there were none."""
    answered = sum(point.total.answered for point in points)
    if not answered:
        return math.nan
    return sum((point.total.mean_over_isolated or 0.0) * point.total.answered for point in points) / answered


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Return Wilson's interval of 95 % for a share (E. B. Wilson, 1927): right also close to 1 and for few trials."""
    if not trials:
        return 0.0, 1.0
    share = successes / trials
    centre = share + Z * Z / (2 * trials)
    reach = Z * math.sqrt(share * (1 - share) / trials + Z * Z / (4 * trials * trials))
    scale = 1 + Z * Z / trials
    return max(0.0, (centre - reach) / scale), min(1.0, (centre + reach) / scale)
