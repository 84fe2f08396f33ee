"""Small machines and models for the simulator's tests."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from gangway.scheduler.policies.base import Policy
from gangway.scheduler.policy import Decision, Snapshot
from gangway.scheduler.profiles import ModelProfile
from gangway.simulator.block import SimulatedBlock
from gangway.simulator.machine import Observer
from gangway.simulator.measured import MeasuredModel
from gangway.workload.arrivals import Arrivals


def trace(*queries: tuple[float, int]) -> Arrivals:
    """Queries as (time, model)."""
    return Arrivals(np.array([q[0] for q in queries], float), np.array([q[1] for q in queries], np.int64))


def profile(
    layer_us: Sequence[float], cores: int = 2, model_id: int = 0, qos_us: float | None = None, memory: float = 0.0
) -> ModelProfile:
    """Layers that scale perfectly; with `memory`, of that slope and that demand on one core."""
    return ModelProfile(
        model_id=model_id,
        name=f"model {model_id}",
        layers=len(layer_us),
        max_ranks=cores,
        latency_us=tuple((tuple(time_us / count for count in range(1, cores + 1)),) for time_us in layer_us),
        slope=tuple((memory,) for _ in layer_us),
        memory_us=tuple(time_us * memory for time_us in layer_us),
        compute_us=tuple(layer_us),
        isolated_us=sum(layer_us) / cores,
        qos_us=qos_us,
        measured=True,
    )


def measured_by_hand(
    latency_us: Sequence[Sequence[Sequence[float]]],
    slope: Sequence[Sequence[float]],
    tasks: Sequence[Sequence[int]],
    name: str = "by hand",
) -> MeasuredModel:
    """Layers [layer][version], times on one and two cores; a tenth of what version 0 takes waits for memory."""
    first = tuple(tuple(versions[0]) for versions in latency_us)
    whole = tuple((sum(times),) for times in zip(*first, strict=True))
    return MeasuredModel(
        model_name=name,
        cpu="cpu",
        target="avx2",
        cores=(1, 2),
        latency_us=tuple(tuple(map(tuple, versions)) for versions in latency_us),
        slope=tuple(map(tuple, slope)),
        tasks=tuple(map(tuple, tasks)),
        memory_us=tuple(times[0] / 10 for times in first),
        compute_us=tuple(times[0] for times in first),
        batches=(1,),
        batch_us=tuple(tuple((time_us,) for time_us in times) for times in first),
        isolated_us=whole,
        together_us=whole,
        kernel_rows=(0,) * len(first),
        kernel_tasks=(0,) * len(first),
    )


class Scripted(Policy):
    """Decides what a function of the situation says, and remembers what it was shown."""

    name = "scripted"

    def __init__(self, script: Callable[[Snapshot], Sequence[Decision]]) -> None:
        self._script = script
        self.came: list[int] = []
        self.answered: list[tuple[int, float]] = []

    def decide(self, snapshot: Snapshot) -> Sequence[Decision]:
        return self._script(snapshot)

    def arrived(self, query):
        self.came.append(query.query_id)

    def finished(self, query, now_us):
        self.answered.append((query.query_id, now_us))


class Ledger(Observer):
    """Every stretch of work: (query, cores, first layer, end layer, begin, end)."""

    def __init__(self) -> None:
        self.stretches: list[tuple[int, tuple[int, ...], int, int, float, float]] = []

    def ran(self, block: SimulatedBlock, begin_layer: int, end_layer: int, begin_us: float, end_us: float) -> None:
        self.stretches.append((block.query.query_id, block.cores, begin_layer, end_layer, begin_us, end_us))


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()
