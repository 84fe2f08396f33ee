"""Which samples of a kernel become its versions: VELTAIR's Algorithm 1 (Liu et al., ASPLOS 2022), pure.

Its last step, which versions are dropped, is in `scheduler/profiles.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from gangway.artifact.tuning import CandidateTime, Finalist, KnobCandidate, TunedKernel
from gangway.scheduler.profiles import SAME, Table, drop_versions

STATIC: Final = 0  # number of the static choice among samples and finalists


@dataclass(frozen=True)
class KernelChoice:
    """A distinct kernel of the model and what may compute it, the static choice first."""

    name: str
    operator: str
    uses: int
    candidates: tuple[KnobCandidate, ...]


def tuned_kernel(
    kernel: KernelChoice,
    qos_us: float,
    samples: Sequence[CandidateTime],
    finalists: Sequence[int],
    gang_us: Sequence[Table],
    tables: Sequence[Table],
    least_loss: float,
    most: int,
) -> TunedKernel:
    """Decide which finalists become versions.

    `finalists` are numbers of samples; each table of `gang_us` (rows of gangs' sizes, all cores last) and of `tables`
    (rows of levels of interference; none without other cores) has a row for each of them. The fastest alone on all
    cores is the first version; the others follow by falling blocking size. On no size of a gang, and at no level, the
    best version is slower than the static choice.
    """
    alone_us = [[row[-1] for row in table] for table in gang_us]
    first = fastest_alone(alone_us)
    situations = gang_us
    if tables:
        pairs = zip(gang_us, tables, strict=True)
        situations = [[[*alone, *disturbed] for alone, disturbed in zip(*pair, strict=True)] for pair in pairs]
    kept = drop_versions(situations, first, least_loss, most, STATIC)
    others = sorted(
        (place for place in kept if place != first),
        key=lambda place: -samples[finalists[place]].candidate.blocking_bytes,
    )
    return TunedKernel(
        name=kernel.name,
        operator=kernel.operator,
        uses=kernel.uses,
        qos_us=qos_us,
        samples=tuple(samples),
        finalists=tuple(
            Finalist(
                number,
                fmean(table[place] for table in alone_us),
                tuple(tuple(table[place]) for table in tables),
                tuple(tuple(table[place]) for table in gang_us),
            )
            for place, number in enumerate(finalists)
        ),
        versions=tuple(samples[finalists[place]].candidate for place in (first, *others)),
    )


def layer_qos_us(qos_us: float, flops: Sequence[int], sizes_bytes: Sequence[int]) -> tuple[float, ...]:
    """Return each layer's share of the model's QoS: in proportion to its operations.

    A byte counts as an operation where a layer has none (it only moves numbers).
    """
    weights = [operations or size_bytes for operations, size_bytes in zip(flops, sizes_bytes, strict=True)]
    return tuple(qos_us * weight / max(1, sum(weights)) for weight in weights)


def choose_finalists(samples: Sequence[CandidateTime], qos_us: float, slack: float, most: int) -> tuple[int, ...]:
    """Return the samples that are measured again: static choice, fastest, then evenly spaced ones of the Pareto front.

    At most `most`, but always the first two.
    """
    fastest = min(range(len(samples)), key=lambda number: samples[number].latency_us)
    sure = tuple(dict.fromkeys((STATIC, fastest)))
    front = pareto_front(samples, acceptable(samples, qos_us, slack))
    return sure + evenly_spaced([number for number in front if number not in sure], max(0, most - len(sure)))


def acceptable(samples: Sequence[CandidateTime], qos_us: float, slack: float) -> tuple[int, ...]:
    """Return the numbers of the samples that meet their layer's QoS.

    Operations say too little of a layer that waits for memory. If not even the fastest meets its share, the layer may
    take `slack` times the fastest: what the model may take, relative to its time alone.
    """
    fastest_us = min(sample.latency_us for sample in samples)
    bound_us = qos_us if fastest_us <= qos_us else max(1.0, slack) * fastest_us
    return tuple(number for number, sample in enumerate(samples) if sample.latency_us <= bound_us)


def pareto_front(samples: Sequence[CandidateTime], numbers: Sequence[int]) -> tuple[int, ...]:
    """Return those of `numbers` that no other one dominates, by falling blocking size.

    More is better on both axes: one sample dominates another if it has at least its blocking size AND at least its
    parallelism, and more of one of them. Of samples equal in both the fastest stays. Speed is no axis: the slow were
    dropped before.
    """

    def order(number: int) -> tuple[int, int, float]:
        sample = samples[number]
        return -sample.candidate.blocking_bytes, -sample.candidate.parallelism, sample.latency_us

    front: list[int] = []
    for number in sorted(numbers, key=order):
        if not front or samples[number].candidate.parallelism > samples[front[-1]].candidate.parallelism:
            front.append(number)
    return tuple(front)


def evenly_spaced(items: Sequence[int], count: int) -> tuple[int, ...]:
    """Return up to `count` of `items`, first and last among them (one: the middle), the others at equal distances."""
    if len(items) <= count:
        return tuple(items)
    if count <= 1:
        return tuple(items[len(items) // 2] for _ in range(count))
    return tuple(items[round(place * (len(items) - 1) / (count - 1))] for place in range(count))


def fastest_alone(alone_us: Sequence[Sequence[float]]) -> int:
    """Return the fastest version, but the static choice where nothing is faster by more than SAME in every table.

    `alone_us[table][version]`: microseconds, independent measurements of the same.
    """
    versions = range(len(alone_us[0]))
    faster = [v for v in versions if all(table[v] < (1 - SAME) * table[STATIC] for table in alone_us)]
    return min(faster, key=lambda version: sum(table[version] for table in alone_us), default=STATIC)
