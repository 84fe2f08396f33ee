"""What the numbers of the default policy are worth that simulations chose: each beside others around it.

Loads last, as those of published rates do (`simulator/rates.py`). Their rate is the one at which 95 % of the requests
are in time by the numbers as they are. Seeds, and the mixes `held out`, are none that a number was chosen with. A table
for each number says what other values lose, in the figures of `benchmarks.ablation`.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace

from benchmarks.ablation import Comparison, Outcome, Point, Shedding, compared, outcome, summaries
from gangway.scheduler.policies.base import Policy
from gangway.scheduler.policies.gangway import Gangway
from gangway.scheduler.policy_config import DEFAULT, PolicyConfig
from gangway.simulator.loop import simulate
from gangway.simulator.rates import QUERIES, RateGoal, one_core_rate, search_rate, window
from testing.report import Report, option_parser, start_report

SHARE = 0.95
FIRST_SEED = 101
NUMBERS: Mapping[str, Sequence[float]] = {
    "prediction.min_margin_factor": (1.0, 1.02, 1.08),
    "fairness.weight_per_share": (0.0, 50.0, 200.0),
    "restarts.max_stopped_per_core": (1, 4),
    "shares.busy_efficiency": (0.6, 0.75, 0.8, 0.9),
    "growth.idle_efficiency": (0.05, 0.1, 0.2, 0.3),
    "trading.min_length_factor": (1.5, 3.0),
}
HELD_OUT = {
    "held out: short and long": "mobilenetv2=4,bert_large=1",
    "held out: equal": "resnet50=1,googlenet=1,efficientnet_b0=1,ssd_resnet34=1",
}
MIXES = {mix: mix for mix in ("light", "medium", "heavy", "mix")}
POINTS = (
    *(Point(f"{name}, {cores}", mix, cores) for cores in (16, 64) for name, mix in {**MIXES, **HELD_OUT}.items()),
    *(Point(f"{mix}, 64, contended", mix, 64, contended=True) for mix in MIXES),
    Point("mix, 16, 3 x", "mix", 16, times=3.0),
)


def changed(number: str, value: float) -> PolicyConfig:
    """Return the default configuration with another value of PART.FIELD."""
    part, field = number.split(".")
    return replace(DEFAULT, **{part: replace(getattr(DEFAULT, part), **{field: value})})


def rate_of(point: Point, queries: int) -> float:
    """Return the rate at a point."""
    scenario = point.scenario()
    found = search_rate("gangway", scenario, RateGoal(SHARE), queries, FIRST_SEED - 1).rate_per_s
    return point.times * (found or one_core_rate(scenario) / 2)


def simulated(
    point: Point, rate_per_s: float, config: PolicyConfig, seeds: Sequence[int], queries: int
) -> list[Outcome]:
    """Return what a policy does with each seed's arrivals."""
    scenario = point.scenario()
    counts = window(scenario, rate_per_s, queries)
    found = []
    for seed in seeds:
        policy: Policy = Shedding(config) if point.times > 1 else Gangway(config)
        arrivals = scenario.arrivals(rate_per_s, counts.arrivals, seed)
        result = simulate(policy, scenario.models, arrivals, scenario.machine)
        found.append(outcome(counts.of(result.outcomes), scenario.targets_us, scenario.isolated_us))
    return found


def run(report: Report, options: argparse.Namespace) -> None:
    """Simulate all numbers at all points."""
    points = [point for point in POINTS if options.points in point.name]
    numbers = {number: values for number, values in NUMBERS.items() if options.numbers in number}
    seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)
    with ProcessPoolExecutor(options.processes) as pool:
        rates = dict(zip(points, pool.map(rate_of, points, [options.queries] * len(points)), strict=True))

        def submit(point: Point, config: PolicyConfig) -> Future[list[Outcome]]:
            return pool.submit(simulated, point, rates[point], config, seeds, options.queries)

        usual = {point: submit(point, DEFAULT) for point in points}
        others = {
            (number, value, point): submit(point, changed(number, value))
            for number, values in numbers.items()
            for value in values
            for point in points
        }
        for number, values in numbers.items():
            found: list[Comparison] = []
            for value in values:
                for point in points:
                    on, off = usual[point].result(), others[number, value, point].result()
                    found.append(compared(point.name, f"{value:g}", on, off))
            part, field = number.split(".")
            used = getattr(getattr(DEFAULT, part), field)
            report.table(
                f"what other values than {used:g} of {number} lose",
                [{"point": one.point, **one.row()} for one in found],
            )
            report.table(f"{number}, all points", list(summaries(found, [f"{value:g}" for value in values])))


def main() -> int:
    """Run the benchmark."""
    parser = option_parser(__doc__ or "")
    add = parser.add_argument
    add("--numbers", default="", metavar="TEXT", help="only those whose name contains this")
    add("--points", default="", metavar="TEXT", help="only those whose name contains this")
    add("--seeds", type=int, default=5, help="runs of each, with arrivals of their own")
    add("--queries", type=int, default=QUERIES, help="that count in a run, at least")
    add("--processes", type=int, default=2, help="simulations at a time")
    options = parser.parse_args()
    report = start_report("Numbers of the default policy")
    run(report, options)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
