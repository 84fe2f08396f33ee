"""The messages between processes, and the rings and bells that carry them: 64 bytes each, `struct message` in C.

Native code writes and reads some of them, too (native/layout.h has the fields). Unused bytes are 0.

A ring has one producer and one consumer process; a bell wakes the consumer of several. native/ring.c does the memory
operations. A ring's state is right after every single instruction, so it outlives the death of either side: a successor
goes on where the dead process was, or calls `discard` first. Threads of one process may share a side: `send` and
`receive` keep the GIL.
"""

import os
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

import msgspec

from gangway.executor import _native
from gangway.executor.segment import (
    BELL,
    GANG_MESSAGE,
    MESSAGE,
    MODEL_MESSAGE,
    REQUEST_MESSAGE,
    WORKER_MESSAGE,
    Segment,
)

MESSAGE_BYTES: Final = MESSAGE.size_bytes
BELL_BYTES: Final = BELL.size_bytes
ERROR_BYTES: Final = MODEL_MESSAGE.size("text")  # of Loaded, UTF-8; more is cut off
_KEY_BYTES: Final = 32
_KIND: Final = MESSAGE.whole("kind")
_REQUEST: Final = REQUEST_MESSAGE.whole("kind", "slot", "generation", size_bytes=MESSAGE_BYTES)
_SLOT: Final = REQUEST_MESSAGE.whole("slot", "generation", size_bytes=MESSAGE_BYTES)
_RUN: Final = GANG_MESSAGE.whole("kind", "lease", "rank", "generation", size_bytes=MESSAGE_BYTES)
_LEFT: Final = GANG_MESSAGE.whole(
    "kind", "lease", "rank", "generation", "reason", "joined_ns", "left_ns", size_bytes=MESSAGE_BYTES
)
_MODEL: Final = MODEL_MESSAGE.whole("kind", "model_id", "ok", "text", size_bytes=MESSAGE_BYTES)
_EVENT_FD, _EVENT_FD_AT = BELL.writing("event_fd")
_WORKER: Final = WORKER_MESSAGE.whole("kind", "pid", size_bytes=MESSAGE_BYTES)


class MessageKind(IntEnum):
    """First word of a message. Zero is none, so that a ring of zeros is never taken for work."""

    SUBMIT = _native.MESSAGE_SUBMIT
    CANCEL = _native.MESSAGE_CANCEL
    RUN = _native.MESSAGE_RUN
    LOAD = _native.MESSAGE_LOAD
    UNLOAD = _native.MESSAGE_UNLOAD
    EXIT = _native.MESSAGE_EXIT
    LEFT = _native.MESSAGE_LEFT
    LOADED = _native.MESSAGE_LOADED
    UNLOADED = _native.MESSAGE_UNLOADED
    READY = _native.MESSAGE_READY


_HELD_KIND: Final = 64  # no native code knows it, nor the next one
_KEPT_KIND: Final = 65


class LeftReason(IntEnum):
    """Why a rank left a lease."""

    DONE = _native.LEFT_DONE  # the query is answered
    STOPPED = _native.LEFT_STOPPED  # by the control word, or the block's last layer is done
    SHRUNK = _native.LEFT_SHRUNK  # the rank was not among the wanted ones
    ABORTED = _native.LEFT_ABORTED  # the lease was aborted
    TIMEOUT = _native.LEFT_TIMEOUT  # another rank made no progress; this rank aborted the lease
    INVALID = _native.LEFT_INVALID  # this worker cannot run the lease: model not loaded, or a value out of its range
    STALE = _native.LEFT_STALE  # the Run named an earlier generation of the lease


class Submit(NamedTuple):
    """Front end to scheduler: the slot holds a request."""

    slot: int
    generation: int

    def pack(self) -> bytes:
        """Return the 64 bytes."""
        return pack_submit(self.slot, self.generation)


class Cancel(msgspec.Struct, frozen=True):
    """Front end to scheduler: no client waits for this answer."""

    slot: int
    generation: int

    def pack(self) -> bytes:
        """Return the 64 bytes."""
        return _REQUEST.pack(MessageKind.CANCEL, self.slot, self.generation)


class Held(msgspec.Struct, frozen=True):
    """Front end to scheduler: so many instances of a model are taken by executions that have no core."""

    model_id: int
    count: int

    def pack(self) -> bytes:
        """Return the 64 bytes."""
        return _MODEL.pack(_HELD_KIND, self.model_id, self.count, b"")


class Kept(msgspec.Struct, frozen=True):
    """Worker to scheduler, before the run ends: an instance keeps what has begun. The front end says so later: Held."""

    model_id: int

    def pack(self) -> bytes:
        """Return the 64 bytes."""
        return _MODEL.pack(_KEPT_KIND, self.model_id, 0, b"")


class RunLease(msgspec.Struct, frozen=True):
    """Scheduler to worker: join the lease, in its present generation, as this rank. Answered by exactly one Left."""

    lease: int
    rank: int
    generation: int

    def pack(self) -> bytes:
        """Return the 64 bytes."""
        return _RUN.pack(MessageKind.RUN, self.lease, self.rank, self.generation)


class LoadArtifact(msgspec.Struct, frozen=True):
    """Scheduler to worker: make the artifact `<cache-dir>/<key>` ready under this number. `key` is 64 hex digits.

    `at_once`: the load gives way to no gang: none can have this worker before, or a request waits for it.
    """

    model_id: int
    key: str
    at_once: bool = False

    def pack(self) -> bytes:
        """Return the 64 bytes. Raises ValueError if the key is not 64 hex digits."""
        raw = bytes.fromhex(self.key)
        if len(raw) != _KEY_BYTES:
            raise ValueError(f"a key has 64 hex digits, got {self.key!r}")
        return _MODEL.pack(MessageKind.LOAD, self.model_id, self.at_once, raw)


class Unload(msgspec.Struct, frozen=True):
    """Scheduler to worker: forget the model."""

    model_id: int

    def pack(self) -> bytes:
        """Return the 64 bytes."""
        return _MODEL.pack(MessageKind.UNLOAD, self.model_id, 0, b"")


class Exit(msgspec.Struct, frozen=True):
    """Scheduler to worker: end with status 0."""

    def pack(self) -> bytes:
        """Return the 64 bytes."""
        return _KIND.pack(MessageKind.EXIT)


class LeaseLeft(NamedTuple):
    """Worker to scheduler: this rank touches the lease and its memory no more. Times on CLOCK_MONOTONIC."""

    lease: int
    rank: int
    generation: int
    reason: LeftReason
    joined_ns: int = 0
    left_ns: int = 0

    def pack(self) -> bytes:
        """Return the 64 bytes."""
        return _LEFT.pack(MessageKind.LEFT, *self)


class Loaded(msgspec.Struct, frozen=True):
    """Worker to scheduler: the answer to Load; `error` says why not, cut at ERROR_BYTES."""

    model_id: int
    ok: bool
    error: str = ""

    def pack(self) -> bytes:
        """Return the 64 bytes."""
        return _MODEL.pack(MessageKind.LOADED, self.model_id, self.ok, self.error.encode()[:ERROR_BYTES])


class Unloaded(msgspec.Struct, frozen=True):
    """Worker to scheduler: the answer to Unload."""

    model_id: int

    def pack(self) -> bytes:
        """Return the 64 bytes."""
        return _MODEL.pack(MessageKind.UNLOADED, self.model_id, 0, b"")


class WorkerReady(msgspec.Struct, frozen=True):
    """Worker to scheduler, its first message: older commands are discarded, no model is loaded, new ones are taken."""

    pid: int

    def pack(self) -> bytes:
        """Return the 64 bytes."""
        return _WORKER.pack(MessageKind.READY, self.pid)


Message = (
    Submit
    | Cancel
    | Held
    | Kept
    | RunLease
    | LoadArtifact
    | Unload
    | Exit
    | LeaseLeft
    | Loaded
    | Unloaded
    | WorkerReady
)


def unpack(raw: bytes) -> Message:
    """Return the message in 64 bytes. Raises ValueError for an unknown kind, struct.error for a wrong length."""
    (number,) = _KIND.unpack(raw)
    make = _MAKERS.get(number)
    if make is None:
        raise ValueError(f"{number} is no kind of message")
    return make(raw)


def pack_run(lease: int, rank: int, generation: int) -> bytes:
    """Return what `RunLease(lease, rank, generation).pack()` does, faster."""
    return _RUN.pack(_RUN_KIND, lease, rank, generation)


def pack_submit(slot: int, generation: int) -> bytes:
    """Return what `Submit(slot, generation).pack()` does, faster."""
    return _REQUEST.pack(_SUBMIT_KIND, slot, generation)


class Ring:
    """A single-producer single-consumer queue of 64-byte messages at `offset` of a segment."""

    def __init__(self, segment: Segment, offset: int) -> None:
        self._segment = segment
        self._offset = offset

    def init(self, capacity: int) -> None:
        """Make it empty, while no process uses it. Raises ValueError unless `capacity` is a power of two that fits."""
        _native.ring_init(self._segment.view, self._offset, capacity)

    def send(self, message: bytes) -> bool:
        """Append 64 bytes; False if the ring is full. The consumer's bell is to be rung afterwards."""
        return _native.ring_send(self._segment.view, self._offset, message)

    def receive(self) -> bytes | None:
        """Take the oldest message, None if there is none."""
        return _native.ring_receive(self._segment.view, self._offset)

    def pending(self) -> int:
        """Number of messages sent and not yet received."""
        return _native.ring_pending(self._segment.view, self._offset)

    def discard(self) -> None:
        """Drop everything that has been sent so far. Only for the consumer (a successor does it first)."""
        _native.ring_discard(self._segment.view, self._offset)


class RingGroup:
    """Several rings of one segment with the same consumer, to be emptied at one go."""

    def __init__(self, segment: Segment, offsets: Sequence[int]) -> None:
        self._segment = segment
        self._offsets = tuple(offsets)

    def drain(self) -> list[tuple[int, bytes]]:
        """Take all messages: pairs of the ring's place in the group and 64 bytes, each ring's oldest first."""
        return _native.rings_drain(self._segment.view, self._offsets)


class Bell:
    """Wakes one consumer of several rings. Any number of producers.

    A consumer calls `wait`; or it reads an eventfd, which all producers inherit by `event_fd`, and calls `arm`.
    """

    def __init__(self, segment: Segment, offset: int) -> None:
        self._segment = segment
        self._offset = offset

    def make_event_fd(self) -> int:
        """Make the eventfd that wakes the consumer, before any other process rings; return its descriptor."""
        descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        _EVENT_FD.pack_into(self._segment.view, self._offset + _EVENT_FD_AT, descriptor)
        return descriptor

    @property
    def event_fd(self) -> int:
        """The eventfd that wakes the consumer, of the same number in all processes; 0: there is none."""
        return int(_EVENT_FD.unpack_from(self._segment.view, self._offset + _EVENT_FD_AT)[0])

    def arm(self) -> None:
        """Have the next ring make the eventfd readable, once. The consumer looks for messages after that.

        A producer that dies while it rings may wake nobody, so the consumer also looks now and then.
        """
        _native.bell_arm(self._segment.view, self._offset)

    def ring(self) -> None:
        """Wake the consumer (a system call only if it sleeps)."""
        _native.bell_ring(self._segment.view, self._offset)

    def ring_for_best_effort(self) -> None:
        """Wake the consumer for a best-effort request, unless it waits with `skip_best_effort_wakeups`."""
        _native.bell_ring_for_best_effort(self._segment.view, self._offset)

    def ring_for_control(self) -> None:
        """Wake the consumer for a message that is in no ring, and was sent before (by the supervisor, on a socket)."""
        _native.bell_ring_for_control(self._segment.view, self._offset)

    def control_seq(self) -> int:
        """Return how often that was done. To be read before the socket is: nothing is there unless it has grown."""
        return _native.bell_control_seq(self._segment.view, self._offset)

    def seen(self) -> int:
        """Return how often it has been rung. To be read BEFORE the rings are looked at, then given to `wait`."""
        return _native.bell_seen(self._segment.view, self._offset)

    def wait(
        self,
        seen: int,
        spin_us: int = 20,
        timeout_us: int = 1_000_000,
        skip_completion_wakeups: bool = False,
        skip_best_effort_wakeups: bool = False,
    ) -> int:
        """Wait until the bell has been rung since `seen`, or the time is up; return the new count. Releases the GIL.

        Skipped wakeups are those for answered queries (native/worker.c), or those by `ring_for_best_effort`: their
        messages are found later. At most one of the two kinds is skipped: else nothing might wake the consumer.
        """
        return _native.bell_wait(
            self._segment.view,
            self._offset,
            seen,
            spin_us,
            timeout_us,
            skip_completion_wakeups,
            skip_best_effort_wakeups,
        )

    def take_over(self) -> None:
        """Become its consumer, in place of one that may have died in a wait that skipped wakeups."""
        _native.bell_take_over(self._segment.view, self._offset)


def ring_bytes(capacity: int) -> int:
    """Size of a ring that holds `capacity` messages (a power of two)."""
    return _native.RING_HEADER_BYTES + capacity * MESSAGE_BYTES


def _unpack_load(raw: bytes) -> LoadArtifact:
    _, model_id, at_once, key = _MODEL.unpack(raw)
    return LoadArtifact(model_id, key[:_KEY_BYTES].hex(), at_once != 0)


def _unpack_loaded(raw: bytes) -> Loaded:
    _, model_id, ok, error = _MODEL.unpack(raw)
    return Loaded(model_id, ok != 0, error.rstrip(b"\0").decode(errors="replace"))


def _unpack_left(raw: bytes) -> LeaseLeft:
    _, lease, rank, generation, reason, joined_ns, left_ns = _LEFT.unpack(raw)
    if reason >= len(_REASONS):
        raise ValueError(f"{reason} is no reason to leave")
    return LeaseLeft(lease, rank, generation, _REASONS[reason], joined_ns, left_ns)


_RUN_KIND, _SUBMIT_KIND = int(MessageKind.RUN), int(MessageKind.SUBMIT)
_REASONS: Final = tuple(LeftReason)
_MAKERS: Final[dict[int, Callable[[bytes], Message]]] = {
    MessageKind.SUBMIT: lambda raw: Submit._make(_SLOT.unpack(raw)),
    MessageKind.CANCEL: lambda raw: Cancel(*_SLOT.unpack(raw)),
    _HELD_KIND: lambda raw: Held(*_MODEL.unpack(raw)[1:3]),
    _KEPT_KIND: lambda raw: Kept(_MODEL.unpack(raw)[1]),
    MessageKind.RUN: lambda raw: RunLease(*_RUN.unpack(raw)[1:]),
    MessageKind.LOAD: _unpack_load,
    MessageKind.UNLOAD: lambda raw: Unload(_MODEL.unpack(raw)[1]),
    MessageKind.EXIT: lambda raw: Exit(),
    MessageKind.LEFT: _unpack_left,
    MessageKind.LOADED: _unpack_loaded,
    MessageKind.UNLOADED: lambda raw: Unloaded(_MODEL.unpack(raw)[1]),
    MessageKind.READY: lambda raw: WorkerReady(_WORKER.unpack(raw)[1]),
}
