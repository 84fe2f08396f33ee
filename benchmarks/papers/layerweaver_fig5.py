"""Fig. 5 of Layerweaver+: latencies of two pairs of streams under the three schedulers.

At the paper's rates, and at our accelerator's counterpart: the paper's ratio at 95 % of what layerweaver_plus sustains.
Rates mean little across models of an accelerator: at the paper's own rates ours may idle, or drown.
"""

from dataclasses import dataclass

import numpy as np

from benchmarks.papers.figures import Csv, FigureRequest, new_figure, save
from benchmarks.papers.npu_study import QOS_US, Pair, Study
from benchmarks.papers.simulated_npu import SCHEDULERS
from gangway.workload.arrivals import Floats

HEADER = ("setting", "rate_per_s", "scheduler", "model", "p50_ms", "p90_ms", "p99_ms", "late_percent",
          "paper_late_percent")  # fmt: skip
SHARE = 0.95
MOST_QUERIES = 5000
# Late requests in percent, (vision, language) as section 3.2 words it; None: it does not say.
PAPER_LATE: dict[str, tuple[float | None, float | None]] = {
    "baseline": (80.0, 50.0),
    "layerweaver": (10.0, None),
    "layerweaver_plus": (1.0, 1.0),
}


@dataclass(frozen=True)
class Setting:
    """One picture: a pair and its total rate."""

    name: str
    pair: Pair
    rate_per_s: float


def draw(request: FigureRequest) -> None:
    """Write layerweaver_fig5.csv, percentiles and late shares of each stream, and .png. Raises OSError."""
    study = Study(queries=min(request.queries, MOST_QUERIES), seed=request.seed)
    settings = _settings(study)
    latencies: dict[tuple[str, str], tuple[Floats, Floats]] = {}
    with Csv(request.output / "layerweaver_fig5.csv", HEADER) as file:
        for setting in settings:
            for scheduler in SCHEDULERS:
                arrivals, latency_us = study.latencies(scheduler, setting.pair, setting.rate_per_s)
                streams = latency_us[arrivals.models == 0], latency_us[arrivals.models == 1]
                latencies[setting.name, scheduler] = streams
                for index, name in enumerate(setting.pair.mix.names):
                    late = 100 * float((streams[index] > QOS_US[name]).mean())
                    paper = PAPER_LATE[scheduler][index] if "bert_base" in setting.pair.mix.names else None
                    tail = [f"{value / 1e3:.3f}" for value in np.percentile(streams[index], (50, 90, 99))]
                    file.write(setting.name, f"{setting.rate_per_s:.0f}", scheduler, name, *tail, f"{late:.2f}", paper)
                    request.console.print(f"{setting.name}, {scheduler}: {late:.1f} % of {name} late", highlight=False)
    _plot(request, settings, latencies)


def _settings(study: Study) -> list[Setting]:
    settings = []
    for label, pair, rate in (
        ("a", Pair("resnet50", "bert_base", 200 / 800), 1000.0),
        ("b", Pair("mobilenetv2", "bert_large", 470 / 7530), 8000.0),
    ):
        ours = study.sustained_per_s("layerweaver_plus", pair, study.capacity_per_s(pair))
        settings.append(Setting(f"{label}, paper's rates", pair, rate))
        settings.append(Setting(f"{label}, {SHARE:.0%} of ours", pair, SHARE * ours))
    return settings


def _plot(
    request: FigureRequest, settings: list[Setting], latencies: dict[tuple[str, str], tuple[Floats, Floats]]
) -> None:
    title = "Latencies of two streams"
    figure, axes = new_figure(title, columns=2, rows=len(settings), size=(10, 3 * len(settings)))
    for row, setting in zip(axes, settings, strict=True):
        for index, (axis, name) in enumerate(zip(row, setting.pair.mix.names, strict=True)):
            for scheduler in SCHEDULERS:
                values = np.sort(latencies[setting.name, scheduler][index]) / 1e3
                axis.plot(values, np.arange(1, len(values) + 1) / len(values), label=scheduler)
            axis.axvline(QOS_US[name] / 1e3, color="black", linewidth=1)
            axis.set_xscale("log")
            axis.set_title(f"({setting.name}: {setting.rate_per_s:.0f}/s) {name}", fontsize=9)
            axis.set_xlabel("latency, ms", fontsize=8)
            axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=7)
    save(figure, request.output / "layerweaver_fig5.png")
