"""Leases, as the scheduler sees them: rows under execution by a gang (`struct lease` in native/layout.h).

The scheduler initialises a free lease, sends `Run(lease, rank, generation)` to one worker per rank (0, 1, ...), and
gets exactly one `Left` per Run. It may initialise or `resume` a lease only while no Run of it is unanswered.
"""

from enum import IntEnum
from typing import Final, NamedTuple

import msgspec

from gangway.executor import _native
from gangway.executor.segment import Segment

LEASE_BYTES: Final = _native.LEASE_BYTES
MAX_RANKS: Final = _native.MAX_RANKS
MAX_MEMBERS: Final = _native.MAX_MEMBERS  # of one lease
LEAST_LEASES: Final = 16
LEASES_PER_WORKER: Final = 4
_MOST_PASS_PHASES: Final = _native.MAX_PHASES - _native.MAX_LAYERS


def lease_count(workers: int) -> int:
    """Return how many queries can be under way, running or stopped, live and simulated.

    There are enough leases for an urgent query to find one beside those that were stopped.
    """
    return max(LEAST_LEASES, LEASES_PER_WORKER * workers)


class LeaseControl(IntEnum):
    """The control word."""

    RUN = _native.CONTROL_RUN
    STOP = _native.CONTROL_STOP  # at the next layer boundary; ranks that have nothing to do leave at once
    STOP_NOW = _native.CONTROL_STOP_NOW  # between two claims; `resume` goes on inside the layer


class PhaseKind(IntEnum):
    """What a lease's present phase is. A lease that all have left can be resumed, unless at its END or aborted."""

    OPEN = _native.PHASE_OPEN  # tasks may be claimed
    STOPPED = _native.PHASE_STOPPED  # at a boundary, by STOP or because the block has ended
    END = _native.PHASE_END  # all rows have been computed, and each member's part counted
    PACK = _native.PHASE_PACK  # before the first layer of several members: inputs' rows are copied side by side
    UNPACK = _native.PHASE_UNPACK  # after the last one: rows of outputs are copied to the members


class Member(NamedTuple):
    """Rows [first_row, first_row + rows) of a request: one part of it (part: its number, below the slot's `parts`)."""

    front_end: int
    slot: int
    generation: int
    first_row: int = 0
    rows: int = 1
    part: int = 0


class LeaseSpec(NamedTuple):
    """What a gang shall do: layers [first_layer, end_layer) of the rows of 1 to MAX_MEMBERS members, side by side.

    When `end_layer` is the model's last the members' parts are counted, which answers the slots of those that were the
    last ones of their requests; otherwise the lease stops there and can be resumed. `arena_stride`: bytes of a row, at
    least the model's `arena_bytes`, with several members those and its `staging_bytes`. `versions` has one byte per
    layer of the model (empty: version 0 of each). `timeout_us`: a waiting rank aborts the lease after so long (up to
    twice that) without progress of any other rank.

    The first `pass_layers` layers are computed in `passes`, each for some of the rows (`phase_step` in layout.h): then
    the layers of all calls here are *steps*, of which there are as many. See `passes_for`.

    `block_ranks` has one byte per step: where it is not 0 a planned block begins, of at most so many ranks.
    """

    model_id: int
    members: tuple[Member, ...]
    arena_offset: int
    arena_stride: int
    first_layer: int
    end_layer: int
    versions: bytes = b""
    wanted: int = 1
    timeout_us: int = 2_000_000
    pass_layers: int = 0
    passes: int = 1
    block_ranks: bytes = b""


def passes_for(pass_layers: int, pass_rows: int, rows: int, ranks: int) -> int:
    """Return how many passes suit a lease: each rank shall have `pass_rows` rows in its caches at a time."""
    if not pass_layers:
        return 1
    return max(1, min(-(-rows // (pass_rows * ranks)), _MOST_PASS_PHASES // pass_layers))


class LeaseProgress(msgspec.Struct, frozen=True):
    """A lease at one moment. Exact when all ranks have left."""

    kind: PhaseKind
    next_layer: int
    phase: int  # what is computed next, or now: grows with each layer of each pass
    finished_tasks: int  # of that
    present: int  # bit r: rank r is in
    aborted: bool


class LeaseGlance(NamedTuple):
    """What a gang is at, for people: the fields may be of different moments. `start_ns` 0: no rank has joined yet."""

    model_id: int
    generation: int
    members: int  # requests
    wanted: int  # ranks
    step: int  # see LeaseSpec
    start_ns: int  # CLOCK_MONOTONIC


class Lease:
    """One lease at `offset` of the control segment."""

    def __init__(self, segment: Segment, offset: int) -> None:
        self._view = segment.view
        self._offset = offset

    def initialise(self, spec: LeaseSpec) -> int:
        """Begin a new generation; return its number, which Run messages carry. Only while no rank is in the lease."""
        return _native.lease_initialise(self._view, self._offset, *spec)

    def resume(self, end_layer: int, wanted: int, versions: bytes = b"", block_ranks: bytes = b"") -> None:
        """Go on after STOP, STOP_NOW or the end of a block. Only while no rank is in the lease; Run messages follow.

        `versions` and `block_ranks` begin with the next layer (beyond them: version 0, no block). A layer that was
        stopped in its middle goes on in the version that it has. Raises ValueError for numbers that no lease can have.
        """
        _native.lease_resume(self._view, self._offset, end_layer, wanted, versions, block_ranks)

    def plan(self, step: int, versions: bytes = b"", block_ranks: bytes = b"") -> None:
        """Change what the gang does from this step on, at any time; what it has come to stays as it is.

        As in `resume`, but both begin with `step`. Raises ValueError for numbers that no lease can have.
        """
        _native.lease_plan(self._view, self._offset, step, versions, block_ranks)

    def set_control(self, control: LeaseControl) -> None:
        """Ask the gang to stop. To be taken back by `resume` only, when all have left."""
        _native.lease_set_control(self._view, self._offset, control)

    def resize(self, before: int, ranks: int) -> bool:
        """Change the number of ranks; False if it is not `before` any more, since a planned block has fewer.

        Ranks with a higher number leave at the next boundary. To grow, `plan`, then call this, then send Run.
        """
        return _native.lease_resize(self._view, self._offset, before, ranks)

    def blocks(self) -> tuple[int, int, int]:
        """Return the number of ranks that are wanted and, of this generation so far, planned blocks and version layers.

        These are blocks that have begun by plan, and layers in another version than the first.
        """
        return _native.lease_blocks(self._view, self._offset)

    def abort(self) -> None:
        """Make every rank leave before its next claim, sleeping ones at once. Lasts until `initialise`."""
        _native.lease_abort(self._view, self._offset)

    def progress(self) -> LeaseProgress:
        """Read how far the gang is."""
        kind, next_layer, phase, finished, present, aborted = _native.lease_progress(self._view, self._offset)
        return LeaseProgress(PhaseKind(kind), next_layer, phase, finished, present, aborted)

    def position(self) -> tuple[int, int, int]:
        """Return kind (a PhaseKind) and number of the present layer, and when it began (ns; 0: no rank has joined)."""
        return _native.lease_position(self._view, self._offset)

    def glance(self) -> LeaseGlance:
        """Look at it from any process."""
        return LeaseGlance(*_native.lease_glance(self._view, self._offset))

    def generation(self) -> int:
        """Number of the present generation."""
        return _native.lease_generation(self._view, self._offset)

    def layer_end_ns(self, first_layer: int, end_layer: int) -> list[int]:
        """When each of these layers ended in this generation (CLOCK_MONOTONIC; 0: not yet)."""
        return _native.lease_layer_end_ns(self._view, self._offset, first_layer, end_layer)

    def start_ns(self) -> int:
        """When the first rank joined in this generation (0: not yet)."""
        return _native.lease_start_ns(self._view, self._offset)


class LeaseTable:
    """`count` leases from `offset` on."""

    def __init__(self, segment: Segment, offset: int, count: int) -> None:
        self._leases = [Lease(segment, offset + index * LEASE_BYTES) for index in range(count)]

    def __len__(self) -> int:
        return len(self._leases)

    def __getitem__(self, index: int) -> Lease:
        return self._leases[index]
