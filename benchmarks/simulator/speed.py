"""How fast the simulator is: queries on 64 cores, CPU seconds and memory. One core, one process."""

import resource
import sys
import time

from gangway.scheduler.policies.registry import DEFAULT_POLICY, make_policy
from gangway.simulator.loop import simulate
from gangway.simulator.rates import TARGET, one_core_rate
from gangway.simulator.scenario import make_scenario
from gangway.workload.arrivals import poisson
from gangway.workload.mix import read_mix
from gangway.workload.outcomes import summarise
from testing.report import Row, option_parser, start_report

CORES = 64
LOAD = 0.12  # of what the cores could do if every query ran on one
SECONDS_A_MILLION = 600.0
MOST_MEMORY_MIB = 500.0


def main() -> int:
    """Run the benchmark; status 0 if every target is met, else 1."""
    parser = option_parser("speed of the simulator: mixes of VELTAIR on 64 cores")
    parser.add_argument("--queries", type=int, default=1_000_000, help="of each run")
    parser.add_argument("--mixes", default="light,mix", help="names of mixes")
    parser.add_argument("--policies", default=f"{DEFAULT_POLICY},veltair", help="names of policies")
    options = parser.parse_args()
    report = start_report("speed of the simulator")
    rows: list[Row] = []
    for mix in options.mixes.split(","):
        scenario = make_scenario(read_mix(mix), CORES)
        rate_per_s = LOAD * one_core_rate(scenario)
        for policy in options.policies.split(","):
            arrivals = poisson(scenario.mix, rate_per_s, options.queries, seed=1)
            begin_s = time.process_time()
            result = simulate(make_policy(policy), scenario.models, arrivals, scenario.machine)
            cpu_s = time.process_time() - begin_s
            total = summarise(result.outcomes, {TARGET: scenario.targets_us}).total
            rows.append(
                {
                    "mix": mix,
                    "policy": policy,
                    "queries": options.queries,
                    "rate/s": rate_per_s,
                    "in time": total.satisfied[TARGET] or 0.0,
                    "blocks a query": result.counters.blocks / options.queries,
                    "CPU s": cpu_s,
                    "us a query": cpu_s * 1e6 / options.queries,
                    "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                }
            )
            report.target(f"{mix}, {policy}: CPU s a million queries", cpu_s * 1e6 / options.queries, SECONDS_A_MILLION)
    report.table("simulations", rows)
    report.target("peak memory, MiB", float(rows[-1]["peak MiB"]), MOST_MEMORY_MIB)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
