"""Requests in shared memory: the way from a front end to the scheduler and back.

    request = data_plane.open(layout, rows=1)   # a slot, and buffers for all inputs and outputs
    request.inputs[0][:] = ...                  # the one copy
    request.submit(Scheduling(deadline_ns, priority))
    outcome = request.wait(until_ns)            # releases the GIL
    ... request.outputs[0] ...
    request.close()

A request that is closed while it runs is cancelled, and its memory is kept aside until the executor has let go of it.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import count
from types import TracebackType
from typing import Final, NamedTuple

import msgspec

from gangway.artifact.format import TensorSpec, align_up
from gangway.base.memory_budget import memory_budget
from gangway.executor.frames import Frame, is_absent
from gangway.executor.messages import Bell, Cancel, Ring
from gangway.executor.segment import Segment
from gangway.executor.slots import GOES_ON, NEVER_JOINED, SlotOutcome, SlotStatus, SlotTable, places_bytes
from gangway.server.requests.admission import AdmissionController
from gangway.server.requests.heap import KEPT_BYTES, ColdError, Heap, HeapFullError, size_class

AtEnd = Callable[[Callable[[], object]], object]  # `loop.LoopTurn.at_end`


class ExternalTensors:
    """Tensors of a request that are not in the block of memory that it has for itself. This class has none.

    `inputs` and `outputs`: what the slot says of them, by their place in the model.
    """

    def __init__(self) -> None:
        self.inputs: dict[int, int] = {}
        self.outputs: dict[int, int] = {}

    @property
    def count(self) -> int:
        """How many there are where the client has them."""
        return 0

    @property
    def delivered(self) -> Collection[int]:
        """The outputs that are written where the client wants them."""
        return ()

    def hold(self, inputs: list[memoryview], outputs: list[memoryview]) -> None:
        """A request has begun to use them; show what of them it can touch. The caller holds the data plane's lock."""

    def has_lost_memory(self) -> bool:
        """Whether what has been computed from them, or written to them, may be wrong."""
        return False

    def release(self) -> None:
        """The executor does not touch them any more. Called once."""


NO_EXTERNAL: Final = ExternalTensors()


@dataclass(eq=False)
class TensorBlock:
    """Memory of the io segment that several requests use, one after the other or together.

    It is freed when nobody holds it any more: its makers, and requests until the executor has let go of them. `holders`
    changes under the data plane's lock only.
    """

    offset: int
    size_bytes: int
    holders: int = 1  # its maker

    def places(self, sizes_bytes: Sequence[int]) -> list["TensorPlace"]:
        """Return places for tensors of these sizes, one after the other; the block has their `total_bytes`."""
        places, position = [], self.offset
        for size_bytes in sizes_bytes:
            places.append(TensorPlace(self, position, size_bytes))
            position += align_up(size_bytes)
        return places


def total_bytes(sizes_bytes: Sequence[int]) -> int:
    """Return the size of a block for tensors of these sizes."""
    return sum(align_up(size_bytes) for size_bytes in sizes_bytes)


class TensorPlace(NamedTuple):
    """Where a tensor lies in a block: from this offset of the segment on, a multiple of 64."""

    block: TensorBlock
    offset: int
    size_bytes: int


class HeldTensors(ExternalTensors):
    """Tensors in blocks, by their place in the model: what others have written or shall read."""

    def __init__(
        self, plane: "DataPlane", inputs: Mapping[int, TensorPlace], outputs: Mapping[int, TensorPlace]
    ) -> None:
        self.inputs = {index: place.offset for index, place in inputs.items()}
        self.outputs = {index: place.offset for index, place in outputs.items()}
        self._plane = plane
        self._inputs, self._outputs = inputs, outputs
        self._held: list[TensorBlock] = []

    def hold(self, inputs: list[memoryview], outputs: list[memoryview]) -> None:
        """Show them, and hold their blocks."""
        for views, places in ((inputs, self._inputs), (outputs, self._outputs)):
            for index, place in places.items():
                views[index] = self._plane.view(place)
                place.block.holders += 1
                self._held.append(place.block)

    def release(self) -> None:
        """Hold the blocks no more. The caller holds the data plane's lock."""
        for block in self._held:
            self._plane.let_go(block)


@dataclass(frozen=True)
class RequestLayout:
    """What the data plane must know of a request: its model's number, and how large inputs and outputs are.

    Tensors of compiled models have places of their own: `input_bytes` and `output_bytes` are those of a row. All others
    lie in frames (`executor/frames.py`): `frame` is that of the inputs, `answer_bytes` the size of that of the outputs.
    `joins`: a request with a frame may be joined with others, of whatever shapes the `ragged` inputs are.
    `instance_key`: the part of `join_key` by which workers know sizes (`artifact/instances.py`).
    """

    model_id: int
    input_bytes: tuple[int, ...] = ()
    output_bytes: tuple[int, ...] = ()
    frame: Frame | None = None
    answer_bytes: int = 0
    joins: bool = True
    ragged: frozenset[int] = frozenset()
    instance_key: int = 0

    @classmethod
    def of(
        cls, model_id: int, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], key: int = 0
    ) -> "RequestLayout":
        """Return the layout of a compiled model with this signature."""
        given, made = (tuple([spec.row_bytes for spec in side]) for side in (inputs, outputs))
        return cls(model_id, given, made, instance_key=key)

    @cached_property
    def frame_bytes(self) -> tuple[int, int]:
        """The sizes of both frames, 0 where there is none."""
        return 0 if self.frame is None else self.frame.size_bytes, self.answer_bytes

    @cached_property
    def join_key(self) -> int:
        """A number that only requests have with inputs of the same shapes, but for rows: these may be joined.

        Rows of compiled models are all alike in an instance, which workers read here.
        """
        if self.frame is None:
            return self.instance_key
        if not self.joins:
            return NEVER_JOINED
        parts, ragged = self.frame.parts, self.ragged
        shapes = [() if place in ragged else part.shape[1:] for place, part in enumerate(parts)]
        return _key_of(tuple([None if is_absent(part) else shape for part, shape in zip(parts, shapes, strict=True)]))

    def output_sizes(self, rows: int) -> list[int]:
        """Return the bytes of each output, or of the frame of all."""
        return [self.answer_bytes] if self.answer_bytes else [rows * size for size in self.output_bytes]

    @cached_property
    def _placements(self) -> dict[object, "BlockPlacement"]:
        return {}

    def place(self, rows: int, external: ExternalTensors = NO_EXTERNAL) -> "BlockPlacement":
        """Return where the tensors of a request with `rows` rows lie within one block, but for those external."""
        key = rows if external is NO_EXTERNAL else (rows, tuple(external.inputs), tuple(external.outputs))
        placement = self._placements.get(key)
        if placement is None:
            placement = self._placements[key] = self._placement(rows, external)
        return placement

    def _placement(self, rows: int, external: ExternalTensors) -> "BlockPlacement":
        frame_bytes, outputs = self.frame_bytes[0], self.output_sizes(rows)
        inputs = [frame_bytes] if frame_bytes else [rows * size for size in self.input_bytes]
        for sizes, places in ((inputs, external.inputs), (outputs, external.outputs)):
            for index in places:
                sizes[index] = 0
        return BlockPlacement.of(inputs, outputs)


@lru_cache(maxsize=1024)
def _key_of(shapes: tuple[tuple[int, ...] | None, ...]) -> int:
    """Return the same number in every process; the highest bit, which means never, is not set."""
    digest = blake2b(repr(shapes).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & ~NEVER_JOINED


class Placed(NamedTuple):
    """Where the tensors of a request lie, in one block: views, and what the slot says."""

    inputs: tuple[memoryview, ...]
    outputs: tuple[memoryview, ...]
    input_offsets: tuple[int, ...]
    output_offsets: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class BlockPlacement:
    """One block holds all tensors of a request: (offset, size) of each, and the block's size.

    `places_at`: where it lists the places that the slot has no room for.
    """

    inputs: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, int], ...]
    places_at: int
    size_bytes: int

    @classmethod
    def of(cls, inputs: Sequence[int], outputs: Sequence[int]) -> "BlockPlacement":
        """Return the placement of tensors of these sizes."""
        places, position = [], 0
        for size_bytes in (*inputs, *outputs):
            places.append((position, size_bytes))
            position += align_up(size_bytes)
        size_bytes = position + places_bytes(len(inputs), len(outputs))
        return cls(tuple(places[: len(inputs)]), tuple(places[len(inputs) :]), position, size_bytes)


BLOCKS_AT_ONCE = 8  # are given back while the lock is held: some tenths of a millisecond
_CROWDED: Final = SlotStatus.CROWDED
KEPT_PLACED: Final = 4096  # blocks are used again and again, for requests of the same kind
KEPT_SHARE = 1 / 16  # of the memory limit is what freed blocks keep at most
ROOMY = 1 / 2  # of the slots: while fewer are taken the scheduler need not make room for newcomers


class PoolExhaustedError(Exception):
    """No slot, or not enough memory for the tensors: too many requests at once. Clients see UNAVAILABLE.

    `for_good`: it would be so if there were no other request. Clients see RESOURCE_EXHAUSTED.
    """

    def __init__(self, message: str, for_good: bool = False) -> None:
        super().__init__(message)
        self.for_good = for_good


class Scheduling(msgspec.Struct, frozen=True, gc=False):
    """How the scheduler treats a request. What the fields mean: `SlotRequest`.

    Times are CLOCK_MONOTONIC, 0 is none; an arrival of 0 is now.
    """

    deadline_ns: int = 0
    priority: int = 0
    arrival_ns: int = 0
    limit_ns: int = 0
    rejects_late: bool = False
    max_queue: int = 0
    compound: int = 0
    queue_end_ns: int = 0
    delays: bool = False


USUAL: Final = Scheduling()


class Submission:
    """One inference. A context manager: leaving it closes the request.

    `inputs[i]` and `outputs[i]` are views of shared memory, in the manifest's order, valid until `close`; empty ones of
    tensors that are where the client has them.
    """

    def __init__(
        self,
        plane: "DataPlane",
        layout: RequestLayout,
        rows: int,
        slot: int,
        block: int,
        placement: "BlockPlacement",
        external: ExternalTensors = NO_EXTERNAL,
    ) -> None:
        self._plane = plane
        self.layout = layout
        self.external = external
        self._rows = rows
        self.slot = slot
        self._block = block
        self._placement = placement
        self._generation: int | None = None
        self._closed = False
        self._cancelled = False
        self._placed = placed = plane.placed(placement, block)
        self.inputs, self.outputs = [*placed.inputs], [*placed.outputs]
        if external is not NO_EXTERNAL:
            external.hold(self.inputs, self.outputs)

    def submit(
        self,
        scheduling: Scheduling = USUAL,
        by_bell: bool = False,
        alone: bool = False,
        goes_on: bool = False,
        last: bool = True,
    ) -> None:
        """Hand the request to the scheduler; the inputs must not change any more.

        `by_bell`: the bell tells of the answer (`serving/slots.py`), and `wait` does not. `alone`: it is not joined to
        others. `goes_on`: it gives a core to what a run before it has begun. `last`: the scheduler is woken; otherwise
        another request follows at once.
        Raises PoolExhaustedError when the scheduler's ring is full.
        """
        layout, external, placed = self.layout, self.external, self._placed
        deadline_ns, priority, compound = scheduling.deadline_ns, scheduling.priority, scheduling.compound
        max_queue, queue_end_ns = scheduling.max_queue, scheduling.queue_end_ns
        inputs, outputs = placed.input_offsets, placed.output_offsets
        if external.inputs or external.outputs:
            inputs, outputs = _with_external(inputs, external.inputs), _with_external(outputs, external.outputs)
        request = (  # a SlotRequest
            layout.model_id,
            self._rows,
            inputs,
            outputs,
            priority,
            scheduling.arrival_ns,
            deadline_ns,
            layout.frame_bytes,
            scheduling.limit_ns,
            scheduling.rejects_late,
            max_queue,
            by_bell,
            GOES_ON if goes_on else layout.instance_key | NEVER_JOINED if alone or compound else layout.join_key,
            compound,
            self._block + self._placement.places_at,
            queue_end_ns,
            scheduling.delays,
        )
        can_wait = priority >= 0 and not (deadline_ns or max_queue or queue_end_ns)
        self._generation = self._plane.hand_over(self.slot, request, priority, can_wait, last)

    def wait(self, until_ns: int) -> SlotOutcome | None:
        """Wait until the request has ended and return how; None at `until_ns` (CLOCK_MONOTONIC). Releases the GIL."""
        timeout_us = max(0, until_ns - time.monotonic_ns()) // 1000
        return self.outcome() if self._plane.slots.wait(self.slot, timeout_us) else None

    def status(self) -> SlotStatus:
        """Return how the request ended, which must be DONE: there is nothing to cancel any more."""
        return self._noted(self._plane.slots.status(self.slot))

    def outcome(self) -> SlotOutcome:
        """Return how, and how fast, the request ended, which must be DONE."""
        outcome = self._plane.slots.outcome(self.slot)
        self._noted(outcome.status)
        return outcome

    def _noted(self, status: SlotStatus) -> SlotStatus:
        self._cancelled = True
        if status is _CROWDED:
            self._plane.admission.scheduler_refused()
        return status

    def cancel(self) -> None:
        """Cancel it: `wait` ends soon. From any thread, at any time, repeatedly."""
        if self._cancelled:
            return  # which it stays: most calls end after their request
        with self._plane.lock:
            if self._generation is not None and not self._closed:
                self._cancel()

    def _cancel(self) -> None:
        if not self._cancelled and self._generation is not None:
            self._cancelled = True
            self._plane.slots.cancel(self.slot)
            # If the ring is full the scheduler still sees the slot's mark when it comes to this request.
            self._plane.send(Cancel(self.slot, self._generation).pack())

    def close(self) -> None:
        """Give slot and memory back: at once if the request has ended, else it is cancelled and they follow later."""
        with self._plane.lock:
            if self._closed:
                return
            self._closed = True
            self.inputs, self.outputs = [], []
            if not self.release():
                self._cancel()
                self._plane.keep_aside(self)

    def release(self) -> bool:
        """Free slot and block unless the executor still owns them. For the data plane, which holds the lock."""
        if not self._plane.give_slot(self.slot):
            return False
        if self._block:
            self._plane.heap.free(self._block)
        if self.external is not NO_EXTERNAL:
            self.external.release()
        return True

    def __enter__(self) -> "Submission":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Usage(msgspec.Struct, frozen=True):
    """What is taken at this moment. `heap_bytes` include blocks."""

    requests: int
    heap_bytes: int


class DataPlane:
    """Slots and heap of one io segment. Everything may be called from any thread."""

    def __init__(self, io: Segment, slots: SlotTable, submit_ring: Ring, scheduler_bell: Bell) -> None:
        self.io = io
        self.slots = slots
        self.lock = threading.Lock()
        self.admission = AdmissionController(slots.slots)
        kept_bytes = memory_budget().share_bytes(KEPT_SHARE, KEPT_BYTES)
        self.heap = Heap(slots.size_bytes, io.size_bytes, io.allocate, io.punch, kept_bytes)
        self._ring = submit_ring
        self._bell = scheduler_bell
        self._aside: list[Submission] = []  # closed by us, not yet let go by the executor
        self._taken = 0  # slots
        self._placed: dict[tuple[BlockPlacement, int], Placed] = {}
        self._at_end: AtEnd | None = None
        self._is_woken = False  # for the first request of a turn
        self._others_can_wait: bool | None = None  # None: there are no others
        self.compounds = count(1)  # compound tasks of this front end, one by one

    def open(
        self,
        layout: RequestLayout,
        rows: int,
        external: ExternalTensors = NO_EXTERNAL,
        most_cold_bytes: int | None = None,
    ) -> Submission:
        """Take a slot and buffers. Raises PoolExhaustedError, at once; ColdError: see `Heap.allocate` and `warm`.

        From then on it is the request that lets go of what is external, which has no buffers.
        """
        placement = layout.place(rows, external)
        with self.lock:
            slot = self.take_slot()
            try:
                block = self.allocate(placement.size_bytes, most_cold_bytes) if placement.size_bytes else 0
            except (PoolExhaustedError, ColdError):
                self.give_slot(slot)
                raise
            return Submission(self, layout, rows, slot, block, placement, external)

    def warm(self, layout: RequestLayout, rows: int) -> None:
        """Have the system give the memory for such a request, while others go on. `open` finds it, or says why not.

        It takes some milliseconds for each 16 MB.
        """
        size_bytes = layout.place(rows).size_bytes
        try:
            with self.lock:
                block = self.heap.reserve(size_bytes)
        except HeapFullError:
            return
        try:
            self.io.allocate(block, size_class(size_bytes))
        except OSError:
            with self.lock:
                self.heap.unreserve(block)
        else:
            with self.lock:
                self.heap.free(block, keeps=True)

    def placed(self, placement: BlockPlacement, block: int) -> Placed:
        """Return where tensors placed so lie in a block."""
        key = placement, block
        placed = self._placed.get(key)
        if placed is None:
            if len(self._placed) >= KEPT_PLACED:
                self._placed.clear()
            view, tensors = self.io.view, (placement.inputs, placement.outputs)
            inputs, outputs = [tuple([view[block + at : block + at + size] for at, size in each]) for each in tensors]
            offsets = [tuple([block + at for at, _ in each]) for each in tensors]
            placed = self._placed[key] = Placed(inputs, outputs, *offsets)
        return placed

    def take_slot(self) -> int:
        """Take a slot. The caller holds the lock. Raises PoolExhaustedError, at once."""
        if self._aside:
            self._release_aside()
        slot = self.slots.acquire()
        if slot is None:
            raise PoolExhaustedError(f"{self.slots.slots} requests are in flight")
        self._taken += 1
        return slot

    def give_slot(self, slot: int) -> bool:
        """Give a slot back, unless the executor still owns it. The caller holds the lock."""
        released = self.slots.release(slot)
        self._taken -= released
        return released

    def usage(self) -> Usage:
        """Return how many requests and bytes are taken, after having freed what can be freed."""
        with self.lock:
            self._release_aside()
            return Usage(self._taken, self.heap.bytes_in_use)

    def give_back_idle(self) -> None:
        """Give back the memory that no request has needed since the last call, with the lock held for short times."""
        given = BLOCKS_AT_ONCE
        while given:
            with self.lock:
                given = self.heap.give_back_idle(BLOCKS_AT_ONCE)

    def give_back_waiting(self) -> None:
        """Give back all memory that no request has."""
        with self.lock:
            self.heap.give_back_waiting()

    def take(self, size_bytes: int) -> TensorBlock:
        """Return a new block, which the caller holds. Raises PoolExhaustedError, at once."""
        with self.lock:
            return TensorBlock(self.allocate(size_bytes), size_bytes)

    def share(self, block: TensorBlock) -> None:
        """Add a holder to a block that has one."""
        with self.lock:
            block.holders += 1

    def drop(self, block: TensorBlock) -> None:
        """Hold a block no more."""
        with self.lock:
            self.let_go(block)

    def let_go(self, block: TensorBlock) -> None:
        """Do the same. The caller holds the lock."""
        block.holders -= 1
        if not block.holders:
            self.heap.free(block.offset)

    def view(self, place: TensorPlace) -> memoryview:
        """Return the memory at a place."""
        return self.io.view[place.offset : place.offset + place.size_bytes]

    def wake_by_turns(self, at_end: AtEnd) -> None:
        """Wake the scheduler for the first request of a turn of the loop, and once for all others, at its end.

        `at_end` calls something then. From then on the loop's thread alone submits requests.
        """
        self._at_end = at_end

    def hand_over(
        self, slot: int, request: tuple[object, ...], priority: int, can_wait: bool, wakes: bool = True
    ) -> int:
        """Send a request to the scheduler; return its generation. Raises PoolExhaustedError if the ring is full.

        Wake the scheduler if it `wakes`, unless the request `can_wait` and it does not want to be woken for such. Where
        slots run out it must make room (`scheduler/admission.py`), so then no request can wait.
        """
        self.admission.note_priority(priority)
        generation = self.slots.hand_over(slot, request, self._ring)
        if generation is None:
            self._bell.ring()
            raise PoolExhaustedError("the scheduler's queue is full")
        if not wakes:
            return generation
        if self._at_end is None:
            self._wake(can_wait)
        elif not self._is_woken:
            self._is_woken = True
            self._at_end(self._end_turn)
            self._wake(can_wait)
        else:
            self._others_can_wait = can_wait and self._others_can_wait is not False
        return generation

    def _end_turn(self) -> None:
        others_can_wait, self._others_can_wait, self._is_woken = self._others_can_wait, None, False
        if others_can_wait is not None:
            self._wake(others_can_wait)

    def _wake(self, can_wait: bool) -> None:
        if can_wait and self._taken < ROOMY * self.slots.slots:
            self._bell.ring_for_best_effort()
        else:
            self._bell.ring()

    def send(self, message: bytes, wakes: bool = True) -> bool:
        """Send to the scheduler, and wake it unless it need not hear of it soon; False if the ring is full."""
        sent = self._ring.send(message)
        if wakes or not sent:
            self._bell.ring()
        return sent

    def keep_aside(self, request: Submission) -> None:
        """Take over a closed request whose memory is still in use. The caller holds the lock."""
        self._aside.append(request)

    def _release_aside(self) -> None:
        self._aside = [request for request in self._aside if not request.release()]

    def allocate(self, size_bytes: int, most_cold_bytes: int | None = None) -> int:
        """Return a block that the system has given memory for: being refused it later would be a SIGBUS.

        The caller holds the lock. Raises PoolExhaustedError, or ColdError as the heap does.
        """
        try:
            return self.heap.allocate(size_bytes, most_cold_bytes)
        except HeapFullError as error:
            if size_bytes > self.heap.capacity_bytes:
                limit = memory_budget().limit
                message = f"the request's tensors take {size_bytes} bytes, more than {limit} leave room for"
                raise PoolExhaustedError(message, for_good=True) from error
            raise PoolExhaustedError(f"no memory for the request's tensors: {error}") from error
        except OSError as error:
            raise PoolExhaustedError(str(error)) from error


def _with_external(offsets: tuple[int, ...], external: Mapping[int, int]) -> tuple[int, ...]:
    return tuple([external.get(index, at) for index, at in enumerate(offsets)])
