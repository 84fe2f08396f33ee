"""The policy interface: what a scheduling policy sees, and what it answers. Pure: no process, no clock, no I/O.

The live scheduler and the simulator drive the same policies. Times are microseconds on the driver's clock. Cores are
numbers of workers.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import NamedTuple, TypeVar, dataclass_transform

from gangway.executor.fast_path import Completed
from gangway.scheduler.policy_config import DEFAULT, PolicyConfig
from gangway.scheduler.profiles import ModelProfile

# Frozen dataclasses that are made for every request, or for every decision.
#
# To type checkers they are `dataclass(frozen=True, slots=True)`, which is what keeps them from being changed. At run
# time nothing does: an `__init__` that goes around its own `__setattr__` takes ten times as long.

T = TypeVar("T")


@dataclass_transform(field_specifiers=(dataclasses.field,))
def value(*, frozen: bool, slots: bool) -> Callable[[type[T]], type[T]]:
    """Make a dataclass that compares and hashes like a frozen one."""
    assert frozen
    return dataclasses.dataclass(slots=slots, unsafe_hash=True)


@value(frozen=True, slots=True)
class Query:
    """One request as the policy sees it. `query_id` is unique within the driver's lifetime and grows with arrival."""

    query_id: int
    model_id: int
    rows: int
    arrival_us: float
    deadline_us: float | None  # when it should be answered: the smaller one of its model's and its own; None: whenever
    priority: int = 0  # class, across all models: lower ones go first; 0 is normal
    next_layer: int = 0
    started: bool = False  # it has run before and was stopped: it holds a lease
    ran_us: float = 0.0  # how long it was on cores, in the blocks before
    rejects_late: bool = False  # its queue policy: it is refused once it is certain to be late
    join_key: int = 0  # only queries with the same one are joined; 0: usual; see NEVER_JOINED
    cores: int = 0  # the size of the gang that was planned for it with its batch; 0: the policy's choice
    formed: bool = False  # it is part of a batch that has begun: neither joined nor split any more
    batch: int = 0  # the number of that batch,
    round: int = 0  # and its round: the policy sees it when those of the rounds before have started
    compound: int = 0  # the compound task that it is a member of, which may run by a schedule; 0: none
    request_rows: int = 0  # rows of the largest request that has rows here, as far as it has; 0: it is one request
    fp32_id: int = -1  # the same model in fp32, as which it may begin instead (`precision.py`); -1: there is none


class PlannedBlock(NamedTuple):
    """A part of what a gang runs: from this layer on it has at most so many cores.

    A gang that has more leaves the others free there, without a decision. It gets no further ones.
    """

    layer: int
    cores: int


@value(frozen=True, slots=True)
class RunningBlock:
    """What a gang runs: layers [query.next_layer, end_layer) of a query, in one block or as planned."""

    query: Query
    end_layer: int
    cores: tuple[int, ...]  # by rank
    started_us: float
    layer: int = 0  # being executed now
    layer_started_us: float = 0.0
    stopping: bool = False  # it was told to stop, or to shrink: cores of it come free soon; no Resize until then
    versions: tuple[int, ...] = ()
    leaving: int = 0  # so many of its last cores come free at the next boundary: all, or those that shrinking takes
    blocks: tuple[PlannedBlock, ...] = ()


@value(frozen=True, slots=True)
class Snapshot:
    """Everything a decision may depend on."""

    now_us: float
    waiting: Sequence[Query]  # in order of arrival
    running: Sequence[RunningBlock]
    free_cores: tuple[int, ...]
    core_count: int  # cores in service, free or not
    models: Mapping[int, ModelProfile]
    level: float = 0.0  # of interference: 1 means that layers that depend on memory entirely take twice their time
    free_leases: int = 1_000_000  # so many queries that have not started yet can be started now
    way_back_us: float = 150.0  # from the last layer's end until the client has the answer, when the machine is busy
    prediction_errors: Mapping[int, float] = field(default_factory=dict)  # by model: time over prediction, lately
    gang_slowdown: float = 1.0  # the same of gangs of several cores, over that of gangs of one
    oldest_us: float | None = None  # arrival of the oldest that waits, shown or not; None: all are shown
    waiting_count: int = 0  # how many wait, shown or not; 0: all are shown


@value(frozen=True, slots=True)
class Start:
    """Run layers [query.next_layer, end_layer) of a waiting query on these free cores.

    `wanted` cores were asked for: fewer granted is VELTAIR's conflict. The driver counts it; growing is the policy's.
    """

    query_id: int
    end_layer: int
    cores: tuple[int, ...]
    versions: tuple[int, ...] = ()  # one per layer of the block; empty: the default version of each
    wanted: int = 0  # 0: as many as it got
    reason: str = ""  # of every decision: why, in words, for --trace-decisions
    blocks: tuple[PlannedBlock, ...] = ()  # by layer, all behind query.next_layer
    together: bool = False  # with the others that are: rank 0 of each begins, then rank 1 of each, and so on
    precision: str = ""  # of a query that may begin in either: the driver's choice (`precision.py`), not the policy's


@value(frozen=True, slots=True)
class Stop:
    """Take a running query off its cores at the next layer boundary (`at_once`: between two tasks, within some 200 us).

    It comes back as a waiting query; its cores are free then.
    """

    query_id: int
    at_once: bool = False
    reason: str = ""


@value(frozen=True, slots=True)
class Resize:
    """Let a running block go on with these cores.

    Growing: its cores, then free ones; they join at once. Shrinking: the first ones of its cores; the others come free
    at the next layer boundary. The plan is changed like that of a Replan, unless `versions` is None.
    """

    query_id: int
    cores: tuple[int, ...]
    reason: str = ""
    versions: tuple[int, ...] | None = None
    blocks: tuple[PlannedBlock, ...] = ()


@value(frozen=True, slots=True)
class Replan:
    """Change versions and blocks of a running query, in the layers that it has not come to.

    Both are as in its Start: `versions` has one number for each layer from `query.next_layer` on.
    """

    query_id: int
    versions: tuple[int, ...] = ()
    blocks: tuple[PlannedBlock, ...] = ()
    reason: str = ""


@value(frozen=True, slots=True)
class Reject:
    """Answer UNAVAILABLE to a waiting query that `rejects_late`."""

    query_id: int
    reason: str = ""


@value(frozen=True, slots=True)
class StartOver:
    """Let a stopped query give its lease and memory back: it waits as if it had never run, but is not joined.

    What it has computed is lost. A unit of several requests may be taken apart.
    """

    query_id: int
    reason: str = ""


@value(frozen=True, slots=True)
class Wake:
    """Call `decide` again at this time, if nothing happens before. A later decision's Wake takes its place."""

    at_us: float


@value(frozen=True, slots=True)
class LoneStart:
    """How a query of one row begins that waits alone: all layers on the first free cores, if so many are free.

    Nobody that runs may want the cores that are free.
    """

    cores: int
    versions: tuple[int, ...] = ()  # as in Start
    may_grow: bool = False  # it may want more cores later; otherwise it can use no more
    min_slack_us: float = 0.0  # from now to its deadline, less the way back: with less it may begin otherwise


Decision = Start | Stop | Resize | Replan | Reject | StartOver | Wake


class Policy(ABC):
    """Decides which waiting queries run next, how far, on which cores, and which running ones make room.

    Contract: `decide` is deterministic, though it may remember what it saw. It returns at most one decision for a query
    and at most one Wake; starts and growths use disjoint free cores. It may return nothing. It is called when a query
    arrives, a block ends, cores come free, or the Wake's time has come. What is left is offered again. Decisions
    about queries that have changed meanwhile (ended, cancelled) are ignored by the driver.
    """

    name: str
    config: PolicyConfig = DEFAULT  # what the driver goes by, too
    batches = False  # whether it is shown batches (queries joined and split) instead of single requests
    brief_first: bool = False  # whether others make room at once for a brief query (`ModelProfile.is_brief`)

    @abstractmethod
    def decide(self, snapshot: Snapshot) -> Sequence[Decision]:
        """Return what to do now."""

    def lone_start(self, model: ModelProfile, core_count: int, level: float) -> LoneStart | None:
        """Return how a lone query of a model begins, so that a driver need not ask; None: it has to.

        `core_count`, `level`: as in Snapshot.
        """
        return None

    def yields_from_us(self) -> float | None:
        """Return from when on somebody who runs might make room for a newcomer that has a deadline, of no higher class.

        As things are after the last decision, if no core is free. A driver for which decisions take time asks the
        sooner. None: not known.
        """
        return None

    def arrived(self, query: Query) -> None:  # noqa: B027 - most policies learn nothing from it
        """Note that a request has come. It is shown when there is something to decide, perhaps in a batch."""

    def finished(self, query: Query, now_us: float) -> None:  # noqa: B027 - most policies learn nothing from it
        """Note that a query was answered."""

    def answered(self, model_id: int, requests: Sequence[Completed], first_id: int) -> None:
        """Note requests of one row to a model that have come, and were answered one after the other, unseen.

        Their numbers are those from `first_id` on. It is as if `arrived` and `finished` were called for each of them.
        """
        for query_id, request in enumerate(requests, first_id):
            query = Query(query_id, model_id, 1, request.arrival_us, request.deadline_us, request.priority)
            self.arrived(query)
            self.finished(query, request.end_us)
