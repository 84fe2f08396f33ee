"""What the pictures show, as tables: from a profile and a tuning, without drawing."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gangway.artifact.format import Manifest
from gangway.artifact.profile import Profile
from gangway.artifact.tuning import TunedKernel, Tuning
from gangway.measure.version_choice import acceptable, pareto_front
from gangway.scheduler.profiles import Table, mean_loss, thin_out

Cell = str | int | float
Row = Mapping[str, Cell]


@dataclass(frozen=True)
class Evidence:
    """All that was measured of a model. The profile is of the artifact with the tuning's versions."""

    manifest: Manifest
    profile: Profile
    tuning: Tuning


def speed_up(evidence: Evidence) -> list[Row]:
    """One row per layer and number of cores: time of its first version, one row of the batch, and speed-up over one."""
    rows: list[Row] = []
    for layer, measured in zip(evidence.manifest.layers, evidence.profile.layers, strict=True):
        times_us = [by_batch[0] for by_batch in measured.latency_us[0]]
        for cores, time_us in zip(evidence.profile.cores, times_us, strict=True):
            faster = times_us[0] / time_us if time_us else 1.0
            rows.append({"layer": layer.name, "cores": cores, "latency_us": time_us, "speed_up": faster})
    return rows


def interference(evidence: Evidence) -> list[Row]:
    """One row per kernel, finalist and level; performance 1 is the kernel's best without interference."""
    rows: list[Row] = []
    loads = [("none", 0, 0.0)] + [(point.kind, point.share, point.level) for point in evidence.tuning.interference]
    for number, kernel in enumerate(evidence.tuning.kernels):
        table = mean_table(kernel)
        best_us = min((times_us[0] for times_us in table), default=0.0)
        for place, times_us in enumerate(table):
            candidate = kernel.samples[kernel.finalists[place].sample].candidate
            for (kind, share, level), time_us in zip(loads, times_us, strict=True):
                rows.append(
                    {
                        "kernel": number,
                        "shape": kernel.name,
                        "finalist": place,
                        "blocking_bytes": candidate.blocking_bytes,
                        "parallelism": candidate.parallelism,
                        "kept": int(candidate in kernel.versions),
                        "load": kind,
                        "share": share,
                        "level": level,
                        "latency_us": time_us,
                        "performance": best_us / time_us if time_us else 1.0,
                    }
                )
    return rows


def loss_by_count(evidence: Evidence) -> list[Row]:
    """One row per number of versions: loss against all finalists, mean over layers and of the worst kernel, in percent.

    Each kernel's loss is the mean over the levels; versions are taken away in the order in which tuning drops them.
    """
    kernels = [kernel for kernel in evidence.tuning.kernels if len(kernel.finalists) > 1 and tables(kernel)]
    if not kernels:
        return []
    losses = [_losses(kernel) for kernel in kernels]
    rows: list[Row] = []
    for count in range(1, max(map(len, losses)) + 1):
        of_kernels = [loss[min(count, len(loss)) - 1] for loss in losses]
        uses = [kernel.uses for kernel in kernels]
        mean = sum(loss * use for loss, use in zip(of_kernels, uses, strict=True)) / sum(uses)
        rows.append({"versions": count, "mean_loss_percent": 100 * mean, "worst_loss_percent": 100 * max(of_kernels)})
    return rows


def pareto(evidence: Evidence) -> list[Row]:
    """One row per kernel and sample: its place in the plane of the trade-off, its time, and what became of it."""
    rows: list[Row] = []
    tuning = evidence.tuning
    for number, kernel in enumerate(tuning.kernels):
        allowed = acceptable(kernel.samples, kernel.qos_us, tuning.qos_us / max(1.0, tuning.isolated_us))
        front = pareto_front(kernel.samples, allowed)
        finalists = {finalist.sample for finalist in kernel.finalists}
        for place, sample in enumerate(kernel.samples):
            kept = sample.candidate in kernel.versions
            rows.append(
                {
                    "kernel": number,
                    "shape": kernel.name,
                    "knobs": sample.candidate.knobs,
                    "blocking_bytes": sample.candidate.blocking_bytes,
                    "parallelism": sample.candidate.parallelism,
                    "tasks": sample.candidate.tasks,
                    "latency_us": sample.latency_us,
                    "meets_qos": int(place in allowed),
                    "front": int(place in front),
                    "finalist": int(place in finalists),
                    "version": kernel.versions.index(sample.candidate) if kept else -1,
                }
            )
    return rows


def version_counts(evidence: Evidence) -> list[Row]:
    """One row per number of versions: how many layers have so many."""
    counts = Counter(len(layer.versions) for layer in evidence.manifest.layers)
    return [{"versions": count, "layers": counts[count]} for count in range(1, max(counts) + 1)]


SERIES: Mapping[str, Callable[[Evidence], list[Row]]] = {
    "speed_up": speed_up,
    "interference": interference,
    "loss_by_count": loss_by_count,
    "pareto": pareto,
    "version_counts": version_counts,
}
"""By name of the CSV file and of the picture."""


def mean_table(kernel: TunedKernel) -> Table:
    """Microseconds by finalist and level, the mean of the independent tables; empty without interference."""
    return [
        [sum(times_us) / len(times_us) for times_us in zip(*finalist.disturbed_us, strict=True)]
        for finalist in kernel.finalists
        if finalist.disturbed_us
    ]


def tables(kernel: TunedKernel) -> list[Table]:
    """The independent tables: microseconds by finalist and level; none without interference."""
    return [list(table) for table in zip(*(finalist.disturbed_us for finalist in kernel.finalists), strict=True)]


def first_finalist(kernel: TunedKernel) -> int:
    """Return which finalist became the first version."""
    candidates = [kernel.samples[finalist.sample].candidate for finalist in kernel.finalists]
    return candidates.index(kernel.versions[0])


def most_telling(tuning: Tuning, count: int, telling: Callable[[TunedKernel], float]) -> Sequence[int]:
    """Return the numbers of the `count` kernels, among those with several samples, that `telling` rates highest."""
    several = [number for number, kernel in enumerate(tuning.kernels) if len(kernel.samples) > 1]
    return sorted(several, key=lambda number: -telling(tuning.kernels[number]))[:count]


def single_loss(kernel: TunedKernel) -> float:
    """Return what it costs, on average over the levels, to have the first version only."""
    found = tables(kernel)
    return mean_loss([first_finalist(kernel)], found) if found else 0.0


def time_share_us(kernel: TunedKernel) -> float:
    """Return the time of all layers of a kernel, first version, alone."""
    return kernel.uses * kernel.finalists[first_finalist(kernel)].latency_us


def _losses(kernel: TunedKernel) -> list[float]:
    """Mean loss with 1, 2, ... versions."""
    found = tables(kernel)
    sets = [kept for kept, _ in thin_out(found, first_finalist(kernel))]
    return [mean_loss(kept, found) for kept in reversed(sets)]
