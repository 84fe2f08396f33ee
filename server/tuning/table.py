"""A tuning for people: a table of kernels and a few lines about the whole."""

from collections import Counter

from rich.table import Table

from gangway.artifact.tuning import Finalist, TunedKernel, Tuning
from gangway.server.tuning.decisions import STATIC


def kernel_table(tuning: Tuning) -> Table:
    """One line per distinct kernel."""
    table = Table(title=f"{tuning.model_name}, one row, {tuning.cores} cores", title_justify="left")
    for heading in ("layer", "operator"):
        table.add_column(heading, overflow="fold")
    for heading in ("uses", "samples", "QoS us", "static us", "first us", "gain"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("versions: blocking KB, parallelism", overflow="fold")
    for kernel in tuning.kernels:
        table.add_row(*_cells(kernel))
    return table


def _cells(kernel: TunedKernel) -> list[str]:
    static_us, first_us = finalist_times(kernel)
    cells = [kernel.name, kernel.operator, str(kernel.uses), str(len(kernel.samples)), f"{kernel.qos_us:.0f}"]
    cells += [f"{static_us:.1f}", f"{first_us:.1f}", f"{static_us / first_us - 1:.1%}" if first_us else "-"]
    versions = [f"{version.blocking_bytes / 1e3:.0f}, {version.parallelism}" for version in kernel.versions]
    return [*cells, "; ".join(versions)]


def finalist_times(kernel: TunedKernel) -> tuple[float, float]:
    """Return microseconds alone of the static choice and of the first version, measured side by side."""

    def knobs(finalist: Finalist) -> str:
        return kernel.samples[finalist.sample].candidate.knobs

    by_knobs = {knobs(finalist): finalist.latency_us for finalist in kernel.finalists}
    return by_knobs[kernel.samples[STATIC].candidate.knobs], by_knobs[kernel.versions[0].knobs]


def summary(tuning: Tuning) -> list[str]:
    """Lines about the whole model."""
    pairs = [(kernel.uses, *finalist_times(kernel)) for kernel in tuning.kernels]
    static_us = sum(uses * static for uses, static, _ in pairs)
    first_us = sum(uses * first for uses, _, first in pairs)
    counts = Counter(len(tuning.kernels[number].versions) for number in tuning.layers)
    layers = ", ".join(f"{counts[count]} with {count}" for count in sorted(counts))
    searches = [
        f"MetaSchedule, {search.trials} trials, {tuning.kernels[search.kernel].name}: "
        f"{search.flops / search.searched_us / 1e3:.1f} GFLOP/s on one core, the template "
        f"{search.flops / search.template_us / 1e3:.1f}"
        for search in tuning.searches
    ]
    samples = sum(len(kernel.samples) for kernel in tuning.kernels)
    points = ", ".join(f"{point.kind} {point.share} %: {point.level:.2f}" for point in tuning.interference)
    return [
        f"QoS {tuning.qos_us / 1e3:.4g} ms, {tuning.isolated_us / 1e3:.4g} ms alone; sum of the layers: static choices "
        f"{static_us / 1e3:.4g} ms, first versions {first_us / 1e3:.4g} ms ({static_us / first_us - 1:+.1%})",
        f"layers by number of versions: {layers}",
        f"levels of interference: {points}" if points else "on one core there is no other one to disturb from",
        *searches,
        f"{samples} samples of {len(tuning.kernels)} kernels in {tuning.seconds:.0f} s",
    ]
