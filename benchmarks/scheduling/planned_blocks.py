"""Which queries of the default policy have blocks of Algorithm 2, of those that compute for long; simulated.

A query has some if a plan of its Start, Resize or Replan names a layer where a block begins. It narrows if a block has
fewer cores than the one before it. Time of computing is from its first Start to its end, stops included. Loads last, as
those of published rates do (`simulator/rates.py`); their rate is a share of what the cores carry one by one.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product

from benchmarks.scheduling.ablation import Point
from gangway.scheduler.policies.gangway import Gangway
from gangway.scheduler.policies.gangway_blocks import narrowings
from gangway.scheduler.policy import Decision, Query, Replan, Resize, Snapshot, Start
from gangway.simulator.loop import simulate
from gangway.simulator.rates import QUERIES, one_core_rate, window
from testing.report import Report, option_parser, start_report
from testing.watched_policy import WatchedPolicy

MIXES = ("light", "medium", "heavy", "mix")
CORES = (16, 64)
LONG_US = 2000.0
Row = dict[str, str | int | float]


class Watched(WatchedPolicy):
    """The default policy, whose queries with plans are noted, by id."""

    def __init__(self) -> None:
        super().__init__(Gangway())
        self._begun_us: dict[int, float] = {}
        self._planned: set[int] = set()
        self._narrowed: set[int] = set()
        self._wide: set[int] = set()
        self.queries = self.wide = self.planned = self.narrowed = 0  # that computed for long

    def decide(self, snapshot: Snapshot) -> Sequence[Decision]:
        """Decide as the policy does."""
        decisions = super().decide(snapshot)
        for decision in decisions:
            if isinstance(decision, Start):
                self._begun_us.setdefault(decision.query_id, snapshot.now_us)
                self._note(decision.query_id, decision, len(decision.cores))
            elif isinstance(decision, Resize):
                self._note(decision.query_id, decision, len(decision.cores))
            elif isinstance(decision, Replan):
                running = next(block for block in snapshot.running if block.query.query_id == decision.query_id)
                self._note(decision.query_id, decision, len(running.cores))
        return decisions

    def _note(self, query_id: int, decision: Start | Resize | Replan, cores: int) -> None:
        if cores > 1:
            self._wide.add(query_id)
        if decision.blocks:
            self._planned.add(query_id)
        if narrowings(decision.blocks, -1, cores):
            self._narrowed.add(query_id)

    def finished(self, query: Query, now_us: float) -> None:
        """Count it."""
        super().finished(query, now_us)
        begun_us = self._begun_us.pop(query.query_id, now_us)
        if now_us - begun_us > LONG_US:
            self.queries += 1
            self.wide += query.query_id in self._wide
            self.planned += query.query_id in self._planned
            self.narrowed += query.query_id in self._narrowed


def row(mix: str, cores: int, share: float, queries: int, seed: int) -> Row:
    """Simulate a mix at a share of the rate that its cores carry one by one."""
    scenario, policy = Point(mix, mix, cores).scenario(), Watched()
    rate_per_s = share * one_core_rate(scenario)
    counts = window(scenario, rate_per_s, queries)
    arrivals = scenario.arrivals(rate_per_s, counts.arrivals, seed)
    simulate(policy, scenario.models, arrivals, scenario.machine)
    return {
        "mix": mix,
        "cores": cores,
        "share of the capacity": share,
        "queries": counts.arrivals,
        "longer than 2 ms": policy.queries,
        "on several cores, %": 100 * policy.wide / max(1, policy.queries),
        "with blocks, %": 100 * policy.planned / max(1, policy.queries),
        "with narrower ones, %": 100 * policy.narrowed / max(1, policy.queries),
    }


def _rows(combinations: Iterable[tuple[str, int, float]], options: argparse.Namespace) -> list[Row]:
    with ProcessPoolExecutor(options.processes) as pool:
        tasks = [pool.submit(row, *each, options.queries, options.seed) for each in combinations]
        return [task.result() for task in tasks]


def run(report: Report, options: argparse.Namespace) -> None:
    """Simulate all mixes on all machines."""
    report.table("queries with planned blocks", _rows(product(options.mixes, options.cores, options.shares), options))


def main() -> int:
    """Run the benchmark."""
    parser = option_parser(__doc__ or "")
    add = parser.add_argument
    add("--mixes", nargs="+", default=MIXES, metavar="MIX", help="names or MODEL=WEIGHT,...")
    add("--cores", nargs="+", type=int, default=CORES, metavar="N", help="of the machines (16 64)")
    add(
        "--shares", nargs="+", type=float, default=(0.6,), metavar="S", help="rate, over cores / time on one core (0.6)"
    )
    add("--queries", type=int, default=QUERIES, help="that count in a run, at least")
    add("--seed", type=int, default=1, help="of the arrivals")
    add("--processes", type=int, default=2, help="simulations at a time")
    options = parser.parse_args()
    report = start_report("Queries with planned blocks")
    run(report, options)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
