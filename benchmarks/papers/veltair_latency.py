"""Latencies below the highest rate, over the gang that just meets the target: VELTAIR's Fig. 13 as it can be met.

A policy that asks for what the target needs takes the time that the target leaves. So its latency is compared with that
of the narrowest gang which meets the target alone, and with that of all cores, as Fig. 13 does. The loads are shares of
a policy's own highest rate with 95 % of each model in time (`veltair_rates`). Compared are the default policy and the
two others that carry most in a mix. Every run is a load that lasts.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

from benchmarks.papers.figures import Csv, FigureRequest
from benchmarks.papers.veltair_rates import DEFAULT, MIXES, of_goal, read_rates, scenario_of
from gangway.scheduler.profiles import ModelProfile
from gangway.simulator.machine import Overheads
from gangway.simulator.rates import QUERIES, TARGET, RateEstimate
from gangway.simulator.runs import run_steady

MACHINE = "measured"
LOADS = (0.5, 0.7, 0.9)  # of the highest rate
SEEDS = 3
OTHERS = 2
FILE = "veltair_latency"
HEADER = ("mix", "policy", "highest_per_s", "load", "seed", "model", "gang", "gang_ms", "mean_ms", "over_gang",
          "over_isolated", "in_time")  # fmt: skip


def draw(
    request: FigureRequest, mixes: Sequence[str] = MIXES, loads: Sequence[float] = LOADS, seeds: int = SEEDS
) -> None:
    """Write veltair_latency.csv, of the rates that are in veltair_fig12.csv. Raises OSError."""
    rates, queries = read_rates(request.output), min(request.queries, QUERIES)
    with Csv(request.output / f"{FILE}.csv", HEADER) as file:
        for mix in mixes:
            scenario = scenario_of(MACHINE, mix)
            gangs = [meeting_gang(model, scenario.machine.overheads) for model in scenario.models.values()]
            for policy, highest_per_s in compared(of_goal(rates, MACHINE, mix, "each")).items():
                for load in loads:
                    over = []
                    for seed in range(request.seed, request.seed + seeds):
                        run = run_steady(policy, scenario, load * highest_per_s, queries, seed)
                        for row, (cores, gang_us) in zip(run.summary.models, gangs, strict=True):
                            over.append((row.mean_us or 0.0) / gang_us)
                            file.write(mix, policy, highest_per_s, load, seed, row.name, cores, gang_us / 1e3,
                                       (row.mean_us or 0.0) / 1e3, over[-1], row.over_isolated,
                                       row.satisfied[TARGET])  # fmt: skip
                    request.console.print(f"{mix}, {policy}, {load}: {fmean(over):.2f} of the gang", highlight=False)


def compared(rates: Mapping[str, RateEstimate]) -> dict[str, float]:
    """Return the default policy and the best others, with their rates: the first of those that carry the same."""
    best = sorted(set(rates) - {DEFAULT}, key=lambda policy: (-rates[policy].mean_per_s, policy))
    return {policy: rates[policy].mean_per_s for policy in (DEFAULT, *best[:OTHERS]) if policy in rates}


def meeting_gang(model: ModelProfile, overheads: Overheads) -> tuple[int, float]:
    """Return the fewest cores on which a query alone meets its target, and how long its layers take there, us.

    All cores if none do, or without a target.
    """
    way_us = overheads.submit_us + overheads.dispatch_us + overheads.answer_us
    times_us = [model.span_us(0, model.layers, cores) for cores in range(1, model.cores + 1)]
    fits = [cores for cores, time_us in enumerate(times_us, 1) if way_us + time_us <= (model.qos_us or 0.0)]
    cores = fits[0] if fits else model.cores
    return cores, times_us[cores - 1]
