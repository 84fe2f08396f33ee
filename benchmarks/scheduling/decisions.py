"""What decisions cost, policy by policy: CPU time of `decide`, with many waiting queries and for a query under load.

The simulator drives the policies on its measured models; only the time inside `decide` counts, after a run that has
made the tables of the models. The live scheduler's own work (rings, leases, snapshots) is not in it.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.papers.veltair_rates import read_rates
from gangway.scheduler.policies.base import Policy
from gangway.scheduler.policies.registry import DEFAULT_POLICY, POLICIES, make_policy
from gangway.scheduler.policy import Decision, Query, Snapshot
from gangway.simulator.loop import simulate
from gangway.simulator.rates import RateEstimate
from gangway.simulator.scenario import Scenario, make_scenario
from gangway.workload.arrivals import poisson
from gangway.workload.mix import Mix, MixModel, capacity_per_s, read_mix
from gangway.workload.qos import Qos
from testing.report import Row, option_parser, start_report
from testing.watched_policy import WatchedPolicy

CORES = 2
WAITING = (10, 100, 1000)
REPEATS = 15
QOS = Qos(multiple=3.0)
LIGHT_LOAD = 0.2  # of capacity
ARGUMENTS = {"fixed_block": "fixed_block:6"}
QUERY_US_AT_MOST = 50.0
MANY_CORES = 64
FIGURES = Path(__file__).parents[2] / "docs" / "measurements" / "figures"
BUSY_QUERY_US_AT_MOST = 100.0  # the paper's promise (VELTAIR, ASPLOS 2022, section 5)


class Timed(WatchedPolicy):
    """A policy whose decisions are timed."""

    def __init__(self, inner: Policy) -> None:
        super().__init__(inner)
        self.cpu_ns = 0

    def decide(self, snapshot: Snapshot) -> Sequence[Decision]:
        """Let the policy decide; note the CPU time. The simulator makes what runs when it is looked at, so before."""
        snapshot = replace(snapshot, running=list(snapshot.running))
        begin_ns = time.thread_time_ns()
        decisions = self.inner.decide(snapshot)
        self.cpu_ns += time.thread_time_ns() - begin_ns
        return decisions


def make_timed(name: str) -> Timed:
    """Return a fresh policy with its usual argument."""
    return Timed(make_policy(ARGUMENTS.get(name, name)))


def full_queue_us(name: str, scenario: Scenario, count: int) -> float:
    """Return the median CPU microseconds of one decision about so many waiting queries on idle cores."""
    period_us = 1e6 / capacity(scenario)
    queries = [
        Query(
            number,
            number % len(scenario.models),
            1,
            at_us,
            at_us + (scenario.models[number % len(scenario.models)].qos_us or 0.0),
        )
        for number, at_us in enumerate(index * period_us for index in range(count))
    ]
    now_us = count * period_us
    policy = make_timed(name)
    times_us = []
    for repeat in range(REPEATS):
        policy.cpu_ns = 0
        policy.decide(Snapshot(now_us + repeat, queries, (), tuple(range(CORES)), CORES, scenario.models))
        times_us.append(policy.cpu_ns / 1000)
    return statistics.median(times_us)


def query_us(name: str, scenario: Scenario, queries: int, rate_per_s: float) -> float:
    """Return the CPU microseconds of all decisions for one query at a rate."""
    arrivals = poisson(scenario.mix, rate_per_s, queries, seed=1)
    simulate(make_timed(name), scenario.models, arrivals, scenario.machine)  # makes the models' tables
    policy = make_timed(name)
    simulate(policy, scenario.models, arrivals, scenario.machine)
    return policy.cpu_ns / 1000 / queries


def capacity(scenario: Scenario) -> float:
    """Return the rate of the machine if it ran one query at a time."""
    return capacity_per_s(scenario.mix, dict(zip(scenario.mix.names, scenario.isolated_us, strict=True)))


def highest_rates() -> dict[str, RateEstimate]:
    """Return the rates by mix at which the default policy has 95 % of all in time: those of the papers' page."""
    return {
        mix: rates
        for (machine, mix, policy, goal), rates in read_rates(FIGURES).items()
        if (machine, policy, goal) == ("measured", DEFAULT_POLICY, "all")
    }


def main() -> int:
    """Measure every policy; return 1 if the default one costs too much."""
    parser = option_parser(__doc__ or "")
    parser.add_argument("--queries", type=int, default=2000, metavar="N", help="queries of the light load (2000)")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="runs on 64 cores; medians count (1)")
    parser.add_argument("--policies", default=",".join(sorted(POLICIES)), metavar="P[,P]", help="which ones (all)")
    options = parser.parse_args()
    report = start_report("CPU time of decisions")
    mixed = make_scenario(read_mix("mix").with_qos(QOS), CORES)
    alone = make_scenario(Mix("mobilenetv2", (MixModel("mobilenetv2", qos=QOS),)), CORES)
    rows: list[Row] = []
    for name in options.policies.split(","):
        row: dict[str, str | float] = {"policy": name}
        row |= {f"us, {count} waiting": full_queue_us(name, mixed, count) for count in WAITING}
        for title, scenario in (("mix", mixed), ("mobilenetv2", alone)):
            row[f"us a query, {title}"] = query_us(name, scenario, options.queries, LIGHT_LOAD * capacity(scenario))
        rows.append(row)
        if name == DEFAULT_POLICY:
            report.target(f"{name}: us a query of mobilenetv2", float(row["us a query, mobilenetv2"]), QUERY_US_AT_MOST)
    report.table(f"decide on {CORES} cores, us of CPU; light load: {LIGHT_LOAD} of capacity", rows)
    busy: list[Row] = []
    for mix, rates in highest_rates().items():
        rate_per_s = rates.mean_per_s
        scenario = make_scenario(read_mix(mix), MANY_CORES)
        runs = [query_us(DEFAULT_POLICY, scenario, options.queries, rate_per_s) for _ in range(options.repeat)]
        busy.append({"mix": mix, "queries/s": rate_per_s, "us a query": statistics.median(runs), "most": max(runs)})
        report.target(f"{mix} on {MANY_CORES} cores: us a query", statistics.median(runs), BUSY_QUERY_US_AT_MOST)
    report.table(f"{DEFAULT_POLICY} on {MANY_CORES} cores at its highest rates, us of CPU", busy)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
