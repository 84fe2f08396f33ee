"""The pictures, drawn from the tables of `report_tables.py`. Imports matplotlib."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator, NullFormatter

from gangway.measure.report_tables import Evidence, Row, most_telling, single_loss, time_share_us

PANELS: Final = 4  # kernels in one picture; the CSV files have all
DPI: Final = 150
_MARKS: Final = "osD^v"
_LEGEND: Final = {"fontsize": 8, "framealpha": 0.9}


def draw_speed_up(evidence: Evidence, rows: Sequence[Row]) -> Figure:
    """Figure 4a of VELTAIR: speed-up of each layer over the number of cores."""
    figure, axes = _single()
    by_layer = _grouped(rows, "layer")
    cores = list(evidence.profile.cores)
    largest = max((_column(mine, "latency_us")[0] for mine in by_layer.values()), default=1.0)
    for mine in by_layer.values():
        share = _column(mine, "latency_us")[0] / max(largest, 1e-9)
        axes.plot(
            cores, _column(mine, "speed_up"), color="tab:blue", alpha=0.15 + 0.6 * share, linewidth=0.8 + 2 * share
        )
    whole = [evidence.profile.isolated_us[0][0] / row[0] for row in evidence.profile.isolated_us]
    axes.plot([], [], color="tab:blue", label="a layer (the thicker, the longer it takes)")
    axes.plot(cores, whole, "ko-", linewidth=2, label="whole model")
    axes.plot(cores, cores, "--", color="grey", label="ideal")
    axes.set(xlabel="cores", ylabel="speed-up over one core", xticks=cores, ylim=(0, None))
    return _finish(figure, axes, f"{evidence.tuning.model_name}: speed-up of its {len(by_layer)} layers with cores")


def draw_interference(evidence: Evidence, rows: Sequence[Row]) -> Figure:
    """Figure 6: performance of a kernel's versions over the level of interference."""
    numbers = most_telling(evidence.tuning, PANELS, single_loss)
    figure, panels = _grid(len(numbers))
    for axes, number in zip(panels, numbers, strict=False):
        mine = [row for row in rows if row["kernel"] == number]
        for place, finalist in enumerate(_grouped(mine, "finalist").values()):
            ordered = sorted(finalist, key=lambda row: float(row["level"]))
            kept = bool(ordered[0]["kept"])
            label = f"{float(ordered[0]['blocking_bytes']) / 1e3:.0f} KB, {ordered[0]['parallelism']}"
            style = {"linestyle": "-" if kept else ":", "linewidth": 1.8 if kept else 1.0}
            axes.plot(
                _column(ordered, "level"), _column(ordered, "performance"), marker=_MARKS[place % len(_MARKS)],
                markersize=4, label=label + (", kept" if kept else ""), **style,
            )  # fmt: skip
        axes.set(xlabel="measured level of interference", ylabel="performance (best alone = 1)", ylim=(0, None))
        axes.set_title(evidence.tuning.kernels[number].name, fontsize=9)
        axes.legend(title="blocking, parallelism", title_fontsize=8, **_LEGEND)
    title = f"{evidence.tuning.model_name}: versions under interference, the kernels that one version suits least"
    return _finish_grid(figure, title)


def draw_loss_by_count(evidence: Evidence, rows: Sequence[Row]) -> Figure:
    """Figure 7: what fewer versions lose."""
    figure, axes = _single()
    counts = _column(rows, "versions")
    axes.plot(counts, _column(rows, "mean_loss_percent"), "o-", label="mean of the layers")
    axes.plot(counts, _column(rows, "worst_loss_percent"), "s--", label="worst kernel")
    axes.set(xlabel="versions of a layer", ylabel="loss against all finalists, %", xticks=counts, ylim=(0, None))
    return _finish(figure, axes, f"{evidence.tuning.model_name}: loss by number of versions, mean over the levels")


def draw_pareto(evidence: Evidence, rows: Sequence[Row]) -> Figure:
    """Figure 9: samples in the plane of blocking size and parallelism, and the front."""
    numbers = most_telling(evidence.tuning, PANELS, time_share_us)
    figure, panels = _grid(len(numbers))
    for axes, number in zip(panels, numbers, strict=False):
        _draw_front(figure, axes, [row for row in rows if row["kernel"] == number])
        axes.set_title(evidence.tuning.kernels[number].name, fontsize=9)
    title = f"{evidence.tuning.model_name}: samples and Pareto front, the kernels that take longest"
    return _finish_grid(figure, title)


def draw_version_counts(evidence: Evidence, rows: Sequence[Row]) -> Figure:
    """Figure 14c: how many layers have how many versions."""
    figure, axes = _single()
    bars = axes.bar(_column(rows, "versions"), _column(rows, "layers"), width=0.6)
    axes.bar_label(bars, fmt="%d")
    axes.set(xlabel="versions of a layer", ylabel="layers", xticks=_column(rows, "versions"))
    return _finish(figure, axes, f"{evidence.tuning.model_name}: layers by number of versions", legend=False)


PICTURES: Mapping[str, Callable[[Evidence, Sequence[Row]], Figure]] = {
    "speed_up": draw_speed_up,
    "interference": draw_interference,
    "loss_by_count": draw_loss_by_count,
    "pareto": draw_pareto,
    "version_counts": draw_version_counts,
}
"""By the names of `series.SERIES`."""


def save(figure: Figure, path: Path) -> None:
    """Write a PNG. Raises OSError."""
    figure.savefig(path, dpi=DPI)


def _draw_front(figure: Figure, axes: Any, rows: Sequence[Row]) -> None:
    fastest_us = min(_column(rows, "latency_us"))

    def places(chosen: Sequence[Row]) -> tuple[list[float], list[float]]:
        return [value / 1e3 for value in _column(chosen, "blocking_bytes")], _column(chosen, "parallelism")

    meets = [row for row in rows if row["meets_qos"]]
    front = sorted((row for row in rows if row["front"]), key=lambda row: float(row["blocking_bytes"]))
    if missing := [row for row in rows if not row["meets_qos"]]:
        axes.scatter(*places(missing), marker="x", color="grey", label="misses QoS")
    slowness = [value / fastest_us for value in _column(meets, "latency_us")]
    shown = axes.scatter(*places(meets), c=slowness, cmap="viridis_r", s=28, zorder=2, label="sample")
    axes.plot(*places(front), "-", color="tab:red", linewidth=1, label="Pareto front", zorder=1)
    kept = [row for row in rows if int(row["version"]) >= 0]
    axes.scatter(
        *places(kept), s=140, facecolors="none", edgecolors="tab:red", linewidths=1.6, label="version", zorder=3
    )
    figure.colorbar(shown, ax=axes, label="time / fastest")
    axes.set(xlabel="blocking size, KB", ylabel="parallelism (tasks x unroll)")
    for axis, scale, values in zip(
        (axes.xaxis, axes.yaxis), (axes.set_xscale, axes.set_yscale), places(rows), strict=True
    ):
        _scale(axis, scale, values)
    axes.legend(**_LEGEND)


def _scale(axis: Any, set_scale: Callable[[str], None], values: Sequence[float]) -> None:
    """A logarithmic scale, if the values span a decade, with plain numbers."""
    if max(values) >= 10 * min(values) > 0:
        set_scale("log")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_formatter(NullFormatter())
    else:
        axis.set_major_locator(MaxNLocator(6))
    axis.set_major_formatter(FormatStrFormatter("%g"))


def _single() -> tuple[Figure, Any]:
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    return figure, figure.subplots()


def _grid(panels: int) -> tuple[Figure, list[Any]]:
    columns = 2 if panels > 1 else 1
    rows = max(1, -(-panels // columns))
    figure = Figure(figsize=(5.6 * columns, 4.0 * rows), layout="constrained")
    found = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in found[max(1, panels) :]:
        unused.set_visible(False)
    return figure, found


def _finish(figure: Figure, axes: Any, title: str, legend: bool = True) -> Figure:
    axes.set_title(title, fontsize=10)
    if legend:
        axes.legend(**_LEGEND)
    axes.grid(alpha=0.3)
    return figure


def _finish_grid(figure: Figure, title: str) -> Figure:
    figure.suptitle(title, fontsize=11)
    for axes in figure.axes:
        if axes.get_xlabel():  # colour bars have none
            axes.grid(alpha=0.3)
    return figure


def _grouped(rows: Sequence[Row], field: str) -> dict[object, list[Row]]:
    groups: dict[object, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[field], []).append(row)
    return groups


def _column(rows: Sequence[Row], field: str) -> list[float]:
    return [float(row[field]) for row in rows]
