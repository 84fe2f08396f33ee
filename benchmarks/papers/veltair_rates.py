"""Fig. 12 and 13 of VELTAIR: the highest rate of every policy in the four mixes, and latencies at that rate.

The paper's targets (Table 2), 64 modelled cores, 95 % of all queries in time. Rates are found to 3 %.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.papers.figures import COLOURS, Csv, FigureRequest, new_figure, save
from benchmarks.papers.veltair_numbers import LATENCY_OVER_ISOLATED, RATE_OVER_PLANARIA
from gangway.scheduler.policies.registry import POLICIES
from gangway.simulator.runs import TARGET, Goal, PolicyRun, run_policy, search_rate
from gangway.simulator.scenario import Scenario, make_scenario
from gangway.workload.mix import read_mix

CORES = 64
MIXES = ("light", "medium", "heavy", "mix")
VELTAIRS = ("veltair_as", "veltair_ac", "veltair")
BASELINE = "planaria"
MOST_QUERIES = 2000  # a run; the slowest policies decide layer by layer
GOAL = Goal(0.95)


@dataclass(frozen=True)
class Found:
    """A policy at the highest rate it carries in a mix. `run`: none where it carries no rate."""

    rate_per_s: float
    run: PolicyRun | None
    core_efficiency: float  # time that the queries take on one core over the time of the cores they held


def draw(request: FigureRequest, mixes: Sequence[str] = MIXES, policies: Sequence[str] = ()) -> None:
    """Write veltair_fig12.csv and .png, veltair_fig13.csv and .png, this one of the last mix. Raises OSError.

    `policies`: the baseline first; none: all.
    """
    queries = min(request.queries, MOST_QUERIES)
    found: dict[str, dict[str, Found]] = {}
    header = ("mix", "policy", "rate_per_s", "over_planaria", "paper", "in_time", "over_isolated", "core_use",
              "core_efficiency", "units_per_query", "conflicts_per_query")  # fmt: skip
    with (
        Csv(request.output / "veltair_fig12.csv", header) as rates,
        Csv(request.output / "veltair_fig13.csv", ("mix", "policy", "model", "over_isolated", "mean_ms")) as latencies,
    ):
        for mix in mixes:
            scenario = make_scenario(read_mix(mix), CORES)
            found[mix] = {}
            for policy in policies or names():
                one = found[mix][policy] = highest(policy, scenario, queries, request.seed)
                rates.write(mix, policy, one.rate_per_s, *_ratios(found[mix], mix, policy), *_numbers(one))
                for row in one.run.summary.models if one.run else ():
                    latencies.write(mix, policy, row.name, row.over_isolated, (row.mean_us or 0.0) / 1e3)
                request.console.print(f"{mix}, {policy}: {one.rate_per_s:.4g} queries a second", highlight=False)
    _plot_rates(request, found)
    _plot_latencies(request, mixes[-1], found[mixes[-1]])


def names() -> list[str]:
    """Return the policies, the baseline first, blocks in the paper's two sizes."""
    others = [name for name in POLICIES if name not in (BASELINE, "fixed_block")]
    return [BASELINE, "fixed_block:6", "fixed_block:11", *sorted(others)]


def highest(policy: str, scenario: Scenario, queries: int, seed: int) -> Found:
    """Search a policy's highest rate and run it there."""
    rate, _ = search_rate(policy, scenario, GOAL, queries, seed)
    if not rate:
        return Found(0.0, None, math.nan)
    run = run_policy(policy, scenario, rate, queries, seed)
    alone_us = [scenario.models[index].span_us(0, scenario.models[index].layers, 1) for index in scenario.models]
    work_us = sum(row.queries * time_us for row, time_us in zip(run.summary.models, alone_us, strict=True))
    return Found(rate, run, work_us / run.result.counters.core_busy_us)


def _ratios(found: Mapping[str, Found], mix: str, policy: str) -> tuple[object, object]:
    baseline = found[BASELINE].rate_per_s
    paper = RATE_OVER_PLANARIA[mix].get(policy, "")
    return (found[policy].rate_per_s / baseline if baseline else ""), paper


def _numbers(found: Found) -> tuple[object, ...]:
    run = found.run
    if run is None:
        return ("",) * 6
    counters, total = run.result.counters, run.summary.total
    per_query = (counters.blocks / total.queries, counters.conflicts / total.queries)
    return total.satisfied[TARGET], total.over_isolated, run.core_use, found.core_efficiency, *per_query


def _plot_rates(request: FigureRequest, found: Mapping[str, Mapping[str, Found]]) -> None:
    title = f"VELTAIR's Fig. 12: highest rate with 95 % in time, {CORES} modelled cores"
    title += f" (star: the paper's ratio x our {BASELINE})"
    figure, (panels,) = new_figure(title, columns=len(found), size=(15, 5.5))
    for axes, mix in zip(panels, found, strict=True):
        ranked = sorted(((one.rate_per_s, policy) for policy, one in found[mix].items()), reverse=True)
        policies = [policy for _, policy in ranked]
        bars = axes.barh(
            policies, [rate for rate, _ in ranked], color=[COLOURS.get(policy, "lightgrey") for policy in policies]
        )
        axes.bar_label(bars, fmt="%.0f", padding=2, fontsize=8)
        baseline = found[mix][BASELINE].rate_per_s
        for policy, ratio in RATE_OVER_PLANARIA[mix].items():
            if policy in policies:
                axes.plot([ratio * baseline], [policies.index(policy)], "*", ms=11, color="black", mfc="none")
        axes.set_title(mix, fontsize=9)
        axes.set_xlabel("queries per second", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.15)
    save(figure, request.output / "veltair_fig12.png")


def _plot_latencies(request: FigureRequest, mix: str, found: Mapping[str, Found]) -> None:
    title = f"VELTAIR's Fig. 13: mean latency over isolated at the highest rate, {mix}, {CORES} modelled cores"
    figure, ((axes,),) = new_figure(title, size=(11, 4.6))
    runs = {policy: found[policy].run for policy in VELTAIRS if policy in found}
    models = read_mix(mix).names
    for place, (policy, run) in enumerate(runs.items()):
        ours = [row.over_isolated or 0.0 for row in run.summary.models] if run else [0.0] * len(models)
        label = f"{policy}: mean {fmean(ours):.2f} (paper {LATENCY_OVER_ISOLATED[policy]:g})"
        spots = [index + 0.27 * (place - 1) for index in range(len(models))]
        bars = axes.bar(spots, ours, width=0.27, color=COLOURS[policy], label=label)
        axes.bar_label(bars, fmt="%.1f", fontsize=7)
    axes.axhline(1.0, color="grey", ls=":", lw=1)
    axes.set_xticks(range(len(models)), models, fontsize=8)
    axes.set_ylabel("mean latency over isolated on all cores")
    axes.legend(fontsize=8)
    save(figure, request.output / "veltair_fig13.png")
