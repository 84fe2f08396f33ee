"""From what was measured of a kernel to what a tuning says of it."""

from collections.abc import Sequence
from statistics import fmean

from gangway.artifact.tuning import Finalist, Sample, TunedKernel
from gangway.scheduler.profiles import Table, drop_versions
from gangway.server.tuning.compiler_process import Kernel
from gangway.server.tuning.decisions import fastest_alone


def tuned_kernel(
    kernel: Kernel,
    qos_us: float,
    samples: Sequence[Sample],
    finalists: Sequence[int],
    alone_us: Sequence[Sequence[float]],
    tables: Sequence[Table],
    least_loss: float,
    most: int,
) -> TunedKernel:
    """Decide which finalists become versions.

    `finalists` are numbers of samples; each table of `alone_us` (on all cores) and of `tables` (rows of levels of
    interference; none without other cores) has a number, or a row, for each of them. The fastest alone is the first
    version; the others follow by falling blocking size.
    """
    first = fastest_alone(alone_us)
    by_level = tables or [[[time_us] for time_us in table] for table in alone_us]
    kept = drop_versions(by_level, first, least_loss, most)
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
            Finalist(number, fmean(table[place] for table in alone_us), tuple(tuple(table[place]) for table in tables))
            for place, number in enumerate(finalists)
        ),
        versions=tuple(samples[finalists[place]].candidate for place in (first, *others)),
    )
