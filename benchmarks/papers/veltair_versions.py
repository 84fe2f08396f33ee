"""Fig. 14b of VELTAIR: what is gained by how many versions of a layer, on the machine of the paper's premise.

The policies that choose versions, each at the highest rate it carries in the mix of all models, 95 % of all in time.
Tuning finds one version of most layers on the machines that were measured, so there is nothing to compare on those.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.papers.figures import COLOURS, Csv, FigureRequest, new_figure, save
from benchmarks.papers.veltair_numbers import RATE_OVER_PLANARIA, SATURATED_BY_VERSIONS
from gangway.simulator.contention import Contention
from gangway.simulator.rates import QUERIES, SEEDS, Goal, RateEstimate, estimate_rate
from gangway.simulator.scenario import make_scenario
from gangway.workload.mix import read_mix

CORES = 64
MIX = "mix"
COUNTS = (1, 2, 3, 4, 5)
POLICIES = ("veltair", "gangway")


@dataclass(frozen=True)
class Gain:
    """A policy with so many versions. `over_one`: its rates over those with one version, seed by seed."""

    policy: str
    versions: int
    rate: RateEstimate
    over_one: RateEstimate


def draw(
    request: FigureRequest,
    policies: Sequence[str] = POLICIES,
    counts: Sequence[int] = COUNTS,
    seeds: int = SEEDS,
) -> None:
    """Write veltair_fig14b.csv and .png. Raises OSError. `counts`: from 1 on."""
    gains = []
    header = ("policy", "versions", "mean_per_s", "half_per_s", "over_one", "over_one_half", "paper")
    with Csv(request.output / "veltair_fig14b.csv", header) as file:
        for policy in policies:
            for gain in _gains(request, policy, counts, seeds):
                gains.append(gain)
                rate, over = gain.rate, gain.over_one
                is_paper = (policy, gain.versions) == ("veltair_ac", COUNTS[-1])
                paper = RATE_OVER_PLANARIA[MIX]["veltair_ac"] if is_paper else ""
                file.write(policy, gain.versions, rate.mean_per_s, rate.half_per_s, over.mean_per_s, over.half_per_s,
                           paper)  # fmt: skip
                request.console.print(f"{policy}, {gain.versions} versions: {rate}, {over} x one", highlight=False)
    _plot(request, gains)


def _gains(request: FigureRequest, policy: str, counts: Sequence[int], seeds: int) -> list[Gain]:
    queries, numbers = min(request.queries, QUERIES), range(request.seed, request.seed + seeds)
    gains: list[Gain] = []
    for count in counts:
        scenario = make_scenario(read_mix(MIX), CORES, contention=replace(Contention(), versions=count))
        start_per_s = gains[-1].rate.mean_per_s or None if gains else None
        rate = estimate_rate(policy, scenario, Goal(), queries, numbers, start_per_s)
        gains.append(Gain(policy, count, rate, rate.over(gains[0].rate if gains else rate)))
    return gains


def _plot(request: FigureRequest, gains: Sequence[Gain]) -> None:
    title = f"VELTAIR's Fig. 14b: gain by versions of a layer, {CORES} modelled contended cores, {MIX}"
    figure, ((axes,),) = new_figure(title)
    for policy in dict.fromkeys(gain.policy for gain in gains):
        line = [gain for gain in gains if gain.policy == policy]
        axes.errorbar([gain.versions for gain in line], [gain.over_one.mean_per_s for gain in line],
                      yerr=[gain.over_one.half_per_s for gain in line], marker="o", ms=4, capsize=3,
                      color=COLOURS[policy], label=policy)  # fmt: skip
    axes.plot([COUNTS[-1]], [RATE_OVER_PLANARIA[MIX]["veltair_ac"]], "*", ms=12, color="black", mfc="none",
              label="paper, veltair_ac")  # fmt: skip
    axes.axvline(SATURATED_BY_VERSIONS, color="grey", ls=":", lw=1, label="paper: saturated")
    axes.set(xlabel="versions of a layer", ylabel="highest rate, over that with one version", xticks=list(COUNTS))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save(figure, request.output / "veltair_fig14b.png")
