"""What a scheduling policy (`policies/base.py`) sees, and what it answers. Pure: no process, no clock, no I/O.

The live scheduler and the simulator drive the same policies. Times are microseconds on the driver's clock. Cores are
numbers of workers.

What is made for every request, or for every decision, has an `__init__` of its own, which mypyc compiles; that of a
frozen dataclass takes ten times as long. To type checkers these classes are frozen, too: their fields are final.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from gangway.artifact.precision import FP32
from gangway.scheduler.profiles import ModelProfile

NO_ERRORS: Final[Mapping[int, float]] = MappingProxyType({})


@dataclass(init=False, slots=True, unsafe_hash=True)
class Query:
    """One request as the policy sees it. `query_id` is unique within the driver's lifetime and grows with arrival."""

    query_id: Final[int]
    model_id: Final[int]
    rows: Final[int]
    arrival_us: Final[float]
    deadline_us: Final[float | None]  # when it should be answered: its model's and its own, the smaller; None: whenever
    priority: Final[int]  # class, across all models: lower ones go first; 0 is normal
    next_layer: Final[int]
    started: Final[bool]  # it has run before and was stopped: it holds a lease
    ran_us: Final[float]  # how long it was on cores, in the blocks before
    rejects_late: Final[bool]  # its queue policy: it is refused once it is certain to be late
    join_key: Final[int]  # only queries with the same one are joined; 0: usual; see NEVER_JOINED
    cores: Final[int]  # the size of the gang that was planned for it with its batch; 0: the policy's choice
    formed: Final[bool]  # it is part of a batch that has begun: neither joined nor split any more
    batch: Final[int]  # the number of that batch,
    round: Final[int]  # and its round: the policy sees it when those of the rounds before have started
    compound: Final[int]  # the compound task that it is a member of, which may run by a schedule; 0: none
    request_rows: Final[int]  # rows of the largest request that has rows here, as far as it has; 0: it is one request
    precision: Final[str]  # FP32 also where a model is there in one only; DEADLINE: chosen when it begins

    def __init__(
        self,
        query_id: int,
        model_id: int,
        rows: int,
        arrival_us: float,
        deadline_us: float | None,
        priority: int = 0,
        next_layer: int = 0,
        started: bool = False,
        ran_us: float = 0.0,
        rejects_late: bool = False,
        join_key: int = 0,
        cores: int = 0,
        formed: bool = False,
        batch: int = 0,
        round: int = 0,
        compound: int = 0,
        request_rows: int = 0,
        precision: str = FP32,
    ) -> None:
        self.query_id = query_id
        self.model_id = model_id
        self.rows = rows
        self.arrival_us = arrival_us
        self.deadline_us = deadline_us
        self.priority = priority
        self.next_layer = next_layer
        self.started = started
        self.ran_us = ran_us
        self.rejects_late = rejects_late
        self.join_key = join_key
        self.cores = cores
        self.formed = formed
        self.batch = batch
        self.round = round
        self.compound = compound
        self.request_rows = request_rows
        self.precision = precision

    def profile(self, models: Mapping[int, ModelProfile]) -> ModelProfile:
        """Return how long it takes in its precision, while that is to be chosen in the faster one. Raises KeyError."""
        model = models[self.model_id]
        return model if model.in_bf16 is None else model.at(self.precision)


class PlannedBlock(NamedTuple):
    """A part of what a gang runs: from this layer on it has at most so many cores.

    A gang that has more leaves the others free there, without a decision. It gets no further ones.
    """

    layer: int
    cores: int


@dataclass(init=False, slots=True, unsafe_hash=True)
class RunningBlock:
    """What a gang runs: layers [query.next_layer, end_layer) of a query, in one block or as planned."""

    query: Final[Query]
    end_layer: Final[int]
    cores: Final[tuple[int, ...]]  # by rank
    started_us: Final[float]
    layer: Final[int]  # being executed now
    layer_started_us: Final[float]
    stopping: Final[bool]  # it was told to stop, or to shrink: cores of it come free soon; no Resize until then
    versions: Final[tuple[int, ...]]
    leaving: Final[int]  # so many of its last cores come free at the next boundary: all, or those that shrinking takes
    blocks: Final[tuple[PlannedBlock, ...]]

    def __init__(
        self,
        query: Query,
        end_layer: int,
        cores: tuple[int, ...],
        started_us: float,
        layer: int = 0,
        layer_started_us: float = 0.0,
        stopping: bool = False,
        versions: tuple[int, ...] = (),
        leaving: int = 0,
        blocks: tuple[PlannedBlock, ...] = (),
    ) -> None:
        self.query = query
        self.end_layer = end_layer
        self.cores = cores
        self.started_us = started_us
        self.layer = layer
        self.layer_started_us = layer_started_us
        self.stopping = stopping
        self.versions = versions
        self.leaving = leaving
        self.blocks = blocks


@dataclass(init=False, slots=True, unsafe_hash=True)
class Snapshot:
    """Everything a decision may depend on."""

    now_us: Final[float]
    waiting: Final[Sequence[Query]]  # in order of arrival
    running: Final[Sequence[RunningBlock]]
    free_cores: Final[tuple[int, ...]]
    core_count: Final[int]  # cores in service, free or not
    models: Final[Mapping[int, ModelProfile]]  # `Query.profile` has the times of a query
    level: Final[float]  # of interference: 1 means that layers that depend on memory entirely take twice their time
    free_leases: Final[int]  # so many queries that have not started yet can be started now
    way_back_us: Final[float]  # from the last layer's end until the client has the answer, when the machine is busy
    prediction_errors: Final[Mapping[int, float]]  # by `ModelProfile.model_id`: time over prediction, lately
    gang_slowdown: Final[float]  # the same of gangs of several cores, over that of gangs of one
    oldest_us: Final[float | None]  # arrival of the oldest that waits, shown or not; None: all are shown
    waiting_count: Final[int]  # how many wait, shown or not; 0: all are shown

    def __init__(
        self,
        now_us: float,
        waiting: Sequence[Query],
        running: Sequence[RunningBlock],
        free_cores: tuple[int, ...],
        core_count: int,
        models: Mapping[int, ModelProfile],
        level: float = 0.0,
        free_leases: int = 1_000_000,
        way_back_us: float = 150.0,
        prediction_errors: Mapping[int, float] = NO_ERRORS,
        gang_slowdown: float = 1.0,
        oldest_us: float | None = None,
        waiting_count: int = 0,
    ) -> None:
        self.now_us = now_us
        self.waiting = waiting
        self.running = running
        self.free_cores = free_cores
        self.core_count = core_count
        self.models = models
        self.level = level
        self.free_leases = free_leases
        self.way_back_us = way_back_us
        self.prediction_errors = prediction_errors
        self.gang_slowdown = gang_slowdown
        self.oldest_us = oldest_us
        self.waiting_count = waiting_count


@dataclass(init=False, slots=True, unsafe_hash=True)
class Start:
    """Run layers [query.next_layer, end_layer) of a waiting query on these free cores.

    `wanted` cores were asked for: fewer granted is VELTAIR's conflict. The driver counts it; growing is the policy's.
    """

    query_id: Final[int]
    end_layer: Final[int]
    cores: Final[tuple[int, ...]]
    versions: Final[tuple[int, ...]]  # one per layer of the block; empty: the default version of each
    wanted: Final[int]  # 0: as many as it got
    reason: Final[str]  # of every decision: why, in words, for --trace-decisions
    blocks: Final[tuple[PlannedBlock, ...]]  # by layer, all behind query.next_layer
    together: Final[bool]  # with the others that are: rank 0 of each begins, then rank 1 of each, and so on
    precision: Final[str]  # of a query of DEADLINE: the choice of `precision_choice.py`, not the policy's

    def __init__(
        self,
        query_id: int,
        end_layer: int,
        cores: tuple[int, ...],
        versions: tuple[int, ...] = (),
        wanted: int = 0,
        reason: str = "",
        blocks: tuple[PlannedBlock, ...] = (),
        together: bool = False,
        precision: str = "",
    ) -> None:
        self.query_id = query_id
        self.end_layer = end_layer
        self.cores = cores
        self.versions = versions
        self.wanted = wanted
        self.reason = reason
        self.blocks = blocks
        self.together = together
        self.precision = precision


@dataclass(frozen=True, slots=True)
class Stop:
    """Take a running query off its cores at the next layer boundary (`at_once`: between two tasks, within some 200 us).

    It comes back as a waiting query; its cores are free then.
    """

    query_id: int
    at_once: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Replan:
    """Change versions and blocks of a running query, in the layers that it has not come to.

    Both are as in its Start: `versions` has one number for each layer from `query.next_layer` on.
    """

    query_id: int
    versions: tuple[int, ...] = ()
    blocks: tuple[PlannedBlock, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Reject:
    """Answer UNAVAILABLE to a waiting query that `rejects_late`."""

    query_id: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StartOver:
    """Let a stopped query give its lease and memory back: it waits as if it had never run, but is not joined.

    What it has computed is lost. A unit of several requests may be taken apart.
    """

    query_id: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Wake:
    """Call `decide` again at this time, if nothing happens before. A later decision's Wake takes its place."""

    at_us: float


@dataclass(frozen=True, slots=True)
class LoneStart:
    """How a query of one row begins that waits alone: all layers on the first free cores, if so many are free.

    Nobody that runs may want the cores that are free.
    """

    cores: int
    versions: tuple[int, ...] = ()  # as in Start
    may_grow: bool = False  # it may want more cores later; otherwise it can use no more
    min_slack_us: float = 0.0  # from now to its deadline, less the way back: with less it may begin otherwise


Decision = Start | Stop | Resize | Replan | Reject | StartOver | Wake
