"""What decisions of each policy cost, as a formula of what they look at: the table in `simulator/decision_cost.py`.

CPU time of `decide`, driven by the simulator on 64 modelled cores, in the four mixes at a rate that all policies bear.
Least squares over all calls but the slowest percent, with no term below zero.
"""

import time
from collections.abc import Sequence

import numpy as np

from benchmarks.papers.figures import Csv, FigureRequest
from gangway.scheduler.policies.base import Policy
from gangway.scheduler.policies.registry import make_policy
from gangway.scheduler.policy import Decision, Snapshot
from gangway.simulator.decision_cost import MOST_WAITING, DecisionCost
from gangway.simulator.loop import simulate
from gangway.simulator.rates import one_core_rate
from gangway.simulator.scenario import make_scenario
from gangway.workload.mix import BUILTIN
from testing.watched_policy import WatchedPolicy

CORES = 64
LOADS = (0.05, 0.15, 0.3)  # of what the cores could do if every query ran on one
POLICIES = ("gangway", "veltair", "veltair_as", "veltair_ac", "planaria", "fixed_block:6", "model_fcfs", "protean",
            "edf", "prema", "layerweaver_plus", "triton")  # fmt: skip
MOST_QUERIES = 200
COUNTED = 0.99  # of the calls: in the others the system took the core
TERMS = 4  # call, waiting, running, decisions

Call = tuple[float, int, int, int]
"""Microseconds, queries that wait, queries that run, decisions."""


class Timed(WatchedPolicy):
    """A policy whose calls are noted."""

    def __init__(self, inner: Policy) -> None:
        super().__init__(inner)
        self.calls: list[Call] = []

    def decide(self, snapshot: Snapshot) -> Sequence[Decision]:
        """Let the policy decide; note the CPU time."""
        begin_ns = time.thread_time_ns()
        decisions = self.inner.decide(snapshot)
        time_us = (time.thread_time_ns() - begin_ns) / 1000
        self.calls.append((time_us, min(len(snapshot.waiting), MOST_WAITING), len(snapshot.running), len(decisions)))
        return decisions


def draw(request: FigureRequest) -> None:
    """Write decision_costs.csv. Raises OSError."""
    queries = min(request.queries, MOST_QUERIES)
    header = ("policy", "call_us", "waiting_us", "running_us", "decision_us", "mean_us", "us_per_query")
    with Csv(request.output / "decision_costs.csv", header) as file:
        for policy in POLICIES:
            calls = calls_of(policy, queries, request.seed)
            cost, total_us = fit(calls), sum(call[0] for call in calls)
            runs = len(LOADS) * len(BUILTIN)
            mean_us, query_us = total_us / len(calls), total_us / (runs * queries)
            file.write(policy, *(round(value, 1) for value in vars(cost).values()), mean_us, query_us)
            request.console.print(f"{policy}: {cost}, {query_us:.0f} us a query", highlight=False)


def calls_of(policy: str, queries: int, seed: int) -> list[Call]:
    """Run a policy in all mixes and loads."""
    calls: list[Call] = []
    for mix in BUILTIN.values():
        scenario = make_scenario(mix, CORES)
        for load in LOADS:
            timed = Timed(make_policy(policy))
            arrivals = scenario.arrivals(load * one_core_rate(scenario), queries, seed)
            simulate(timed, scenario.models, arrivals, scenario.machine)
            calls += timed.calls
    return calls


def fit(calls: Sequence[Call]) -> DecisionCost:
    """Return the closest formula; terms that would be negative are 0, and the others are fitted without them."""
    table = np.array(calls, dtype=float)
    table = table[table[:, 0] <= np.quantile(table[:, 0], COUNTED)]
    terms, times_us = np.column_stack([np.ones(len(table)), table[:, 1:]]), table[:, 0]
    used, found = list(range(TERMS)), np.zeros(TERMS)
    while used:
        some = np.linalg.lstsq(terms[:, used], times_us, rcond=None)[0]
        if some.min() >= 0:
            found[used] = some
            break
        used.pop(int(some.argmin()))
    return DecisionCost(*found.tolist())
