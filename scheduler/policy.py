"""The policy interface: what a scheduling policy sees, and what it answers. Pure: no process, no clock, no I/O.

The live scheduler and the simulator drive the same policies. Times are microseconds on the driver's clock.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelProfile:
    """What a policy knows of a model.

    `latency_us[layer][version][ranks - 1]` is the isolated time of a layer of one row; empty until profiled.
    """

    model_id: int
    name: str
    layers: int
    max_ranks: int  # more cores than this never help any layer
    isolated_us: float = 0.0  # whole model, all cores, one row; 0 until measured
    latency_us: tuple[tuple[tuple[float, ...], ...], ...] = ()


@dataclass(frozen=True)
class Query:
    """One request as the policy sees it. `query_id` is unique within the driver's lifetime."""

    query_id: int
    model_id: int
    rows: int
    arrival_us: float
    deadline_us: float | None  # None: best effort
    priority: int = 0
    next_layer: int = 0


@dataclass(frozen=True)
class RunningBlock:
    """A layer block on its gang."""

    query: Query
    end_layer: int
    cores: tuple[int, ...]
    started_us: float


@dataclass(frozen=True)
class Snapshot:
    """Everything a decision may depend on."""

    now_us: float
    waiting: Sequence[Query]  # in order of arrival
    running: Sequence[RunningBlock]
    free_cores: tuple[int, ...]
    core_count: int  # cores in service, free or not
    models: Mapping[int, ModelProfile]


@dataclass(frozen=True)
class Dispatch:
    """Run layers [query.next_layer, end_layer) of a waiting query on these free cores."""

    query_id: int
    end_layer: int
    cores: tuple[int, ...]
    versions: tuple[int, ...] = ()  # one per layer of the block; empty: the default version of each


class Policy(ABC):
    """Decides which waiting queries run next, how far, and on which free cores.

    Contract: `decide` is deterministic, returns dispatches of distinct waiting queries on disjoint free cores, may
    return none, and is called whenever a query arrives, a block ends or cores become free. What is left waiting is
    offered again next time.
    """

    name: str

    @abstractmethod
    def decide(self, snapshot: Snapshot) -> list[Dispatch]:
        """Return what to start now."""
