"""Fig. 14b of VELTAIR: what is gained by how many versions of a layer.

The policies that choose versions, each at the highest rate it carries, on tuned models of whose layers ever fewer
versions are kept. On a modelled machine whose cores have the bandwidth of the measured ones, and on one whose cores
have a quarter of it, so that they disturb each other more. Beside it how much faster the models' layers get at all.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from benchmarks.papers.fewer_versions import best_us, limit_versions
from benchmarks.papers.figures import COLOURS, Csv, FigureRequest, new_figure, save
from benchmarks.papers.veltair_numbers import RATE_OVER_PLANARIA, SATURATED_BY_VERSIONS
from gangway.simulator.measured import MeasuredModel, one_row
from gangway.simulator.runs import Goal, search_rate
from gangway.simulator.scenario import Scenario, make_scenario
from gangway.workload.mix import VELTAIR_QOS_MS, Mix, MixModel
from gangway.workload.qos import Qos, WorkloadError

CORES = 64
COUNTS = (1, 2, 3, 4, 5)
POLICIES = ("veltair_ac", "veltair", "gangway")
MEMORY_SHARES = (1.0, 0.25)
SITUATIONS = tuple((cores, level) for cores in (1, 8, 64) for level in (0.0, 1.0))
MOST_QUERIES = 2000
OTHER_TARGET = Qos(multiple=3.0)  # of a model that the paper does not have


@dataclass(frozen=True)
class Gain:
    """A policy with so many versions. `over_one`: its rate over that with one version; 0 where it carries none."""

    memory_share: float
    policy: str
    versions: int  # at most
    per_layer: float  # that there are, mean over all layers
    rate_per_s: float
    over_one: float


def draw(request: FigureRequest, policies: Sequence[str] = POLICIES, counts: Sequence[int] = COUNTS) -> None:
    """Write veltair_fig14b.csv and .png, veltair_fig14b_times.csv. Raises OSError, WorkloadError.

    `counts`: from 1 on.
    """
    models = tuned_models(request.measured)
    mix = tuned_mix(models)
    calm = make_scenario(mix, CORES, models)
    header = ("memory_share", "policy", "versions", "versions_per_layer", "rate_per_s", "over_one", "paper")
    gains = []
    with Csv(request.output / "veltair_fig14b.csv", header) as file:
        for gain in _gains(request, mix, models, policies, counts):
            gains.append(gain)
            file.write(*vars(gain).values(), _paper(gain))
            line = f"{gain.policy}, {gain.versions} versions: {gain.rate_per_s:.4g} queries a second"
            request.console.print(f"{line}, memory share {gain.memory_share:g}", highlight=False)
    times = {situation: [over_first(calm, most, *situation) for most in counts] for situation in SITUATIONS}
    with Csv(request.output / "veltair_fig14b_times.csv", ("cores", "level", "versions", "time_over_first")) as file:
        for (cores, level), line_of in times.items():
            for most, ratio in zip(counts, line_of, strict=True):
                file.write(cores, level, most, ratio)
    _plot(request, mix, counts, gains, times)


def tuned_models(given: Mapping[str, MeasuredModel]) -> dict[str, MeasuredModel]:
    """Return those of the given models that have layers with several versions. Raises WorkloadError: there is none."""
    tuned = {name: one_row(model) for name, model in given.items() if max(map(len, model.latency_us)) > 1}
    if not tuned:
        message = "no model with several versions of a layer is given: gangway tune, gangway profile, --profile FILE"
        raise WorkloadError(f"veltair_versions: {message}")
    return tuned


def tuned_mix(models: Mapping[str, MeasuredModel]) -> Mix:
    """Return these models with the paper's targets, or a multiple of their time alone; rates follow the targets."""
    paper = {name: Qos(milliseconds=target_ms) for name, target_ms in VELTAIR_QOS_MS.items()}
    return Mix("tuned models", tuple(MixModel(name, qos=paper.get(name, OTHER_TARGET)) for name in models))


def limited(scenario: Scenario, most: int) -> Scenario:
    """Return the scenario with at most `most` versions of each layer."""
    return replace(scenario, models={index: limit_versions(model, most) for index, model in scenario.models.items()})


def over_first(scenario: Scenario, most: int, cores: int, level: float) -> float:
    """Return the time of a model with the best of `most` versions over that with its first ones, mean of the models."""
    pairs = zip(limited(scenario, most).models.values(), limited(scenario, 1).models.values(), strict=True)
    return fmean(best_us(several, cores, level) / best_us(one, cores, level) for several, one in pairs)


def _gains(
    request: FigureRequest,
    mix: Mix,
    models: Mapping[str, MeasuredModel],
    policies: Sequence[str],
    counts: Sequence[int],
) -> Iterator[Gain]:
    queries = min(request.queries, MOST_QUERIES)
    for share in MEMORY_SHARES:
        scenario = make_scenario(mix, CORES, models, memory_share=share)
        for policy in policies:
            first_per_s = 0.0
            for most in counts:
                few = limited(scenario, most)
                rate_per_s, _ = search_rate(policy, few, Goal(), queries, request.seed)
                first_per_s = first_per_s or rate_per_s
                over_one = rate_per_s / first_per_s if first_per_s else 0.0
                yield Gain(share, policy, most, _per_layer(few), rate_per_s, over_one)


def _per_layer(scenario: Scenario) -> float:
    return fmean(len(versions) for model in scenario.models.values() for versions in model.latency_us)


def _paper(gain: Gain) -> object:
    return RATE_OVER_PLANARIA["mix"].get(gain.policy, "") if _is_paper(gain) else ""


def _is_paper(gain: Gain) -> bool:
    return gain.policy == "veltair_ac" and gain.versions == COUNTS[-1] and gain.memory_share == MEMORY_SHARES[0]


def _plot(
    request: FigureRequest,
    mix: Mix,
    counts: Sequence[int],
    gains: Sequence[Gain],
    times: Mapping[tuple[int, float], Sequence[float]],
) -> None:
    title = f"VELTAIR's Fig. 14b: gain by versions of a layer, {CORES} modelled cores: {', '.join(mix.names)}"
    figure, ((rates, layers),) = new_figure(title, columns=2, size=(11.5, 4.6))
    lines: dict[tuple[str, float], list[Gain]] = {}
    for gain in gains:
        lines.setdefault((gain.policy, gain.memory_share), []).append(gain)
        if _is_paper(gain):
            rates.plot([gain.versions], [_paper(gain)], "*", ms=12, color="black", mfc="none",
                       label=f"paper, {gain.policy}, its mix")  # fmt: skip
    for (policy, share), line in lines.items():
        style = "-" if share == MEMORY_SHARES[0] else "--"
        rates.plot(counts, [gain.over_one for gain in line], style, marker="o", ms=4, color=COLOURS[policy],
                   label=f"{policy}, bandwidth x {share:g}")  # fmt: skip
    rates.axvline(SATURATED_BY_VERSIONS, color="grey", ls=":", lw=1, label="paper: saturated")
    for (cores, level), ratios in times.items():
        layers.plot(counts, [100 * (1 - ratio) for ratio in ratios], "--" if level else "-", marker="o", ms=4,
                    label=f"{cores} cores, level {level:g}")  # fmt: skip
    rates.set_ylabel("highest rate, over that with one version")
    layers.set_ylabel("layers' time saved by the best of them, %")
    for axes in (rates, layers):
        axes.set(xlabel="versions of a layer at most", xticks=list(counts))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    save(figure, request.output / "veltair_fig14b.png")
