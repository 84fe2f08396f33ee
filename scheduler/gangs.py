"""Gangs: leases in use, the ranks in them, and how ranks left."""

from collections.abc import Container, Sequence
from typing import Final

from gangway.executor.control import ControlSegment
from gangway.executor.fast_path import InFlight
from gangway.executor.leases import Lease, LeaseControl, LeaseSpec, Member, PhaseKind, passes_for
from gangway.executor.messages import LeaseLeft, LeftReason, pack_run
from gangway.executor.slots import GOES_ON
from gangway.scheduler.messages import LoadModel
from gangway.scheduler.policy import PlannedBlock, Replan, Resize, RunningBlock, Start
from gangway.scheduler.units import Unit

SETTLE_US = 100.0  # ranks of a block that has ended leave within that, unless something else has their core
# A rank that waits cannot see whether the others have a core, so ranks hardly ever give up; `watchdog.py` finds stalls.
RANKS_WAIT_US = 600_000_000

# Members of enumerations that each turn looks at: to look one up by its name takes as long as a short loop.
DONE: Final = LeftReason.DONE
_SHRUNK: Final = LeftReason.SHRUNK
_STOPPED: Final = LeftReason.STOPPED
_LOSSES = frozenset((LeftReason.ABORTED, LeftReason.TIMEOUT))


class Gang:
    """A lease in use. It keeps lease and arena while its unit is paused between two blocks (no rank in it then).

    `artifact_id`: what it executes. `indivisible`: its unit is one task. `yields`: workers can leave it.
    """

    __slots__ = (
        "arena_offset", "artifact_id", "blocks", "cores", "crashed", "end_layer", "ended_us", "generation",
        "indivisible", "joined_ns", "lease", "long_layers", "model", "outstanding", "plan", "planned_blocks", "reasons",
        "resized", "shared", "started_us", "steady_layer", "stopping", "unit", "version_layers", "versions", "wanted",
        "yields",
    )  # fmt: skip

    def __init__(
        self,
        unit: Unit,
        lease: int,
        shared: Lease,
        arena_offset: int,
        model: LoadModel,
    ) -> None:
        self.unit = unit
        self.lease = lease
        self.shared = shared
        self.arena_offset = arena_offset
        self.artifact_id = model.model_id
        self.indivisible = model.indivisible
        self.yields = model.yields
        self.long_layers = model.long_layers
        self.model = model.name
        self.generation = 0
        self.end_layer = 0
        self.blocks = 0  # that were started
        self.planned_blocks = 0  # that began by plan, and
        self.version_layers = 0  # layers that were in another version than the first, when that was last counted
        self.versions: tuple[int, ...] = ()
        self.plan: tuple[PlannedBlock, ...] = ()
        self.steady_layer = 0  # the first one from which on versions and cores have been the same
        self.cores: tuple[int, ...] = ()  # by rank; those of a shrinking gang until they have left
        self.wanted = 0  # ranks beyond have been told to leave
        self.outstanding: set[int] = set()  # ranks that have not left
        self.reasons: set[LeftReason] = set()
        self.crashed = False  # a worker ended by what it computed here
        self.started_us = 0.0
        self.joined_ns = 0  # the first of those that have left
        self.resized = False  # not always on the same cores
        self.stopping = False  # all have been told to leave
        self.ended_us: float | None = None  # when the first rank left because the gang's work had ended: others follow

    @property
    def lost(self) -> bool:
        """Whether a rank died or made no progress: what was computed is of no use."""
        return not _LOSSES.isdisjoint(self.reasons)

    @property
    def leaving(self) -> int:
        """How many ranks are still in, but have been told to leave or will leave on their own."""
        if self.stopping or self.ended_us is not None:
            return len(self.outstanding)
        if self.wanted == len(self.cores):
            return 0
        return sum(rank >= self.wanted for rank in self.outstanding)

    def block(self, now_us: float) -> RunningBlock:
        """Return what the policy sees of a gang with ranks."""
        _, layer, began_ns = self.shared.position()
        leaving, cores, end_layer, started_us = self.leaving, self.cores, self.end_layer, self.started_us
        if len(self.outstanding) < len(cores):
            cores = tuple([cores[rank] for rank in sorted(self.outstanding)])
        if layer >= end_layer:
            layer = end_layer - 1
        began_us = min(max(started_us, began_ns / 1e3), now_us)
        query, versions = self.unit.query, self.versions
        return RunningBlock(
            query, end_layer, cores, started_us, layer, began_us, leaving > 0, versions, leaving, self.plan
        )


class GangTable:
    """The gangs by lease and by the query of their unit. It knows nothing of queues or models."""

    def __init__(self, control: ControlSegment) -> None:
        self._control = control
        self._free = list(range(len(control.leases)))
        self._gangs: dict[int, Gang] = {}
        self._by_query: dict[int, Gang] = {}
        self._ending: set[Gang] = set()  # ended, but not all ranks have left
        self._together: list[Gang] = []  # wait for `begin_together`

    def running(self, now_us: float, known: Container[int]) -> list[RunningBlock]:
        """Return what the policy sees of the gangs whose queries are not yet answered.

        Of those that the fast path has queued on one worker it sees the last: a core is in use once. What executes an
        artifact that is not `known`, because it is being unloaded, keeps its cores unseen.
        """
        gangs = [gang for gang in self._gangs.values() if gang.outstanding and DONE not in gang.reasons]
        if len(gangs) > 1:
            last = {gang.cores[rank]: gang for gang in gangs for rank in gang.outstanding}
            gangs = [gang for gang in gangs if any(last[gang.cores[rank]] is gang for rank in gang.outstanding)]
        return [gang.block(now_us) for gang in gangs if gang.artifact_id in known]

    def all(self) -> Sequence[Gang]:
        """Return every gang, paused ones included."""
        return list(self._gangs.values())

    def models_under_way(self) -> list[int]:
        """Return the model of each query that has begun and is not yet answered."""
        return [gang.unit.query.model_id for gang in self._gangs.values() if DONE not in gang.reasons]

    def models_begun(self) -> list[int]:
        """Return the same, but for queries that go on with what others have begun."""
        queries = [gang.unit.query for gang in self._gangs.values() if DONE not in gang.reasons]
        return [query.model_id for query in queries if query.join_key != GOES_ON]

    def yielding(self) -> Sequence[Gang]:
        """Return those at work that workers can leave."""
        return [gang for gang in self._gangs.values() if gang.yields and gang.outstanding and gang.ended_us is None]

    def of_query(self, query_id: int) -> Gang | None:
        """Return the gang that has this query, running or paused."""
        return self._by_query.get(query_id)

    def open(self, unit: Unit, arena_offset: int, model: LoadModel) -> Gang:
        """Take a free lease; there is one (see `free`)."""
        index = self._free.pop()
        gang = Gang(unit, index, self._control.leases[index], arena_offset, model)
        self._gangs[index] = gang
        self._by_query[unit.query.query_id] = gang
        return gang

    def take_over(
        self, unit: Unit, start: Start, in_flight: InFlight, arena_offset: int, model: LoadModel, now_us: float
    ) -> Gang:
        """Make a gang of what was begun without a decision, with a lease of `spare`."""
        self._free.remove(in_flight.lease)
        self._free.append(in_flight.lease)
        gang = self.open(unit, arena_offset, model)
        gang.generation = in_flight.lease_generation
        gang.end_layer = start.end_layer
        gang.versions = start.versions
        gang.cores = start.cores
        gang.wanted = len(start.cores)
        gang.outstanding = set(in_flight.inside)
        gang.started_us = in_flight.begun_ns / 1e3
        gang.joined_ns = in_flight.joined_ns
        if in_flight.ended:
            gang.reasons.add(LeftReason.DONE)
            gang.ended_us = now_us
            self._ending.add(gang)
        return gang

    def spare(self, count: int) -> Sequence[int]:
        """Return so many of the leases that are free, and stay so."""
        return self._free[-count:]

    @property
    def count(self) -> int:
        """How many queries are under way, paused ones included."""
        return len(self._gangs)

    @property
    def free(self) -> int:
        """How many leases are free."""
        return len(self._free)

    def close(self, gang: Gang) -> None:
        """Give the lease back. No rank may be in it."""
        del self._gangs[gang.lease]
        del self._by_query[gang.unit.query.query_id]
        self._free.append(gang.lease)

    def send(self, gang: Gang, start: Start, model: LoadModel, members: tuple[Member, ...], now_us: float) -> None:
        """Let the gang run a block of its unit on the decision's cores. `members`: the pieces, for a first block."""
        ranks = len(start.cores)
        if gang.generation == 0:
            gang.generation = gang.shared.initialise(_lease_spec(gang, start, model, members))
        else:
            ranks_by_step = _block_ranks(start.blocks, gang.unit.query.next_layer)
            gang.shared.resume(start.end_layer, ranks, bytes(start.versions), ranks_by_step)
        gang.end_layer = start.end_layer
        gang.versions = start.versions
        gang.plan = start.blocks
        gang.steady_layer = gang.unit.query.next_layer
        gang.cores = start.cores
        gang.wanted = ranks
        gang.outstanding = set(range(ranks))
        gang.reasons = set()
        gang.started_us = now_us
        gang.joined_ns = 0
        gang.resized = False
        gang.stopping = False
        gang.ended_us = None
        if start.together:
            self._together.append(gang)
        else:
            self._run(gang, 0)

    def begin_together(self) -> None:
        """Let the gangs begin whose Starts are `together`: rank 0 of each, then rank 1 of each, and so on."""
        if not self._together:
            return
        gangs, self._together = self._together, []
        for rank in range(max((gang.wanted for gang in gangs), default=0)):
            for gang in gangs:
                if rank < gang.wanted:
                    self._run_rank(gang, rank)

    def replan(self, gang: Gang, change: Replan | Resize) -> None:
        """Change versions and blocks in the layers that the gang has not come to."""
        first, versions = gang.unit.query.next_layer, change.versions or ()
        gang.shared.plan(first, bytes(versions), _block_ranks(change.blocks, first))
        if versions != gang.versions:
            gang.steady_layer = gang.shared.position()[1] + 1
        gang.versions, gang.plan = versions, change.blocks

    def grow(self, gang: Gang, cores: tuple[int, ...]) -> bool:
        """Let more cores join at once; False if a planned block has just made the gang smaller.

        The gang's are the first of `cores`; none of it may be leaving.
        """
        first = gang.wanted
        if not gang.shared.resize(first, len(cores)):
            return False
        gang.resized = True
        gang.cores = cores
        gang.wanted = len(cores)
        gang.outstanding.update(range(first, gang.wanted))
        self._run(gang, first)
        return True

    def shrink(self, gang: Gang, ranks: int) -> bool:
        """Have all but the first ranks leave at the next layer boundary; False as above."""
        if not gang.shared.resize(gang.wanted, ranks):
            return False
        gang.resized = True
        gang.wanted = ranks
        return True

    def stop(self, gang: Gang, at_once: bool = False) -> None:
        """Have all ranks leave at the next layer boundary, or between two tasks."""
        gang.stopping = True
        gang.shared.set_control(LeaseControl.STOP_NOW if at_once else LeaseControl.STOP)

    def leave(self, message: LeaseLeft, now_us: float) -> Gang | None:
        """Note that a rank has left; return its gang, None for one of an earlier generation."""
        gang = self._gangs.get(message.lease)
        if gang is None or gang.generation != message.generation or message.rank not in gang.outstanding:
            return None
        gang.outstanding.discard(message.rank)
        gang.joined_ns = min(gang.joined_ns or message.joined_ns, message.joined_ns)
        if message.reason is _SHRUNK:
            if message.rank < gang.wanted and (wanted := gang.shared.blocks()[0]) < gang.wanted:
                gang.wanted = wanted  # a planned block has begun
                gang.resized = True
            # A number of a rank is given again only when none beyond it is still in.
            if gang.wanted < len(gang.cores) and not gang.leaving:
                gang.cores = gang.cores[: gang.wanted]
            return gang
        gang.reasons.add(message.reason)
        if gang.ended_us is None and self._has_ended(gang, message.reason):
            gang.ended_us = now_us
            self._ending.add(gang)
        if not gang.outstanding:
            self._ending.discard(gang)
        return gang

    def lose_core(self, core: int, crashed_lease: int = -1) -> list[Gang]:
        """The worker of this core is dead: abort the leases it was to work on; return those gangs.

        `crashed_lease`: what it died of, -1 if that was none.
        """
        lost = []
        for gang in self._gangs.values():
            ranks = [rank for rank in gang.outstanding if gang.cores[rank] == core]
            if ranks:
                gang.outstanding.difference_update(ranks)
                gang.reasons.add(LeftReason.ABORTED)
                gang.crashed |= gang.lease == crashed_lease
                gang.shared.abort()
                lost.append(gang)
                if not gang.outstanding:
                    self._ending.discard(gang)
        return lost

    def give_up(self, gang: Gang, now_us: float) -> None:
        """Have all ranks leave as soon as they look: the gang stands still. A rank that hangs does not look."""
        gang.shared.abort()
        gang.ended_us = now_us
        self._ending.add(gang)

    @property
    def ending(self) -> Sequence[Gang]:
        """The gangs that have ended, but not all of their ranks have left."""
        return tuple(self._ending)

    def settling(self, now_us: float) -> bool:
        """Whether a block has just ended and its query will wait again in a moment, when its last rank has left."""
        for gang in self._ending:
            if gang.ended_us is not None and now_us < gang.ended_us + SETTLE_US and DONE not in gang.reasons:
                return True
        return False

    @property
    def any_ending(self) -> bool:
        """Whether a gang has ended, but not all of its ranks have left."""
        return bool(self._ending)

    def _has_ended(self, gang: Gang, reason: LeftReason) -> bool:
        """Whether the other ranks leave as soon as they look. A rank that has nothing to do leaves early at a STOP."""
        return reason is not _STOPPED or gang.shared.position()[0] in (PhaseKind.STOPPED, PhaseKind.END)

    def _run(self, gang: Gang, first: int) -> None:
        for rank in range(first, gang.wanted):
            self._run_rank(gang, rank)

    def _run_rank(self, gang: Gang, rank: int) -> None:
        if not self._control.command(gang.cores[rank], pack_run(gang.lease, rank, gang.generation)):
            raise RuntimeError(f"the command ring of worker {gang.cores[rank]} is full")


def _lease_spec(gang: Gang, start: Start, model: LoadModel, members: tuple[Member, ...]) -> LeaseSpec:
    ranks = len(start.cores)
    return LeaseSpec(
        model_id=model.model_id,
        members=members,
        arena_offset=gang.arena_offset,
        arena_stride=model.arena_bytes,
        first_layer=0,
        end_layer=start.end_layer,
        versions=bytes(start.versions),
        wanted=ranks,
        timeout_us=RANKS_WAIT_US,
        pass_layers=model.pass_layers,
        passes=passes_for(model.pass_layers, model.pass_rows, gang.unit.query.rows, ranks),
        block_ranks=_block_ranks(start.blocks, 0),
    )


def _block_ranks(blocks: Sequence[PlannedBlock], first_layer: int) -> bytes:
    """Return the plan as leases have it: from a layer on, the ranks of the block that begins there, or 0."""
    if not blocks:
        return b""
    ranks = bytearray(blocks[-1].layer + 1 - first_layer)
    for layer, cores in blocks:
        ranks[layer - first_layer] = cores
    return bytes(ranks)
