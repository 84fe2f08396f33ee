"""Fig. 1 and 4 and Table 2 of Packrat: gangs <i, t, b> for a batch against one gang on all cores.

Three latencies of a split: Packrat's optimiser knows gangs that are alone (`expected`), and what it chose takes longer
beside each other (`actual`); ours knows how long they take beside each other (`split`).

What gangs of two measured cores lose is read in two ways. The page's machine counts it as serial (`as_layers`), as do
the rates of VELTAIR's models. Gangs beside each other lose about as much, so it may be their neighbours' doing: then
nothing is serial, and 16 and 64 cores lose no more than two (`neighbours`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from benchmarks.papers.figures import Csv, FigureRequest, new_figure, save
from gangway.scheduler.batching.planner import SplitPlan, split_table
from gangway.scheduler.profiles import ModelProfile
from gangway.simulator.measured import MeasuredModel, one_row, read_measured, shipped_models
from gangway.simulator.scaling import Losses, losses, scale_model, scale_rows

# The numbers that Packrat's text gives (2024), by figure and table. Curves and bars without a number are not here.
#
# Its machine: 16 cores (one socket) of a Xeon Gold 6142 at 2.6 GHz, AVX-512; PyTorch 1.12.1, graph mode, TorchServe.

MODELS = ("resnet50", "inception_v3", "gpt2", "bert_base")  # under the names of `gangway zoo`
BATCHES = (8, 16, 32, 64, 128, 256, 512, 1024)

# Fig. 4, section 5.1.1: latency of the fat instance over that of the split, mean over the batches, inference alone.
MEAN_SPEEDUP = {"resnet50": 1.53, "inception_v3": 1.52, "gpt2": 1.18, "bert_base": 1.13}
# Fig. 5, section 5.2.1: the same through TorchServe, the abstract's claim; least and largest of the four models.
SERVED_MEAN = (1.43, 1.83)

# Fig. 1, section 2.1: ResNet-50, by batch: (from, to) threads -> latency over latency.
THREADS_GAIN = {(4, 2, 4): 1.85, (4, 8, 16): 1.4, (32, 2, 4): 1.9, (32, 8, 16): 1.4}

# Appendix A: ResNet-50, 256 rows on 16 cores, milliseconds: fat, one thin gang <1, 1, 16> alone, 16 of them.
RESNET50_256 = {"fat": 2664.0, "thin alone": 1224.0, "thin together": 1600.0}

# Table 2: BERT, by cores and batch.
CONFIGURATIONS = {
    16: {
        8: "<2, 8, 4>", 16: "<4, 4, 4>", 32: "<4, 4, 8>", 64: "<4, 4, 16>", 128: "<4, 4, 32>", 256: "<8, 2, 32>",
        512: "<8, 2, 64>", 1024: "<8, 2, 128>",
    },
    14: {
        8: "<2, 7, 4>", 16: "<1, 6, 8>, <2, 4, 4>", 32: "<1, 6, 16>, <2, 4, 8>", 64: "<1, 6, 32>, <2, 4, 16>",
        128: "<2, 7, 64>", 256: "<2, 3, 64>, <4, 2, 32>", 512: "<2, 3, 128>, <4, 2, 64>",
        1024: "<2, 3, 256>, <4, 2, 128>",
    },
}  # fmt: skip

# Fig. 6, section 5.2.2: Inception v3, 16 cores, from batches of 8 to batches of 64.
CHANGE_S = 5.0  # of configuration
CHANGE_SLOWDOWN = (2.0, 3.0)  # of latency meanwhile
CHANGE_GAIN = 1.54  # latency before over after


CORES = (16, 64)
ALL_BATCHES = (1, 2, 4, *BATCHES)
MOST_ROWS = ALL_BATCHES[-1]
HIGHEST = 4.5  # speed-up that is drawn


@dataclass(frozen=True)
class Point:
    """One batch. Speed-ups: the fat gang's latency over that of a split. `neighbours`: with the other reading."""

    batch: int
    fat_us: float
    split: SplitPlan
    expected: float
    actual: float
    thin: float  # a gang of one core on every core
    neighbours: float

    @property
    def speedup(self) -> float:
        """What the split brings."""
        return self.fat_us / self.split.latency_us


def draw(request: FigureRequest) -> None:
    """Write packrat_losses.csv, packrat_fig1.csv, packrat_fig4.csv and .png, packrat_table2.csv. Raises OSError."""
    files = shipped_models()
    models = {name: read_measured(files[name]) for name in MODELS if name in files}
    _write_losses(request, models.values())
    _write_threads(request, models.values())
    points = {(name, cores): points_of(model, cores) for name, model in models.items() for cores in CORES}
    header = ("model", "cores", "batch", "fat_ms", "configuration", "split_ms", "speedup", "neighbours",
              "expected", "actual", "thin")  # fmt: skip
    with Csv(request.output / "packrat_fig4.csv", header) as file:
        for (name, cores), line in points.items():
            for one in line:
                file.write(name, cores, one.batch, one.fat_us / 1e3, one.split, one.split.latency_us / 1e3, one.speedup,
                           one.neighbours, one.expected, one.actual, one.thin)  # fmt: skip
            mean = fmean(one.speedup for one in line if one.batch in BATCHES)
            paper = f", paper {MEAN_SPEEDUP[name]}" if cores == 16 else ""
            request.console.print(f"{name}, {cores} cores: {mean:.3f} on average{paper}", highlight=False)
    if "bert_base" in models:
        _write_table2(request, models["bert_base"])
    _plot(request, points)


def points_of(model: MeasuredModel, cores: int, batches: Sequence[int] = ALL_BATCHES) -> list[Point]:
    """Compare the ways to run batches on so many cores."""
    profile = profile_of(model, cores)
    table = split_table(profile, cores, MOST_ROWS)
    alone = split_table(replace(profile, together_factor=()), cores, MOST_ROWS)
    neighbours = split_table(scale_model(model, cores, 0), cores, MOST_ROWS)
    points = []
    for batch in batches:
        fat_us, expected = table.one_gang_us(cores, batch), alone.best(cores, batch)
        points.append(
            Point(
                batch,
                fat_us,
                table.best(cores, batch),
                fat_us / expected.latency_us,
                fat_us / together_us(profile, expected),
                fat_us / profile.together_us(1, -(-batch // cores)),
                neighbours.one_gang_us(cores, batch) / neighbours.latency_us(cores, batch),
            )
        )
    return points


def profile_of(model: MeasuredModel, cores: int) -> ModelProfile:
    """Return the profile on the page's machine: one row takes as long on all cores as it does in VELTAIR's mixes."""
    return scale_model(model, cores, 0, lost=as_layers(model, cores))


def as_layers(model: MeasuredModel, cores: int) -> Losses:
    """Return what gangs lose if all of it is serial, as the times of layers on so many cores have it."""
    nothing = replace(losses(model), inside=1.0, start_us=0.0, share=0.0)
    ideal_us = scale_rows(model, cores, lost=nothing).alone_us[:, 0]
    lost_us = scale_model(one_row(model), cores, 0).isolated_us - ideal_us[-1]
    return replace(nothing, share=max(0.0, float(lost_us / (ideal_us[0] - ideal_us[-1]))))


def together_us(profile: ModelProfile, split: SplitPlan) -> float:
    """Return how long the slowest gang of a split takes beside the others; the only one is alone."""
    if len(split.parts) == 1:
        return split.latency_us
    return max(profile.together_us(part.cores, part.rows) for part in split.parts)


def _write_losses(request: FigureRequest, models: Iterable[MeasuredModel]) -> None:
    header = (
        *("model", "one_row_ms", "largest_batch", "crowding", "inside", "start_us", "share", "share_error", "residual"),
    )
    with Csv(request.output / "packrat_losses.csv", header) as file:
        for model in models:
            lost = losses(model)
            file.write(model.model_name, model.isolated_us[0][0] / 1e3, model.batches[-1], lost.crowding, lost.inside,
                       lost.start_us, lost.share, lost.uncertain, lost.residual)  # fmt: skip


def _write_threads(request: FigureRequest, models: Iterable[MeasuredModel]) -> None:
    with Csv(request.output / "packrat_fig1.csv", ("model", "batch", "threads", "gain_over_half", "paper")) as file:
        for model in models:
            profile = profile_of(model, 16)
            for batch in (4, 32):
                for threads in (2, 4, 8, 16):
                    gain = profile.rows_us(threads // 2, batch) / profile.rows_us(threads, batch)
                    known = model.model_name == "resnet50"
                    paper = THREADS_GAIN.get((batch, threads // 2, threads), "") if known else ""
                    file.write(model.model_name, batch, threads, gain, paper)
        if any(model.model_name == "resnet50" for model in models):
            _print_appendix(request, next(model for model in models if model.model_name == "resnet50"))


def _print_appendix(request: FigureRequest, model: MeasuredModel) -> None:
    profile = profile_of(model, 16)
    ours = (profile.rows_us(16, 256), profile.rows_us(1, 16), profile.together_us(1, 16))
    text = ", ".join(
        f"{name} {time_us / 1e3:.0f} (paper {paper:.0f})"
        for (name, paper), time_us in zip(RESNET50_256.items(), ours, strict=True)
    )
    request.console.print(f"resnet50, 256 rows, 16 cores, ms: {text}", highlight=False)


def _write_table2(request: FigureRequest, model: MeasuredModel) -> None:
    with Csv(request.output / "packrat_table2.csv", ("cores", "batch", "ours", "alone", "paper")) as file:
        for cores, paper in CONFIGURATIONS.items():
            profile = profile_of(model, cores)
            tables = [split_table(each, cores, MOST_ROWS) for each in (profile, replace(profile, together_factor=()))]
            for batch, configuration in paper.items():
                file.write(cores, batch, *(table.best(cores, batch) for table in tables), configuration)


def _plot(request: FigureRequest, points: Mapping[tuple[str, int], Sequence[Point]]) -> None:
    names = list(dict.fromkeys(name for name, _ in points))
    title = "Packrat's Fig. 4: latency of one gang on all cores over that of the split, modelled cores"
    figure, panels = new_figure(title, columns=len(names), rows=len(CORES), size=(3.8 * len(names), 6.6))
    for row, cores in enumerate(CORES):
        for column, name in enumerate(names):
            axes, line = panels[row][column], points[name, cores]
            batches = [one.batch for one in line]
            other = [one.neighbours for one in line]
            axes.plot(batches, other, "-.", color="tab:green", label="our split, nothing serial")
            axes.plot(batches, [one.speedup for one in line], "o-", ms=3, color="tab:green", label="our split")
            axes.plot(batches, [one.expected for one in line], ":", color="tab:blue", label="Packrat's split, expected")
            axes.plot(batches, [one.actual for one in line], "--", color="tab:blue", label="Packrat's split, actual")
            axes.plot(batches, [one.thin for one in line], "-", lw=0.8, color="grey", label="a gang on every core")
            if cores == 16:
                axes.plot(BATCHES, [MEAN_SPEEDUP[name]] * len(BATCHES), color="black", lw=1, label="paper, mean")
            axes.axhline(1.0, color="grey", ls=":", lw=0.8)
            axes.set_title(f"{name}, {cores} cores", fontsize=9)
            axes.set_xscale("log", base=2)
            axes.set_ylim(0, HIGHEST)
            axes.set_xlabel("rows of the batch", fontsize=8)
            axes.tick_params(labelsize=8)
            axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("speed-up", fontsize=8)
    panels[0][0].legend(fontsize=6)
    save(figure, request.output / "packrat_fig4.png")
