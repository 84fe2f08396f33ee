"""Fig. 12 and 13 of VELTAIR: the highest rate of every policy in the four mixes, and latencies at that rate.

The paper's targets (Table 2) and 64 modelled cores: those that were measured, and those of the paper's premise. 95 % of
all queries in time, and 95 % of each model's; five seeds. A rate is that of `simulator/rates.py`, found to 3 %. A mix
that is in the files already is left out, so a run that was killed goes on where it was. All cores work.
"""

import csv
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.papers.figures import COLOURS, Csv, FigureRequest, new_figure, save
from benchmarks.papers.veltair_numbers import LATENCY_OVER_ISOLATED, RATE_OVER_PLANARIA
from gangway.simulator.contention import Contention
from gangway.simulator.rates import (
    QUERIES,
    SEEDS,
    TARGET,
    RateEstimate,
    capacity_bound,
    estimate_both,
    window,
)
from gangway.simulator.runs import run_steady
from gangway.simulator.scenario import Scenario, make_scenario
from gangway.workload.mix import read_mix
from gangway.workload.outcomes import Summary

CORES = 64
SHARE = 0.95
MIXES = ("light", "medium", "heavy", "mix")
MACHINES: Mapping[str, Contention | None] = {"measured": None, "contended": Contention()}
VELTAIRS = ("veltair_as", "veltair_ac", "veltair", "veltair:use")
BASELINE = "planaria"
DEFAULT = "gangway"
SPATIAL = (BASELINE, "fixed_block:6", "fixed_block:11", "model_fcfs", "protean", *VELTAIRS)
TEMPORAL = ("edf", "prema", "layerweaver_plus", "triton", "parties")
POLICIES = (*SPATIAL, *TEMPORAL, DEFAULT)
# Those that share time are far behind on either machine; on the contended one the best of them stands for all.
CONTENDED = (*SPATIAL, "edf", DEFAULT)
RATES_HEADER = (
    "machine", "mix", "policy", "goal", "mean_per_s", "half_per_s", "rates_per_s", "bound_per_s", "queries", "probes",
    "at_bound",
)  # fmt: skip
LATENCY_HEADER = ("machine", "mix", "policy", "model", "over_isolated", "half", "least_in_time")
WORST_HEADER = ("machine", "mix", "other", "rate_per_s", "gangway_least", "other_least")

Rates = Mapping[str, RateEstimate]
"""By policy."""


@dataclass(frozen=True)
class Found:
    """A policy in a mix. `runs`: one a seed, at the highest rate with 95 % of all in time; none if it carries none."""

    in_all: RateEstimate
    in_each: RateEstimate
    runs: tuple[Summary, ...]


def draw(
    request: FigureRequest,
    mixes: Sequence[str] = MIXES,
    policies: Sequence[str] = POLICIES,
    machines: Sequence[str] = tuple(MACHINES),
    seeds: int = SEEDS,
) -> None:
    """Write veltair_fig12.csv, veltair_fig13.csv, veltair_worst.csv and two pictures. Raises OSError."""
    path = request.output / "veltair_fig12.csv"
    known = {(machine, mix) for machine, mix, _, _ in read_rates(path)} if path.exists() else set()
    places = [(machine, mix) for machine in machines for mix in mixes if (machine, mix) not in known]
    queries, numbers = min(request.queries, QUERIES), range(request.seed, request.seed + seeds)
    with (
        Csv(path, RATES_HEADER, keep=bool(known)) as rates,
        Csv(request.output / "veltair_fig13.csv", LATENCY_HEADER, keep=bool(known)) as latencies,
        Csv(request.output / "veltair_worst.csv", WORST_HEADER, keep=bool(known)) as worst,
        ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool,
    ):
        searches: dict[tuple[str, str], dict[str, Future[Found]]] = {}
        for machine, mix in places:
            chosen = [policy for policy in policies if machine == "measured" or policy in CONTENDED]
            searches[machine, mix] = {
                policy: pool.submit(find, policy, machine, mix, queries, numbers) for policy in chosen
            }
        for (machine, mix), of_policies in searches.items():
            found = {policy: search.result() for policy, search in of_policies.items()}
            scenario = scenario_of(machine, mix)
            for policy, one in found.items():
                _write_rates(machine, mix, policy, one, scenario, queries, rates)
                _write_latencies(machine, mix, policy, one, latencies)
                text = f"{machine}, {mix}, {policy}: {one.in_all} of all, {one.in_each} of each"
                request.console.print(text, highlight=False)
            if DEFAULT in found:
                worst.write(machine, mix, *least_of_both(found, scenario, queries, numbers))
    _plot_rates(request, read_rates(path))
    _plot_latencies(request, request.output / "veltair_fig13.csv")


def scenario_of(machine: str, mix: str) -> Scenario:
    """Return a mix on one of the machines."""
    return make_scenario(read_mix(mix), CORES, contention=MACHINES[machine])


def find(policy: str, machine: str, mix: str, queries: int, seeds: Sequence[int]) -> Found:
    """Search a policy's highest rates and run it there."""
    scenario = scenario_of(machine, mix)
    in_all, in_each = estimate_both(policy, scenario, SHARE, queries, seeds)
    rate_per_s = in_all.mean_per_s
    runs = [run_steady(policy, scenario, rate_per_s, queries, seed) for seed in seeds] if rate_per_s else []
    return Found(in_all, in_each, tuple(run.summary for run in runs))


def least_of_both(
    found: Mapping[str, Found], scenario: Scenario, queries: int, seeds: Sequence[int]
) -> tuple[str, float, float, float]:
    """Compare the worst models of the default policy and of that which carries most of each beside it.

    Returns its name, that rate, and the mean shares in time of both policies' worst models there.
    """
    others = {policy: one.in_each.mean_per_s for policy, one in found.items() if policy != DEFAULT}
    other = max(others, key=others.__getitem__)
    rate_per_s = others[other]
    if not rate_per_s:
        return other, 0.0, 1.0, 1.0
    least = [
        fmean(run_steady(policy, scenario, rate_per_s, queries, seed).summary.least_satisfied(TARGET) for seed in seeds)
        for policy in (DEFAULT, other)
    ]
    return other, rate_per_s, least[0], least[1]


def read_rates(path: Path) -> dict[tuple[str, str, str, str], RateEstimate]:
    """Return the rates in a file by machine, mix, policy and goal. Raises OSError."""
    with path.open(newline="") as file:
        return {
            (row["machine"], row["mix"], row["policy"], row["goal"]): RateEstimate(
                tuple(map(float, row["rates_per_s"].split()))
            )
            for row in csv.DictReader(file)
        }


def of_goal(rates: Mapping[tuple[str, str, str, str], RateEstimate], machine: str, mix: str, goal: str) -> Rates:
    """Return the rates of a machine, a mix and a goal by policy."""
    return {key[2]: one for key, one in rates.items() if (key[0], key[1], key[3]) == (machine, mix, goal)}


def _write_rates(
    machine: str, mix: str, policy: str, found: Found, scenario: Scenario, queries: int, rates: Csv
) -> None:
    for goal, one in (("all", found.in_all), ("each", found.in_each)):
        listed = " ".join(f"{rate:.4g}" for rate in one.rates_per_s)
        counted = len(window(scenario, one.mean_per_s, queries).counted)
        probes = sum(map(len, one.probes))
        searched = (one.mean_per_s, one.half_per_s, listed, capacity_bound(scenario), counted, probes, one.limited)
        rates.write(machine, mix, policy, goal, *searched)


def _write_latencies(machine: str, mix: str, policy: str, found: Found, latencies: Csv) -> None:
    for index in range(len(found.runs[0].models) if found.runs else 0):
        rows = [run.models[index] for run in found.runs]
        over = RateEstimate(tuple(row.over_isolated or 0.0 for row in rows))
        shares = [row.satisfied[TARGET] for row in rows]
        least = min(share for share in shares if share is not None)
        latencies.write(machine, mix, policy, rows[0].name, over.mean_per_s, over.half_per_s, least)


def _plot_rates(request: FigureRequest, rates: Mapping[tuple[str, str, str, str], RateEstimate]) -> None:
    title = f"VELTAIR's Fig. 12: highest rate with 95 % in time, {CORES} modelled cores, five seeds"
    title += f" (star: the paper's ratio x our {BASELINE}; outlined: 95 % of each model)"
    places = list(dict.fromkeys((machine, mix) for machine, mix, _, _ in rates))
    machines, mixes = (list(dict.fromkeys(place[index] for place in places)) for index in (0, 1))
    figure, panels = new_figure(title, columns=len(mixes), rows=len(machines), size=(15, 5.2 * len(machines)))
    for machine, mix in places:
        axes = panels[machines.index(machine)][mixes.index(mix)]
        found, each = of_goal(rates, machine, mix, "all"), of_goal(rates, machine, mix, "each")
        ranked = sorted(found, key=lambda policy: -found[policy].mean_per_s)
        colours = [COLOURS.get(policy, "lightgrey") for policy in ranked]
        means = [found[policy].mean_per_s for policy in ranked]
        bars = axes.barh(ranked, means, color=colours, xerr=[found[policy].half_per_s for policy in ranked])
        axes.barh(ranked, [each[policy].mean_per_s for policy in ranked], fill=False, edgecolor="black", height=0.4)
        axes.bar_label(bars, fmt="%.0f", padding=2, fontsize=8)
        for policy, ratio in RATE_OVER_PLANARIA[mix].items():
            if policy in ranked and BASELINE in found:
                spot = [ratio * found[BASELINE].mean_per_s], [ranked.index(policy)]
                axes.plot(*spot, "*", ms=11, color="black", mfc="none")
        axes.set_title(f"{mix}, {machine} cores", fontsize=9)
        axes.set_xlabel("queries per second", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.15)
    save(figure, request.output / "veltair_fig12.png")


def _plot_latencies(request: FigureRequest, path: Path) -> None:
    with path.open(newline="") as file:
        rows = [
            row for row in csv.DictReader(file) if row["mix"] == MIXES[-1] and row["policy"] in (*VELTAIRS, DEFAULT)
        ]
    machines = list(dict.fromkeys(row["machine"] for row in rows))
    if not machines:
        return
    title = f"VELTAIR's Fig. 13: mean latency over isolated at the highest rate, {MIXES[-1]}, {CORES} modelled cores"
    figure, panels = new_figure(title, rows=len(machines), size=(11, 4.4 * len(machines)))
    for place, machine in enumerate(machines):
        axes = panels[place][0]
        policies = list(dict.fromkeys(row["policy"] for row in rows if row["machine"] == machine))
        for index, policy in enumerate(policies):
            some = [row for row in rows if (row["machine"], row["policy"]) == (machine, policy)]
            ours = [float(row["over_isolated"]) for row in some]
            paper = LATENCY_OVER_ISOLATED.get(policy.partition(":")[0])
            label = f"{policy}: mean {fmean(ours):.2f}" + (f" (paper {paper:g})" if paper else "")
            spots = [number + 0.16 * (index - 2) for number in range(len(some))]
            axes.bar(spots, ours, width=0.16, color=COLOURS.get(policy, "lightgrey"), label=label,
                     yerr=[float(row["half"]) for row in some])  # fmt: skip
            axes.set_xticks(range(len(some)), [row["model"] for row in some], fontsize=8)
        axes.axhline(1.0, color="grey", ls=":", lw=1)
        axes.set_ylabel(f"latency over isolated, {machine}")
        axes.legend(fontsize=8)
    save(figure, request.output / "veltair_fig13.png")
