"""Requests in shared memory: the way from a front end to the scheduler and back.

    request = data_plane.open(layout, rows=1)   # a slot, and buffers for all inputs and outputs
    request.inputs[0][:] = ...                  # the one copy
    request.submit(deadline_ns, priority)
    outcome = request.wait(until_ns)            # releases the GIL
    ... request.outputs[0] ...
    request.close()

A request that is closed while it runs is cancelled, and its memory is kept aside until the executor has let go of it.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from gangway.executor.memory_budget import memory_budget
from gangway.executor.messages import Cancel, Submit
from gangway.executor.ring import Bell, Ring
from gangway.executor.segment import Segment
from gangway.executor.slots import NEVER_JOINED, SlotOutcome, SlotRequest, SlotStatus, SlotTable
from gangway.server.door import Door
from gangway.server.heap import KEPT_BYTES, Heap, HeapFullError
from gangway.server.in_place.elsewhere import NOWHERE, Elsewhere
from gangway.server.layouts import FrameLayout as FrameLayout  # noqa: PLC0414 - others take these from here
from gangway.server.layouts import HeldBlock, HeldLayout
from gangway.server.layouts import Layout as Layout  # noqa: PLC0414
from gangway.server.layouts import Placement as Placement  # noqa: PLC0414
from gangway.server.layouts import TensorLayout as TensorLayout  # noqa: PLC0414

BLOCKS_AT_ONCE = 8  # are given back while the lock is held: some tenths of a millisecond
KEPT_SHARE = 1 / 16  # of the memory limit is what freed blocks keep at most
ROOMY = 1 / 2  # of the slots: while fewer are taken the scheduler need not make room for newcomers


class PoolExhaustedError(Exception):
    """No slot, or not enough memory for the tensors: too many requests at once. Clients see UNAVAILABLE.

    `for_good`: it would be so if there were no other request. Clients see RESOURCE_EXHAUSTED.
    """

    def __init__(self, message: str, for_good: bool = False) -> None:
        super().__init__(message)
        self.for_good = for_good


class Request:
    """One inference. A context manager: leaving it closes the request.

    `inputs[i]` and `outputs[i]` are views of shared memory, in the manifest's order, valid until `close`; empty ones of
    tensors that are elsewhere.
    """

    def __init__(
        self,
        plane: "DataPlane",
        layout: Layout,
        rows: int,
        slot: int,
        block: int,
        placement: "Placement",
        elsewhere: Elsewhere = NOWHERE,
    ) -> None:
        view = plane.io.view
        self._plane = plane
        self.layout = layout
        self.elsewhere = elsewhere
        self._rows = rows
        self._slot = slot
        self._block = block
        self._placement = placement
        self._sequence: int | None = None
        self._closed = False
        self._cancelled = False
        self.inputs = [view[block + at : block + at + size] for at, size in placement.inputs]
        self.outputs = [view[block + at : block + at + size] for at, size in placement.outputs]

    def submit(
        self,
        deadline_ns: int = 0,
        priority: int = 0,
        arrival_ns: int = 0,
        limit_ns: int = 0,
        rejects_late: bool = False,
        max_queue: int = 0,
        by_bell: bool = False,
        alone: bool = False,
    ) -> None:
        """Hand the request to the scheduler; the inputs must not change any more.

        What the parameters mean: `SlotRequest`. Times are CLOCK_MONOTONIC, 0 is none; an arrival of 0 is now. `wait` is
        not for a request whose answer is told by the bell (`DataPlane.answered`). `alone`: it is not joined to others.
        Raises PoolExhaustedError when the scheduler's ring is full.
        """
        self._plane.door.see(priority)
        block, placement, slots = self._block, self._placement, self._plane.slots
        slots.fill(
            self._slot,
            SlotRequest(
                self.layout.model_id,
                self._rows,
                _offsets(block, placement.inputs, self.elsewhere.inputs),
                _offsets(block, placement.outputs, self.elsewhere.outputs),
                priority,
                arrival_ns,
                deadline_ns,
                self.layout.frame_bytes,
                limit_ns,
                rejects_late,
                max_queue,
                by_bell,
                NEVER_JOINED if alone else self.layout.join_key,
            ),
        )
        self._sequence = slots.submit(self._slot)
        can_wait = priority >= 0 and not (deadline_ns or max_queue)
        if not self._plane.submit(Submit(self._slot, self._sequence).pack(), can_wait):
            slots.finish(self._slot, self._sequence, SlotStatus.UNAVAILABLE)
            raise PoolExhaustedError("the scheduler does not keep up")

    def wait(self, until_ns: int) -> SlotOutcome | None:
        """Wait until the request has ended and return how; None at `until_ns` (CLOCK_MONOTONIC). Releases the GIL."""
        begin_ns = time.monotonic_ns()
        timeout_us = max(0, until_ns - begin_ns) // 1000
        spin_us = self._plane.spin_for(self.layout.model_id)
        if not self._plane.slots.wait(self._slot, timeout_us, spin_us):
            return None
        self._plane.last_wait_ns[self.layout.model_id] = time.monotonic_ns() - begin_ns
        return self.outcome()

    @property
    def slot(self) -> int:
        """The slot's number."""
        return self._slot

    def outcome(self) -> SlotOutcome:
        """Return how the request ended, which must be DONE."""
        outcome = self._plane.slots.outcome(self._slot)
        if outcome.status is SlotStatus.CROWDED:
            self._plane.door.turned_away()
        return outcome

    def cancel(self) -> None:
        """Say that nobody waits for the answer any more; `wait` ends soon. From any thread, at any time, repeatedly."""
        if self._closed:
            return  # which it stays: most calls end after their request
        with self._plane.lock:
            if self._sequence is not None and not self._closed:
                self._cancel()

    def _cancel(self) -> None:
        if not self._cancelled and self._sequence is not None:
            self._cancelled = True
            self._plane.slots.cancel(self._slot)
            # If the ring is full the scheduler still sees the slot's mark when it comes to this request.
            self._plane.send(Cancel(self._slot, self._sequence).pack())

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
        if not self._plane.give_slot(self._slot):
            return False
        self._plane.heap.free(self._block)
        self.elsewhere.let_go()
        if isinstance(self.layout, HeldLayout):
            self._plane.unuse(self.layout.blocks)
        return True

    def __enter__(self) -> "Request":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class Usage:
    """What is taken at this moment. `heap_bytes` include held memory."""

    requests: int
    heap_bytes: int


class DataPlane:
    """Slots and heap of one io segment. Everything may be called from any thread."""

    def __init__(
        self, io: Segment, slots: SlotTable, submit_ring: Ring, scheduler_bell: Bell, spin_us: int = 0
    ) -> None:
        self.io = io
        self.slots = slots
        self.spin_us = spin_us
        self.lock = threading.Lock()
        self.door = Door(slots.slots)
        self.last_wait_ns: dict[int, int] = {}  # by model
        kept_bytes = memory_budget().share_bytes(KEPT_SHARE, KEPT_BYTES)
        self.heap = Heap(slots.size_bytes, io.size_bytes, io.allocate, io.punch, kept_bytes)
        self._ring = submit_ring
        self._bell = scheduler_bell
        self._aside: list[Request] = []  # closed by us, not yet let go by the executor
        self._taken = 0  # slots

    def open(self, layout: Layout, rows: int, elsewhere: Elsewhere = NOWHERE) -> Request:
        """Take a slot and buffers. Raises PoolExhaustedError, at once.

        From then on it is the request that lets go of what is elsewhere, which has no buffers.
        """
        placement = layout.place(rows, elsewhere)
        with self.lock:
            slot = self.take_slot()
            try:
                block = self.allocate(placement.size_bytes)
            except PoolExhaustedError:
                self.give_slot(slot)
                raise
            if isinstance(layout, HeldLayout):
                placement = layout.placed(placement, block)
                for held in layout.blocks:
                    held.uses += 1
            return Request(self, layout, rows, slot, block, placement, elsewhere)

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

    def hold(self, size_bytes: int) -> HeldBlock:
        """Return memory that outlives requests; `drop` it. Raises PoolExhaustedError, at once."""
        with self.lock:
            return HeldBlock(self.allocate(size_bytes), size_bytes)

    def drop(self, block: HeldBlock) -> None:
        """Give held memory back, as soon as no request uses it any more: ranks may still write into it until then."""
        with self.lock:
            block.dropped = True
            self._free_unused(block)

    def unuse(self, blocks: Sequence[HeldBlock]) -> None:
        """A request that used these blocks has let go of them. The caller holds the lock."""
        for block in blocks:
            block.uses -= 1
            self._free_unused(block)

    def submit(self, message: bytes, can_wait: bool) -> bool:
        """Send a request to the scheduler; False if the ring is full.

        Wake it, unless the request `can_wait` and it does not want to be woken for such. Where slots run out it must
        make room (`scheduler/admission.py`), so then nobody can wait.
        """
        sent = self._ring.send(message)
        if sent and can_wait and self._taken < ROOMY * self.slots.slots:
            self._bell.ring_unless_calm()
        else:
            self._bell.ring()
        return sent

    def send(self, message: bytes) -> bool:
        """Send to the scheduler and wake it; False if the ring is full."""
        sent = self._ring.send(message)
        self._bell.ring()
        return sent

    def answered(self, requests: Mapping[int, object]) -> list[int]:
        """Return the slots of those requests (by slot) that have ended."""
        return self.slots.done(tuple(requests))

    def spin_for(self, model_id: int) -> int:
        """Return how many microseconds to spin for an answer before sleeping.

        None, unless the request is the only one, so that nobody else needs the core, and the model's last answer came
        quickly. Then it is worth it: an idle core takes 40-50 us to wake up.
        """
        quick = self.last_wait_ns.get(model_id, self.spin_us * 1000) < self.spin_us * 1000
        return self.spin_us if quick and self._taken == 1 else 0

    def keep_aside(self, request: Request) -> None:
        """Take over a closed request whose memory is still in use. The caller holds the lock."""
        self._aside.append(request)

    def _free_unused(self, block: HeldBlock) -> None:
        if block.dropped and not block.uses:
            self.heap.free(block.offset)

    def _release_aside(self) -> None:
        self._aside = [request for request in self._aside if not request.release()]

    def allocate(self, size_bytes: int) -> int:
        """Return a block that the system has given memory for: being refused it later would be a SIGBUS.

        The caller holds the lock. Raises PoolExhaustedError.
        """
        try:
            return self.heap.allocate(size_bytes)
        except HeapFullError as error:
            if size_bytes > self.heap.capacity_bytes:
                limit = memory_budget().limit
                message = f"the request's tensors take {size_bytes} bytes, more than {limit} leave room for"
                raise PoolExhaustedError(message, for_good=True) from error
            raise PoolExhaustedError(f"no memory for the request's tensors: {error}") from error
        except OSError as error:
            raise PoolExhaustedError(str(error)) from error


def _offsets(block: int, places: Sequence[tuple[int, int]], elsewhere: Mapping[int, int]) -> tuple[int, ...]:
    if not elsewhere:
        return tuple([block + at for at, _ in places])
    return tuple([elsewhere.get(index, block + at) for index, (at, _) in enumerate(places)])
