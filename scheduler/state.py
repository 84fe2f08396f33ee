"""How a live scheduler runs, and what its parts share: tables, policy and accounts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from gangway.base.logs import LogLevels
from gangway.executor.control import ControlSegment
from gangway.scheduler.batching.former import BatchFormer
from gangway.scheduler.models import ModelTable
from gangway.scheduler.observability import Accounts, DecisionLog, TraceWriter
from gangway.scheduler.requests import RequestTable
from gangway.scheduler.resources import ArenaPool, WorkerTable
from gangway.scheduler.stages.compound_policy import CompoundPolicy
from gangway.scheduler.timeline import TimelineWriter


@dataclass(frozen=True, eq=False)
class SchedulerState:
    """The tables of one scheduler process. `former`: for a policy that is shown batches. `way_back_us`: as in Snapshot.

    `trace`: where decisions are written; None: nowhere.
    """

    control: ControlSegment
    requests: RequestTable
    workers: WorkerTable
    models: ModelTable
    arenas: ArenaPool
    policy: CompoundPolicy
    former: BatchFormer | None
    accounts: Accounts
    log: DecisionLog
    trace: TraceWriter | None
    way_back_us: float


@dataclass(frozen=True)
class SchedulerOptions:
    """How a live scheduler runs.

    `spin_us`: of the loop before it sleeps. `way_back_us`: as in Snapshot. `dispatch_us`: what each dispatch takes of a
    worker's core. `make_former`: of batches, for policies that are shown such. `nodes`: the workers of each NUMA node
    that a policy keeps gangs in; empty: there is one. `models_bytes`: that all models may hold; 0: any number.
    """

    spin_us: int = 0
    way_back_us: float = 0.0
    dispatch_us: float = 0.0
    trace: TraceWriter | None = None
    timeline: TimelineWriter | None = None
    set_log: Callable[[LogLevels], None] = lambda levels: None
    make_former: Callable[[Callable[[], int], float, float], BatchFormer] = BatchFormer
    nodes: Sequence[Sequence[int]] = ()
    models_bytes: int = 0


DEFAULT_OPTIONS: Final = SchedulerOptions()
