"""`python -m tests.scheduler.every_decision`: what policies decide, as one line of JSON: checksums by name.

Random situations for every policy; simulated mixes, batches and classes for the default one. Only what decides differs
between two runs of this: whether its modules are compiled.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import get_args

from gangway.scheduler import WHY_INTERPRETED
from gangway.scheduler.observability import describe
from gangway.scheduler.policies.base import Policy
from gangway.scheduler.policies.registry import DEFAULT_POLICY, POLICIES, make_policy
from gangway.scheduler.policy import Decision, LoneStart, Query, RunningBlock, Snapshot
from gangway.simulator.batching import Batching
from gangway.simulator.loop import simulate
from gangway.simulator.scenario import make_scenario
from gangway.workload.arrivals import bursts, poisson
from gangway.workload.mix import capacity_per_s, read_mix
from gangway.workload.qos import Qos
from testing.watched_policy import WatchedPolicy
from tests.scheduler.policies.test_contract import answered, situation

SITUATIONS = 60  # for each policy
QUERIES = 150  # of each simulation
SIMULATED = (  # mix, cores, share of the capacity, rows of a batch at most
    ("mix", 2, 0.3, 1),
    ("mix", 2, 1.6, 1),
    ("light", 64, 0.7, 1),
    ("heavy", 16, 1.1, 1),
    ("light", 2, 1.5, 8),
)


class Noted(WatchedPolicy):
    """A policy whose decisions are added up."""

    def __init__(self, inner: Policy) -> None:
        super().__init__(inner)
        self.count = 0
        self.sum = hashlib.sha256()

    def decide(self, snapshot: Snapshot) -> Sequence[Decision]:
        decisions = super().decide(snapshot)
        self.sum.update(repr((snapshot.now_us, decisions)).encode())
        for decision in decisions:
            self.sum.update(json.dumps(describe(decision, snapshot)).encode())  # as traces have it
        self.count += len(decisions)
        return decisions


def in_situations(name: str) -> Noted:
    """Ask a policy about random situations, and tell it of requests that were answered meanwhile."""
    generator = random.Random(11)
    inner = make_policy(name)
    policy = Noted(inner)
    for number in range(SITUATIONS):
        state = situation(generator)
        state = replace(state, waiting=[replace(query) for query in state.waiting])
        for query in state.waiting:
            policy.arrived(query)
        policy.decide(state)
        inner.answered(0, [answered(generator, state.now_us)], 1000 * (number + 1))
        for query in state.waiting[::2]:
            policy.finished(query, state.now_us)
    return policy


def simulated(mix_name: str, cores: int, load: float, batch: int, seed: int) -> Noted:
    """Simulate a mix by the default policy."""
    scenario = make_scenario(read_mix(mix_name).with_qos(Qos(multiple=3.0)), cores)
    mix = scenario.mix
    rate_per_s = load * capacity_per_s(mix, dict(zip(mix.names, scenario.isolated_us, strict=True)))
    arrivals = bursts(poisson(mix, rate_per_s, QUERIES, seed), 1, 1 + (batch > 1))
    policy = Noted(make_policy(DEFAULT_POLICY))
    simulate(policy, scenario.models, arrivals, scenario.machine, batching=Batching(batch) if batch > 1 else None)
    return policy


def runs() -> Iterator[tuple[str, Noted]]:
    """Yield each run by its name."""
    for name in sorted(POLICIES):
        yield name, in_situations(name)
    for mix, cores, load, batch in SIMULATED:
        for seed in (1, 2):
            yield (
                f"{mix}, {cores} cores, load {load}, batch {batch}, seed {seed}",
                simulated(mix, cores, load, batch, seed),
            )


def values() -> dict[str, list[list[str]]]:
    """Return, of what policies see and answer, the fields, and what patterns of `match` take them for."""
    kinds = (Query, RunningBlock, Snapshot, LoneStart, *get_args(Decision))
    return {kind.__name__: [[field.name for field in fields(kind)], list(kind.__match_args__)] for kind in kinds}


if __name__ == "__main__":
    found = {name: (policy.count, policy.sum.hexdigest()) for name, policy in runs()}
    print(json.dumps({"why interpreted": WHY_INTERPRETED, "values": values(), "runs": found}))
