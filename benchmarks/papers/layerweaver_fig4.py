"""Fig. 4 of Layerweaver+: sustained throughput over the baseline's, for nine pairs of models and thirteen ratios."""

from collections.abc import Mapping
from statistics import fmean

from benchmarks.papers.figures import Csv, FigureRequest, new_figure, save
from benchmarks.papers.npu_study import LANGUAGE, VISION, Pair, Study
from benchmarks.papers.simulated_npu import BASELINE, SCHEDULERS

RATIOS = tuple(2.0**exponent for exponent in range(6, -7, -1))  # language to vision
PAPER = {"mean of layerweaver_plus": 1.492, "best of layerweaver_plus": 3.667}
MOST_QUERIES = 1500  # a run; the choice of layers costs a millisecond a request

Rates = Mapping[Pair, Mapping[str, float]]


def draw(request: FigureRequest) -> None:
    """Write layerweaver_fig4.csv, one line for each point, and .png. Raises OSError."""
    study = Study(queries=min(request.queries, MOST_QUERIES), seed=request.seed)
    rates: dict[Pair, Mapping[str, float]] = {}
    for vision in VISION:
        for language in LANGUAGE:
            for ratio in RATIOS:
                pair = Pair(vision, language, ratio)
                rates[pair] = study.rates_per_s(pair)
            gains = [rates[Pair(vision, language, ratio)] for ratio in RATIOS]
            mean = fmean(one["layerweaver_plus"] / one[BASELINE] for one in gains)
            request.console.print(f"{vision} + {language}: layerweaver_plus {mean:.2f} x the baseline", highlight=False)
    header = ("vision", "language", "language_to_vision", "scheduler", "rate_per_s", "over_baseline")
    with Csv(request.output / "layerweaver_fig4.csv", header) as file:
        for pair, found in rates.items():
            for scheduler, rate in found.items():
                over = f"{rate / found[BASELINE]:.4f}"
                file.write(pair.vision, pair.language, str(pair.ratio), scheduler, f"{rate:.2f}", over)
    with Csv(request.output / "layerweaver_fig4_summary.csv", ("number", "paper", "ours")) as file:
        for name, ours in summary(rates).items():
            file.write(name, PAPER.get(name, ""), f"{ours:.3f}")
            request.console.print(f"{name}: {ours:.2f} (paper: {PAPER.get(name, 'not given')})", highlight=False)
    _plot(request, rates)


def summary(rates: Rates) -> dict[str, float]:
    """Return mean and best of each scheduler's rate over the baseline's, over all points."""
    numbers = {}
    for scheduler in SCHEDULERS[1:]:
        over = [found[scheduler] / found[BASELINE] for found in rates.values()]
        numbers[f"mean of {scheduler}"] = fmean(over)
        numbers[f"best of {scheduler}"] = max(over)
    return numbers


def _plot(request: FigureRequest, rates: Rates) -> None:
    ours = summary(rates)
    means = ", ".join(f"{name.split()[0]} {ours[name]:.2f} (paper {paper:.2f})" for name, paper in PAPER.items())
    title = f"Throughput with < 1 % late over the baseline's; language : vision requests\nlayerweaver_plus: {means}"
    figure, axes = new_figure(title, columns=len(VISION), rows=len(LANGUAGE), size=(12, 9))
    labels = [f"{ratio:g}:1" if ratio >= 1 else f"1:{1 / ratio:g}" for ratio in RATIOS]
    for row, language in zip(axes, LANGUAGE, strict=True):
        for axis, vision in zip(row, VISION, strict=True):
            for scheduler in SCHEDULERS:
                found = [rates[Pair(vision, language, ratio)] for ratio in RATIOS]
                axis.plot(labels, [one[scheduler] / one[BASELINE] for one in found], marker="o", ms=3, label=scheduler)
            axis.set_title(f"{vision} + {language}", fontsize=9)
            axis.tick_params(axis="x", rotation=60, labelsize=7)
            axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=7)
    save(figure, request.output / "layerweaver_fig4.png")
