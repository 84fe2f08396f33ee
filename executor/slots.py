"""Request slots: the source of truth about requests, 1 KiB each at the start of an io segment (`struct slot`, in C).

State, status and generation are one 64-bit word that changes only by compare-and-swap, so a worker that answers and a
scheduler that cancels cannot both win, and a late answer cannot hit a slot that already serves the next request.

    FREE -acquire-> FILLING -submit-> SUBMITTED -start-> RUNNING -(worker)-> DONE -release-> FREE
                                          ^---requeue------'
                      finish: SUBMITTED or RUNNING -> DONE, by the scheduler

While a slot is RUNNING ranks may still write into the request's buffers: finish it only after every rank has left its
lease.

An offset in a slot says where a tensor is: so many bytes, a multiple of 64, from the start of the io segment, or, with
a number in its highest 16 bits, from the start of the region of that number (`place_in_region`). A slot has room for
INLINE_PLACES inputs and as many outputs. More of either are in a list in the request's memory.
"""

import struct
from array import array
from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from gangway.executor import _native
from gangway.executor.messages import Bell, Ring, pack_submit
from gangway.executor.segment import SLOT, Segment

SLOT_BYTES: Final = SLOT.size_bytes
INLINE_PLACES: Final = _native.INLINE_PLACES  # inputs, and outputs, of which a slot itself says where they are
MAX_AWAITED: Final = _native.MAX_AWAITED  # slots that one call can wait for
MAX_PARTS: Final = _native.MAX_PARTS  # of one request
NEVER_JOINED: Final = 1 << 63  # a bit of `join_key`: executed alone, and waits for no other request
GOES_ON: Final = NEVER_JOINED | 1  # a `join_key`: gives a core to what holds an instance already

_ASKED, _ASKED_AT = SLOT.reading(
    "model_id", "rows", "priority", "arrival_ns", "deadline_ns",
    "input_frame_bytes", "output_frame_bytes", "limit_ns", "join_key", "compound", "queue_end_ns", "rejects_late",
    "max_queue", "delays", "by_bell",
)  # fmt: skip
_TERMS, _TERMS_AT = SLOT.reading(
    "cancel", "attempts", "model_id", "rows", "priority", "arrival_ns", "deadline_ns", "limit_ns", "join_key",
    "compound", "queue_end_ns", "rejects_late", "max_queue", "delays",
)  # fmt: skip
_OUTCOME, _OUTCOME_AT = SLOT.reading(
    "attempts", "ranks", "arrival_ns", "compute_start_ns", "compute_end_ns",
    "blocks", "conflicts", "preemptions", "versions", "bf16", "batch_rows", "leads", "seen_ns", "started_ns",
)  # fmt: skip
_COUNTS, _COUNTS_AT = SLOT.writing("blocks", "conflicts", "preemptions", "versions", "bf16")
_WORD: Final = struct.Struct("<I")
_MODEL_AT, _CANCEL_AT, _ATTEMPTS_AT, _FAILURE_AT = map(SLOT.offset, ("model_id", "cancel", "attempts", "failure"))
_INPUTS_AT, _OUTPUTS_AT = SLOT.offset("input_offset"), SLOT.offset("output_offset")
_REASON_AT, _REASON_END = SLOT.offset("reason"), SLOT.offset("reason") + SLOT.size("reason")
_PLACES: Final = struct.Struct(f"<{INLINE_PLACES}Q")


class SlotState(IntEnum):
    """Where a request is in its life."""

    FREE = _native.SLOT_FREE
    FILLING = _native.SLOT_FILLING
    SUBMITTED = _native.SLOT_SUBMITTED
    RUNNING = _native.SLOT_RUNNING
    DONE = _native.SLOT_DONE


_SUBMITTED, _RUNNING = 1 << SlotState.SUBMITTED, 1 << SlotState.RUNNING
_DONE: Final = SlotState.DONE  # to look a member up by its name takes longer than the rest of `is_done`

_HANDED_OVER: Final = frozenset((SlotState.SUBMITTED, SlotState.RUNNING, SlotState.DONE))


class SlotStatus(IntEnum):
    """How a request ended."""

    OK = _native.STATUS_OK
    CANCELLED = _native.STATUS_CANCELLED
    UNAVAILABLE = _native.STATUS_UNAVAILABLE
    DEADLINE = _native.STATUS_DEADLINE
    INTERNAL = _native.STATUS_INTERNAL
    LATE = _native.STATUS_LATE  # it was certain to be late, and its queue policy is to refuse it then
    QUEUE_FULL = _native.STATUS_QUEUE_FULL  # of its model, as its queue policy says
    CROWDED = _native.STATUS_CROWDED  # so much waits for the whole server that its turn would not come
    INVALID = _native.STATUS_INVALID  # the model has no answer to numbers in it
    CRASHED = _native.STATUS_CRASHED  # workers ended by what they computed of it, or of requests to its model
    NO_MEMORY = _native.STATUS_NO_MEMORY  # it needs more than there is without any other request


_STATUSES: Final = tuple(SlotStatus)


def compound_number(schedule: int, count: int) -> int:
    """Return the number of a front end's compound task of a schedule; `count` tells those of one front end apart."""
    return schedule << 32 | count & 0xFFFFFFFF


def place_in_region(number: int, offset: int) -> int:
    """Return what a slot says of a tensor that lies `offset` bytes behind the start of a region (number 1 or more)."""
    return number << _native.REGION_SHIFT | offset


def places_bytes(inputs: int, outputs: int) -> int:
    """Return how much memory a request has for the places of so many tensors, which its slot has no room for."""
    return 8 * sum(count for count in (inputs, outputs) if count > INLINE_PLACES)


class SlotRequest(NamedTuple):
    """What a front end asks for. Offsets are bytes from the start of the io segment (or of a region), one per tensor.

    Every tensor has `rows * row_bytes` bytes there. A model for onnxruntime has one input and one output here, frames
    (`frames.py`) of the sizes `frame_bytes`. Clocks are CLOCK_MONOTONIC, 0 means none. `deadline_ns` is a target:
    `rejects_late` says what becomes of a request that misses it. No client waits for the answer after `limit_ns`.
    `max_queue`: as many of its model and priority may wait already (0: any number), or it is refused. `by_bell`: the
    answer is told by the table's bell, and not to a thread that waits in `wait`. `join_key`: only requests of one model
    with the same key may be executed together, and none with NEVER_JOINED in it. `compound`: the compound task that it
    is a member of (`compound_number`); it is decided about, whatever else could begin without a decision. `places_at`:
    where in the io segment offsets are written that the slot has no room for (`places_bytes`), a multiple of 8 bytes.
    `queue_end_ns`: if it has not been started by then it is refused (LATE), or, if it `delays`, goes behind others.
    """

    model_id: int
    rows: int
    input_offsets: tuple[int, ...]
    output_offsets: tuple[int, ...]
    priority: int = 0
    arrival_ns: int = 0
    deadline_ns: int = 0
    frame_bytes: tuple[int, int] = (0, 0)
    limit_ns: int = 0
    rejects_late: bool = False
    max_queue: int = 0
    by_bell: bool = False
    join_key: int = 0
    compound: int = 0
    places_at: int = 0
    queue_end_ns: int = 0
    delays: bool = False


class SlotTerms(NamedTuple):
    """The part of a SlotRequest that scheduling needs."""

    model_id: int
    rows: int
    priority: int
    arrival_ns: int
    deadline_ns: int
    limit_ns: int
    rejects_late: bool
    max_queue: int
    join_key: int = 0
    compound: int = 0
    queue_end_ns: int = 0
    delays: bool = False
    cancelled: bool = False  # no client waits for the answer
    attempts: int = 0  # how often it has been started


class SlotCounts(NamedTuple):
    """What scheduling did to a request. `versions` is a mask: bit v is set if version v of a layer was used.

    Workers add the blocks that began by plan, and the versions. `bf16`: 1 if it was computed in bf16, and the model is
    there in fp32, too.
    """

    blocks: int = 0
    conflicts: int = 0  # blocks that got fewer cores than they wanted
    preemptions: int = 0  # times it was stopped for another one
    versions: int = 0
    bf16: int = 0


class SlotOutcome(NamedTuple):
    """How and how fast a request was served.

    `batch_rows`: rows of the batch that it was executed in (0: of none). `leads`: it stands for its batch in
    statistics, as exactly one request of each batch does; one that was never started does not.
    """

    status: SlotStatus
    queue_us: float  # arrival to the first task
    compute_us: float  # first task of any part to the last one of any, stops included
    ranks: int  # largest gang that worked on it
    attempts: int
    counts: SlotCounts = SlotCounts()
    batch_rows: int = 0
    leads: bool = True
    reason: str = ""  # of INVALID and INTERNAL: the worker's text, one line; empty if there is none
    seen_ns: int = 0  # CLOCK_MONOTONIC: the scheduler has read the request
    started_ns: int = 0  # it has decided to run it


_counts_of = lru_cache(maxsize=1024)(SlotCounts)  # those of most requests are equal


class SlotEntry(msgspec.Struct, frozen=True):
    """One slot's state word."""

    slot: int
    state: SlotState
    status: SlotStatus
    generation: int


class SlotTable:
    """The first `slots` KiB of an io segment. `size_bytes` is where the heap begins."""

    def __init__(self, segment: Segment, slots: int) -> None:
        if not 0 < slots * SLOT_BYTES <= segment.size_bytes:
            raise ValueError(f"{slots} slots do not fit into a segment of {segment.size_bytes} bytes")
        self.slots = slots
        self.size_bytes = slots * SLOT_BYTES
        self._segment = segment
        self.view = self._view = segment.view
        self.bell = Bell(segment, SLOT.offset("bell"))  # of answers that no thread waits for alone

    def init(self) -> None:
        """Make all slots free, while no other process uses the table. Generations go on: older messages stay stale."""
        for slot in range(self.slots):
            _native.slot_reset(self._view, slot)

    # -- front end

    def acquire(self) -> int | None:
        """Take a free slot (FILLING, with a new generation), None if all are taken."""
        slot = _native.slot_acquire(self._view, self.slots, 0)  # the first ones are warm
        return slot if slot >= 0 else None

    def fill(self, slot: int, request: SlotRequest) -> None:
        """Write the request's fields. Raises ValueError for too many tensors, or a list outside of the segment."""
        _native.slot_fill(self._view, slot, request)

    def submit(self, slot: int) -> int:
        """Hand the filled slot over; return the generation that `Submit` must name."""
        return _native.slot_submit(self._view, slot)

    def hand_over(self, slot: int, request: tuple[object, ...], ring: Ring) -> int | None:
        """Do both, and tell the scheduler by its ring; return the generation. `request`: fields of a SlotRequest.

        None, and the slot is DONE (UNAVAILABLE), if the ring is full. The scheduler's bell is to be rung afterwards.
        Raises ValueError as `fill` does.
        """
        view = self._view
        _native.slot_fill(view, slot, request)
        generation = _native.slot_submit(view, slot)
        if ring.send(pack_submit(slot, generation)):
            return generation
        self.finish(slot, generation, SlotStatus.UNAVAILABLE)
        return None

    def cancel(self, slot: int) -> None:
        """Mark that no client waits for the answer. The scheduler is told by a `Cancel` message, too."""
        _WORD.pack_into(self._view, slot * SLOT_BYTES + _CANCEL_AT, 1)

    def wait(self, slot: int, timeout_us: int, spin_us: int = 0) -> bool:
        """Wait until the slot is DONE; False when the time is up. Releases the GIL."""
        return _native.slot_wait(self._view, slot, spin_us, timeout_us)

    def wait_any(self, slots: Sequence[int], timeout_us: int, spin_us: int = 0) -> bool:
        """Wait until one of 1 to MAX_AWAITED slots is DONE; False when the time is up. Releases the GIL."""
        return _native.slot_wait_any(self._view, array("I", slots).tobytes(), spin_us, timeout_us)

    def is_done(self, slot: int) -> bool:
        """Whether a slot is DONE."""
        return _native.slot_read(self._view, slot)[0] == _DONE

    def status(self, slot: int) -> SlotStatus:
        """Return how a DONE slot ended."""
        return _STATUSES[_native.slot_read(self._view, slot)[1]]

    def outcome(self, slot: int) -> SlotOutcome:
        """Return how, and how fast, a DONE slot ended."""
        attempts, ranks, arrival_ns, start_ns, end_ns, *counts, batch_rows, leads, seen_ns, started_ns = (
            _OUTCOME.unpack_from(self._view, slot * SLOT_BYTES + _OUTCOME_AT)
        )
        number = _native.slot_read(self._view, slot)[1]
        return SlotOutcome(
            _STATUSES[number],
            (start_ns - arrival_ns) / 1e3 if start_ns else 0.0,
            (end_ns - start_ns) / 1e3,
            ranks,
            attempts,
            _counts_of(*counts),
            batch_rows,
            leads != 0,
            self._reason(slot, number) if number and attempts else "",
            seen_ns,
            started_ns,
        )

    def _reason(self, slot: int, status: int) -> str:
        """What a worker says about a request that it has ended with this status; empty if it was the scheduler."""
        base = slot * SLOT_BYTES
        if _WORD.unpack_from(self._view, base + _FAILURE_AT)[0] != status:
            return ""
        return bytes(self._view[base + _REASON_AT : base + _REASON_END]).split(b"\0")[0].decode(errors="ignore")

    def done(self, slots: tuple[int, ...]) -> list[int]:
        """Return those of the slots that are DONE."""
        return _native.slots_done(self._view, slots)

    def release(self, slot: int) -> bool:
        """Make a DONE or still FILLING slot free; False if it is in another state."""
        return _native.slot_release(self._view, slot)

    # -- scheduler

    def request(self, slot: int) -> SlotRequest:
        """Read the request's fields; INLINE_PLACES offsets each, unused ones are anything."""
        base = slot * SLOT_BYTES
        model_id, rows, priority, arrival_ns, deadline_ns, *rest = _ASKED.unpack_from(self._view, base + _ASKED_AT)
        *frames, limit_ns, join_key, compound, queue_end_ns, late, max_queue, delays, by_bell = rest
        return SlotRequest(
            model_id,
            rows,
            _PLACES.unpack_from(self._view, base + _INPUTS_AT),
            _PLACES.unpack_from(self._view, base + _OUTPUTS_AT),
            priority,
            arrival_ns,
            deadline_ns,
            (frames[0], frames[1]),
            limit_ns,
            late != 0,
            max_queue,
            by_bell != 0,
            join_key,
            compound,
            queue_end_ns=queue_end_ns,
            delays=delays != 0,
        )

    def terms(self, slot: int) -> SlotTerms:
        """Read what scheduling needs of the request's fields."""
        (
            cancelled, attempts, model_id, rows, priority, arrival_ns, deadline_ns, limit_ns, join_key, compound,
            queue_end_ns, rejects_late, max_queue, delays,
        ) = _TERMS.unpack_from(self._view, slot * SLOT_BYTES + _TERMS_AT)  # fmt: skip
        return SlotTerms(
            model_id, rows, priority, arrival_ns, deadline_ns, limit_ns, rejects_late != 0, max_queue, join_key,
            compound, queue_end_ns, delays != 0, cancelled != 0, attempts,
        )  # fmt: skip

    def see(self, slot: int, generation: int) -> bool:
        """Whether the slot is SUBMITTED in this use of it; note when the scheduler first knew."""
        return _native.slot_see(self._view, slot, generation)

    def count(self, slot: int, counts: SlotCounts) -> None:
        """Write what has been counted so far. Only while no rank is in: one that answers makes the slot another's."""
        _COUNTS.pack_into(self._view, slot * SLOT_BYTES + _COUNTS_AT, *counts)

    def attempts(self, slot: int) -> int:
        """How often the request has been started."""
        return int(_WORD.unpack_from(self._view, slot * SLOT_BYTES + _ATTEMPTS_AT)[0])

    def count_attempt(self, slot: int, count: int = 1) -> None:
        """Count another start of a RUNNING request, of which a part runs again; or one less, where nothing was lost."""
        _WORD.pack_into(self._view, slot * SLOT_BYTES + _ATTEMPTS_AT, self.attempts(slot) + count)

    def cancelled(self, slot: int) -> bool:
        """Whether the front end has called `cancel`."""
        return bool(_WORD.unpack_from(self._view, slot * SLOT_BYTES + _CANCEL_AT)[0])

    def start(self, slot: int, generation: int, parts: int = 1, batch_rows: int = 0, leads: bool = True) -> bool:
        """SUBMITTED -> RUNNING, counts an attempt; False if the slot has moved on.

        Its rows are executed in `parts` parts (1 to MAX_PARTS), each by a lease that has it as a member; it is answered
        when all are done. `batch_rows` (0: its own) and `leads`: see SlotOutcome.
        """
        return _native.slot_start(self._view, slot, generation, parts, batch_rows, leads)

    def lead(self, slot: int, generation: int, leads: bool = True) -> bool:
        """Set whether statistics count a RUNNING request's batch by it; False if it has been answered.

        The answer may come at the same moment: then its front end may have missed this.
        """
        return _native.slot_lead(self._view, slot, generation, leads)

    def part_done(self, slot: int, generation: int, part: int) -> bool:
        """Whether a part whose gang was lost needs no second run: it has been counted, or the slot has moved on.

        If it was the last one and a rank died before it answered, this answers. Only after all ranks have left the
        part's lease. A part that is done must not run again: its request may be answered at any time, and then its
        memory is another's.
        """
        return _native.slot_part_is_done(self._view, slot, generation, part)

    def requeue(self, slot: int, generation: int) -> bool:
        """RUNNING -> SUBMITTED, after all ranks have left; False if the slot has moved on (a rank answered it).

        In the latter case the waiting front end is woken: the rank may have died between answering and waking.
        """
        changed = self._change(slot, generation, _RUNNING, SlotState.SUBMITTED)
        if not changed:
            _native.slot_wake(self._view, slot)
        return changed

    def finish(self, slot: int, generation: int, status: SlotStatus) -> bool:
        """SUBMITTED or RUNNING -> DONE; False if the slot has moved on.

        Wakes the waiting front end in either case, for the same reason as `requeue`.
        """
        changed = self._change(slot, generation, _SUBMITTED | _RUNNING, _DONE, status)
        _native.slot_wake(self._view, slot)
        return changed

    def entry(self, slot: int) -> SlotEntry:
        """Read the slot's state word, all of it at one instant."""
        state, status, generation = _native.slot_read(self._view, slot)
        return SlotEntry(slot, SlotState(state), SlotStatus(status), generation)

    def scan(self) -> Iterator[SlotEntry]:
        """Yield the slots that are SUBMITTED or RUNNING."""
        for slot in range(self.slots):
            entry = self.entry(slot)
            if entry.state in (SlotState.SUBMITTED, SlotState.RUNNING):
                yield entry

    def in_use(self) -> Iterator[tuple[SlotState, int]]:
        """Yield state and model of every request that was handed over and is not given back. Quick; not one instant."""
        states = bytes(self._view[: self.size_bytes : SLOT_BYTES])  # the lowest byte of each state word
        for slot in [slot for slot, state in enumerate(states) if state in _HANDED_OVER]:
            yield SlotState(states[slot]), _WORD.unpack_from(self._view, slot * SLOT_BYTES + _MODEL_AT)[0]

    def _change(
        self,
        slot: int,
        generation: int,
        before: int,  # a mask of states
        after: SlotState,
        status: SlotStatus = SlotStatus.OK,
    ) -> bool:
        return _native.slot_change(self._view, slot, generation, before, after, status)
