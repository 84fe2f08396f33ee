"""`gangway simulate --compound`: models on the same input, in stages and in other ways, on the modelled machine.

All ways run in the same simulation, with what starting and ending a block costs and with interference: schedules by a
policy that starts stage after stage, today's way by the default policy. The search measures there, too.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gangway.base.console import Table
from gangway.scheduler.policies.base import Policy
from gangway.scheduler.policies.registry import DEFAULT_POLICY, make_policy
from gangway.scheduler.policy import Decision, Snapshot, Start
from gangway.scheduler.stages.ir import Schedule, parallel, schedule, sequential
from gangway.scheduler.stages.search import PointerSpace, Record, best, coordinate_descent, random_search
from gangway.simulator.loop import simulate
from gangway.simulator.scenario import Scenario
from gangway.workload.arrivals import Arrivals

ROUNDS = 8  # of coordinate descent
CANDIDATES = 12  # measured for each model in a round; random search measures as many in all
ALONE_TARGETS = 3.0  # times isolated: the targets with which today's way is tried, beside none


class Staged(Policy):
    """Starts the segments of a stage when those of the stage before have ended. Query i is of stream i."""

    name = "staged"

    def __init__(self, stages: Schedule) -> None:
        self._stages = stages
        self._next = 0

    def decide(self, snapshot: Snapshot) -> Sequence[Decision]:
        """Start the next stage on the first cores, in order of its segments, if nothing runs."""
        if snapshot.running or self._next == len(self._stages):
            return ()
        stage, free = self._stages[self._next], list(snapshot.free_cores)
        self._next += 1
        decisions = []
        for segment in stage:
            cores, free = tuple(free[: segment.cores]), free[segment.cores :]
            decisions.append(Start(segment.stream, segment.end, cores, segment.versions))
        return decisions


@dataclass(frozen=True)
class CompoundComparison:
    """One compound task: microseconds until its last model is answered, by way; `found` by coordinate descent."""

    names: tuple[str, ...]
    sequential_us: float
    split_us: float
    today_us: float
    random_us: float
    coordinate_us: float
    found: Schedule

    @property
    def over_sequential(self) -> float:
        """Return how many times as long the sequential schedule takes as the one that was found."""
        return self.sequential_us / self.coordinate_us

    @property
    def over_today(self) -> float:
        """Return how many times as long today's way takes."""
        return self.today_us / self.coordinate_us


def compare(
    scenario: Scenario,
    seed: int,
    progress: Callable[[], object] = lambda: None,
    rounds: int = ROUNDS,
    candidates: int = CANDIDATES,
) -> CompoundComparison:
    """Search for the best schedule of the scenario's models, one request of each, and run the other ways.

    Both searches measure as many schedules. `progress` is called for each.
    """
    streams = tuple(scenario.models.values())
    space = PointerSpace(streams, scenario.machine.cores, 2 * len(streams))

    def measure(stages: Schedule) -> float:
        return makespan_us(Staged(stages), scenario)

    def found(records: Iterable[Record]) -> Record:
        seen = []
        for record in records:
            seen.append(record)
            progress()
        return best(seen)

    descended = found(coordinate_descent(measure, space, rounds, candidates, seed))
    return CompoundComparison(
        names=tuple(stream.name for stream in streams),
        sequential_us=measure(schedule(streams, sequential(streams), space.cores)),
        split_us=measure(schedule(streams, parallel(streams), space.cores)),
        today_us=today_us(scenario),
        random_us=found(random_search(measure, space, searched(streams, rounds, candidates), seed)).time_us,
        coordinate_us=descended.time_us,
        found=descended.stages,
    )


def searched(streams: Sequence[object], rounds: int = ROUNDS, candidates: int = CANDIDATES) -> int:
    """Return how many schedules a search measures, at most, beside the two plain ones."""
    return len(streams) * rounds * candidates


def today_us(scenario: Scenario) -> float:
    """Return how long the default policy takes for requests that arrive together: the better of two.

    Without latency targets, and with targets of three times isolated.
    """
    targets = {
        number: replace(model, qos_us=ALONE_TARGETS * model.isolated_us) for number, model in scenario.models.items()
    }
    without = {number: replace(model, qos_us=None) for number, model in scenario.models.items()}
    ways = (replace(scenario, models=models) for models in (without, targets))
    return min(makespan_us(make_policy(DEFAULT_POLICY), way) for way in ways)


def makespan_us(policy: Policy, scenario: Scenario) -> float:
    """Return the time from the arrival of a request of each model, all at once, to the last answer."""
    count = len(scenario.models)
    arrivals = Arrivals(np.zeros(count), np.arange(count, dtype=np.int64))
    return float(simulate(policy, scenario.models, arrivals, scenario.machine).outcomes.latency_us.max())


def compound_table(comparisons: Sequence[CompoundComparison], cores: int) -> Table:
    """Return a row per compound task, in at most 80 columns."""
    title = f"compound tasks, modelled, {cores} cores: ms until the last model is answered"
    result = Table(title=title)
    result.add_column("models")
    for name in ("seq.", "split", "today", "random", "coord.", "x seq.", "x today"):
        result.add_column(name, justify="right")
    for each in comparisons:
        times_us = (each.sequential_us, each.split_us, each.today_us, each.random_us, each.coordinate_us)
        cells = [f"{time_us / 1000:.2f}" for time_us in times_us]
        result.add_row("+\n".join(each.names), *cells, f"{each.over_sequential:.2f}", f"{each.over_today:.2f}")
    return result
