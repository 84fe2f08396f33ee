"""Gangs at work: leases, who is in them, and what became of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gangway.executor.control import ControlSegment
from gangway.executor.leases import Control, LeaseSpec, PhaseKind
from gangway.executor.messages import Left, LeftReason, Run
from gangway.scheduler.policy import RunningBlock, Start
from gangway.scheduler.requests import Request

LEASES_PER_WORKER = 2  # a lease is free only when its last rank has left; the other cores are in the next one by then
STUCK_AFTER_US = 1_000_000.0  # a rank that has not left so long after its gang has ended does not run at all


@dataclass(slots=True, eq=False)
class Gang:
    """A lease in use. It keeps lease and arena while its query is paused between two blocks (no rank in it then)."""

    request: Request
    lease: int
    arena_offset: int
    indivisible: bool = False  # its query is one task, which may last long
    term: int = 0
    end_layer: int = 0
    cores: tuple[int, ...] = ()  # by rank
    outstanding: set[int] = field(default_factory=set)  # ranks that have not left
    reasons: set[LeftReason] = field(default_factory=set)
    started_us: float = 0.0
    ended_us: float | None = None  # when the first rank left because the gang's work had ended: the others follow

    @property
    def lost(self) -> bool:
        """Whether a rank died or made no progress: what was computed is of no use."""
        return bool(self.reasons & {LeftReason.ABORTED, LeftReason.TIMEOUT})


class GangTable:
    """The gangs by lease. Knows nothing of queues or models."""

    def __init__(self, control: ControlSegment) -> None:
        self._control = control
        self._free = list(range(len(control.leases)))
        self._gangs: dict[int, Gang] = {}

    def running(self) -> list[RunningBlock]:
        """Return what the policy sees of the gangs at work."""
        return [
            RunningBlock(gang.request.query, gang.end_layer, gang.cores, gang.started_us)
            for gang in self._gangs.values()
            if gang.outstanding
        ]

    def all(self) -> Sequence[Gang]:
        """Return every gang, paused ones included."""
        return list(self._gangs.values())

    def of_request(self, request: Request) -> Gang | None:
        """Return the gang that has this request."""
        return next((gang for gang in self._gangs.values() if gang.request is request), None)

    def open(self, request: Request, arena_offset: int, indivisible: bool) -> Gang:
        """Take a free lease; there is one (see `has_free`)."""
        gang = Gang(request, self._free.pop(), arena_offset, indivisible)
        self._gangs[gang.lease] = gang
        return gang

    @property
    def has_free(self) -> bool:
        """Whether a lease is free."""
        return bool(self._free)

    def close(self, gang: Gang) -> None:
        """Give the lease back. No rank may be in it."""
        del self._gangs[gang.lease]
        self._free.append(gang.lease)

    def send(self, gang: Gang, dispatch: Start, arena_stride: int, layers: int, now_us: float) -> None:
        """Let the gang run a block of its query on the dispatch's cores."""
        lease = self._control.leases[gang.lease]
        request = gang.request
        if gang.term == 0:
            gang.term = lease.initialise(
                LeaseSpec(
                    model_id=request.query.model_id,
                    front_end=request.front_end,
                    slot=request.slot,
                    sequence=request.sequence,
                    arena_offset=gang.arena_offset,
                    arena_stride=arena_stride,
                    rows=request.query.rows,
                    first_layer=0,
                    end_layer=dispatch.end_layer,
                    versions=bytes(dispatch.versions).ljust(layers, b"\0") if dispatch.versions else b"",
                    wanted=len(dispatch.cores),
                )
            )
        else:
            lease.resume(dispatch.end_layer, len(dispatch.cores))
        gang.end_layer = dispatch.end_layer
        gang.cores = dispatch.cores
        gang.outstanding = set(range(len(dispatch.cores)))
        gang.reasons = set()
        gang.ended_us = None
        gang.started_us = now_us
        for rank, core in enumerate(dispatch.cores):
            if not self._control.command(core, Run(gang.lease, rank, gang.term).pack()):
                raise RuntimeError(f"the command ring of worker {core} is full")

    def leave(self, message: Left, now_us: float) -> Gang | None:
        """Note that a rank has left; return its gang, None for one of an earlier term."""
        gang = self._gangs.get(message.lease)
        if gang is None or gang.term != message.term or message.rank not in gang.outstanding:
            return None
        gang.outstanding.discard(message.rank)
        gang.reasons.add(message.reason)
        if gang.ended_us is None and message.reason is not LeftReason.SHRUNK:
            gang.ended_us = now_us
        return gang

    def lose_core(self, core: int) -> Gang | None:
        """The worker of this core is dead: abort the lease it was in; return that gang."""
        for gang in self._gangs.values():
            if core in gang.cores and gang.cores.index(core) in gang.outstanding:
                gang.outstanding.discard(gang.cores.index(core))
                gang.reasons.add(LeftReason.ABORTED)
                self._control.leases[gang.lease].abort()
                return gang
        return None

    def stop(self, gang: Gang) -> None:
        """Ask the gang to stop at the next layer boundary."""
        self._control.leases[gang.lease].set_control(Control.STOP)

    def stopped_at(self, gang: Gang) -> int | None:
        """Return the next layer of a gang that all have left before the query's end; None if the query is answered."""
        progress = self._control.leases[gang.lease].progress()
        return progress.next_layer if progress.kind != PhaseKind.END else None

    def stuck_cores(self, now_us: float) -> list[int]:
        """Return the cores of ranks that have not left although their gang ended long ago; each once."""
        cores = []
        for gang in self._ending():
            if gang.ended_us is not None and now_us - gang.ended_us > STUCK_AFTER_US:
                cores += [gang.cores[rank] for rank in sorted(gang.outstanding)]
                gang.ended_us = None
        return cores

    @property
    def any_ending(self) -> bool:
        """Whether a gang has ended, but not all of its ranks have left."""
        return any(True for _ in self._ending())

    def _ending(self) -> Iterator[Gang]:
        return (gang for gang in self._gangs.values() if gang.ended_us is not None and gang.outstanding)
