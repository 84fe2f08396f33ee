"""What is in time, and what stays in fp32, where deadlines choose the precision: on the modelled machine of two cores.

A model in bf16 is taken to need a given share of each layer's time in fp32. Rates are shares of the capacity in fp32,
targets three times the time alone in fp32, whatever a query is computed in.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from gangway.scheduler.profiles import ModelProfile
from gangway.simulator.rates import TARGET
from gangway.simulator.runs import run_policy
from gangway.simulator.scenario import Scenario, make_scenario
from gangway.workload.mix import read_mix
from gangway.workload.qos import parse_qos
from testing.report import Row, option_parser, start_report

CORES = 2
QUERIES = 3000
SEEDS = (1, 2)


def in_bf16(model: ModelProfile, share: float) -> ModelProfile:
    """Return a model whose layers take so much of their time, and whose target stays."""
    latency_us = tuple(tuple(tuple(share * us for us in times) for times in layer) for layer in model.latency_us)
    return replace(model, latency_us=latency_us, isolated_us=share * model.isolated_us)


def scenarios(mix: str, share: float) -> dict[str, Scenario]:
    """Return the mix in fp32, in bf16, and in both."""
    exact = make_scenario(read_mix(mix).with_qos(parse_qos("3x")), CORES)
    fast = {number: in_bf16(model, share) for number, model in exact.models.items()}
    return {"fp32": exact, "bf16": replace(exact, models=fast), "deadline": replace(exact, in_bf16=fast)}


def capacity_per_s(scenario: Scenario) -> float:
    """Return how many queries a second two cores compute, each query on one."""
    pairs = zip(scenario.mix.shares, scenario.models.values(), strict=True)
    return CORES * 1e6 / sum(share * model.work_us(1) for share, model in pairs)


def measure(name: str, scenario: Scenario, rate_per_s: float) -> Row:
    """Return the shares in time, of all queries and of the worst model's, and the share in fp32."""
    runs = [run_policy("gangway", scenario, rate_per_s, QUERIES, seed) for seed in SEEDS]
    in_time = [run.summary.total.satisfied[TARGET] or 0.0 for run in runs]
    least = [run.summary.least_satisfied(TARGET) or 0.0 for run in runs]
    counters = [run.result.counters for run in runs]
    in_fp32, either = sum(each.in_fp32 for each in counters), sum(each.in_fp32 + each.in_bf16 for each in counters)
    shown = f"{in_fp32 / either:.1%}" if either else "-"
    return {
        "precision": name,
        "in time": f"{fmean(in_time):.2%}",
        "worst model": f"{fmean(least):.2%}",
        "in fp32": shown,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; return 0."""
    parser = option_parser(__doc__ or "")
    parser.add_argument("--mix", default="medium", help="a mix of the simulator's models (%(default)s)")
    parser.add_argument("--bf16-share", type=float, default=0.6, help="of the time in fp32 (%(default)s)")
    parser.add_argument("--loads", default=".3,.5,.7,.8", help="shares of the capacity in fp32 (%(default)s)")
    options = parser.parse_args(argv)
    report = start_report(
        f"Precision by deadlines, {options.mix}, bf16 in {options.bf16_share:g} of the time, modelled"
    )
    found = scenarios(options.mix, options.bf16_share)
    for load in map(float, options.loads.split(",")):
        rate_per_s = load * capacity_per_s(found["fp32"])
        report.table(f"{load:g} of capacity", [measure(name, each, rate_per_s) for name, each in found.items()])
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
