"""What holds whatever the policy: on random traces, for every policy there is."""

import itertools
import random
from collections import defaultdict

import numpy as np
import pytest

from gangway.scheduler.policies.registry import POLICIES, make_policy
from gangway.scheduler.policy import Decision, PlannedBlock, Resize, Snapshot, Start
from gangway.simulator.loop import simulate
from gangway.simulator.machine import Machine, Overheads
from gangway.workload.arrivals import Arrivals
from tests.simulator.conftest import Ledger, Scripted, profile, trace

CORES = 4
LAYERS = 8


def models():
    return {
        0: profile([40.0, 300.0, 20.0, 500.0], CORES, 0, 2_000.0, memory=0.3),
        1: profile([900.0] * 12, CORES, 1, 30_000.0, memory=0.1),
        2: profile([30.0, 10.0], CORES, 2, 300.0, memory=1.0),
        3: profile([200.0] * 9, CORES, 3, None, memory=0.6),
    }


def random_trace(seed: int, count: int = 300) -> Arrivals:
    generator = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        now += generator.choice([0.0, generator.expovariate(1 / 900), generator.expovariate(1 / 900)])
        times.append(now)
    return Arrivals(np.array(times), np.array([generator.choice([0, 0, 1, 2, 2, 3]) for _ in times], np.int64))


MACHINES = (
    Machine(CORES),
    Machine(CORES, Overheads(20, 30, 5, 8, 15, 60, 40), level_per_demand=0.4, level_step=0.05, leases=6),
)


@pytest.mark.parametrize("machine", MACHINES, ids=["bare", "overheads"])
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_query_is_served_once_and_no_core_twice(name, machine):
    arrivals, ledger = random_trace(3), Ledger()
    known = models()
    result = simulate(make_policy(name), known, arrivals, machine, ledger)
    assert result.outcomes.answered.all() and (result.outcomes.latency_us >= 0).all()
    _check_cores(ledger)
    _check_layers(ledger, arrivals, known)
    held = sum((end - begin) * len(cores) for _, cores, _, _, begin, end in ledger.stretches)
    assert result.counters.core_busy_us == pytest.approx(held)
    if machine.level_per_demand == 0:
        alone = sum(known[m].remaining_us(0, 1) for m in arrivals.models.tolist())
        assert held == pytest.approx(alone), "layers here scale perfectly: no work is lost or done twice"


def _check_cores(ledger: Ledger) -> None:
    by_core = defaultdict(list)
    for query, cores, _, _, begin, end in ledger.stretches:
        assert len(set(cores)) == len(cores) and set(cores) <= set(range(CORES))
        for core in cores:
            by_core[core].append((begin, end, query))
    for stretches in by_core.values():
        stretches.sort()
        for (_, end, _), (begin, _, _) in itertools.pairwise(stretches):
            assert begin >= end - 1e-6


def _check_layers(ledger: Ledger, arrivals: Arrivals, known: dict) -> None:
    by_query = defaultdict(list)
    for query, _, first, last, begin, end in ledger.stretches:
        assert begin >= arrivals.times_us[query]
        by_query[query].append((begin, end, first, last))
    assert len(by_query) == len(arrivals.models)
    for query, stretches in by_query.items():
        assert stretches == sorted(stretches), "one block at a time"
        assert stretches[0][2] == 0 and stretches[-1][3] == known[int(arrivals.models[query])].layers
        for (*_, last), (_, _, first, _) in itertools.pairwise(stretches):
            assert last - 1 <= first <= last, "no layer is left out, none but the one it was stopped in is in both"


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_seed_means_one_result(name):
    first, second = (simulate(make_policy(name), models(), random_trace(5), MACHINES[1]) for _ in range(2))
    np.testing.assert_array_equal(first.outcomes.latency_us, second.outcomes.latency_us)
    assert first.counters == second.counters


def test_a_boundary_that_is_reached_is_behind_a_block() -> None:
    """However times are rounded: else a policy grows what the plan shrinks, for ever, while decisions take no time."""
    generator = random.Random(5)
    seen: list[tuple[int, int]] = []

    def grow(snapshot: Snapshot) -> list[Decision]:
        """Take all cores for each layer; the plan gives one of them back at the next boundary."""
        for block in snapshot.running:
            seen.append((block.layer, len(block.cores)))
            assert len(seen) < 100 * LAYERS, "no time passes"
            plan = tuple(PlannedBlock(layer, 3) for layer in range(block.layer + 1, LAYERS))
            return [Resize(0, block.cores + snapshot.free_cores, "", (), plan)] if snapshot.free_cores else []
        return [Start(0, LAYERS, snapshot.free_cores, blocks=(PlannedBlock(1, 3),))] if snapshot.waiting else []

    for _ in range(50):
        seen.clear()
        model = profile([generator.uniform(0.1, 1e4) for _ in range(LAYERS)], CORES)
        simulate(Scripted(grow), {0: model}, trace((generator.uniform(0, 1e7), 0)), Machine(CORES))
        assert [layer for layer, cores in seen if cores == 3] == list(range(1, LAYERS))
