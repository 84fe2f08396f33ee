"""The messages that travel through rings: 64 bytes, little endian, laid out as `struct message` in native/layout.h.

| bytes | Submit, Cancel | Run | Load | Unload | Left | Loaded | Unloaded | Ready |
|---|---|---|---|---|---|---|---|---|
| 0-3 | kind | kind | kind | kind | kind | kind | kind | kind |
| 4-7 | slot | lease | model_id | model_id | lease | model_id | model_id | pid |
| 8-11 | generation | rank | at_once | | rank | ok | | |
| 12-15 | | generation | | | generation | | | |
| 16-63 | | | key (32 bytes) | | see below | error (UTF-8, cut at 48) | | |

Left: reason at 16 (4 bytes), joined_ns at 24, left_ns at 32 (8 bytes each). Exit is its kind alone. Unused bytes are 0.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

from gangway.executor import _native
from gangway.executor.segment import Segment

MESSAGE_BYTES: Final = 64
_WORDS: Final = struct.Struct("<4I48s")
_LEFT: Final = struct.Struct("<I4xQQ")


class MessageKind(IntEnum):
    """First word of a message. Zero is none, so that a ring of zeros is never taken for work."""

    SUBMIT = 1
    CANCEL = 2
    RUN = 3
    LOAD = 4
    UNLOAD = 5
    EXIT = 6
    LEFT = 7
    LOADED = 8
    UNLOADED = 9
    READY = 10


class LeftReason(IntEnum):
    """Why a rank left a lease."""

    DONE = 0  # the query is answered
    STOPPED = 1  # by the control word, or the block's last layer is done
    SHRUNK = 2  # the rank was not among the wanted ones
    ABORTED = 3  # the lease was aborted
    TIMEOUT = 4  # another rank made no progress; this rank aborted the lease
    INVALID = 5  # this worker cannot run the lease: model not loaded, or a value out of its range
    STALE = 6  # the Run named an earlier generation of the lease


class Submit(NamedTuple):
    """Front end to scheduler: the slot holds a request."""

    slot: int
    generation: int

    def pack(self) -> bytes:
        """Return the 64 bytes."""
        return _pack(MessageKind.SUBMIT, self.slot, self.generation)


@dataclass(frozen=True)
class Cancel:
    """Front end to scheduler: nobody waits for this answer any more."""

    slot: int
    generation: int

    def pack(self) -> bytes:
        """Return the 64 bytes."""
        return _pack(MessageKind.CANCEL, self.slot, self.generation)


@dataclass(frozen=True)
class Run:
    """Scheduler to worker: join the lease, in its present generation, as this rank. Answered by exactly one Left."""

    lease: int
    rank: int
    generation: int

    def pack(self) -> bytes:
        """Return the 64 bytes."""
        return _pack(MessageKind.RUN, self.lease, self.rank, self.generation)


@dataclass(frozen=True)
class Load:
    """Scheduler to worker: make the artifact `<cache-dir>/<key>` ready under this number. `key` is 64 hex digits.

    `at_once`: no gang can have this worker before, so the load need not give way to one.
    """

    model_id: int
    key: str
    at_once: bool = False

    def pack(self) -> bytes:
        """Return the 64 bytes. Raises ValueError if the key is not 64 hex digits."""
        raw = bytes.fromhex(self.key)
        if len(raw) != 32:
            raise ValueError(f"a key has 64 hex digits, got {self.key!r}")
        return _pack(MessageKind.LOAD, self.model_id, int(self.at_once), payload=raw)


@dataclass(frozen=True)
class Unload:
    """Scheduler to worker: forget the model."""

    model_id: int

    def pack(self) -> bytes:
        """Return the 64 bytes."""
        return _pack(MessageKind.UNLOAD, self.model_id)


@dataclass(frozen=True)
class Exit:
    """Scheduler to worker: end with status 0."""

    def pack(self) -> bytes:
        """Return the 64 bytes."""
        return _pack(MessageKind.EXIT)


class Left(NamedTuple):
    """Worker to scheduler: this rank touches the lease and its memory no more. Times on CLOCK_MONOTONIC."""

    lease: int
    rank: int
    generation: int
    reason: LeftReason
    joined_ns: int = 0
    left_ns: int = 0

    def pack(self) -> bytes:
        """Return the 64 bytes."""
        payload = _LEFT.pack(self.reason, self.joined_ns, self.left_ns)
        return _pack(MessageKind.LEFT, self.lease, self.rank, self.generation, payload)


@dataclass(frozen=True)
class Loaded:
    """Worker to scheduler: the answer to Load; `error` says why not, cut at 48 bytes."""

    model_id: int
    ok: bool
    error: str = ""

    def pack(self) -> bytes:
        """Return the 64 bytes."""
        return _pack(MessageKind.LOADED, self.model_id, int(self.ok), payload=self.error.encode()[:48])


@dataclass(frozen=True)
class Unloaded:
    """Worker to scheduler: the answer to Unload."""

    model_id: int

    def pack(self) -> bytes:
        """Return the 64 bytes."""
        return _pack(MessageKind.UNLOADED, self.model_id)


@dataclass(frozen=True)
class Ready:
    """Worker to scheduler, its first message: older commands are discarded, no model is loaded, new ones are taken."""

    pid: int

    def pack(self) -> bytes:
        """Return the 64 bytes."""
        return _pack(MessageKind.READY, self.pid)


Message = Submit | Cancel | Run | Load | Unload | Exit | Left | Loaded | Unloaded | Ready


def unpack(raw: bytes) -> Message:
    """Return the message in 64 bytes. Raises ValueError for an unknown kind, struct.error for a wrong length."""
    number, a, b, c, payload = _WORDS.unpack(raw)
    make = _MAKERS.get(number)
    if make is None:
        raise ValueError(f"{number} is no kind of message")
    return make(a, b, c, payload)


def pack_run(lease: int, rank: int, generation: int) -> bytes:
    """Return what `Run(lease, rank, generation).pack()` does, faster."""
    return _WORDS.pack(_RUN, lease, rank, generation, b"")


def _make_left(lease: int, rank: int, generation: int, payload: bytes) -> Left:
    reason, joined_ns, left_ns = _LEFT.unpack_from(payload)
    if reason >= len(_REASONS):
        raise ValueError(f"{reason} is no reason to leave")
    return Left(lease, rank, generation, _REASONS[reason], joined_ns, left_ns)


_RUN: Final = int(MessageKind.RUN)
_REASONS: Final = tuple(LeftReason)
_MAKERS: Final[dict[int, Callable[[int, int, int, bytes], Message]]] = {
    MessageKind.SUBMIT: lambda slot, generation, c, payload: Submit(slot, generation),
    MessageKind.CANCEL: lambda slot, generation, c, payload: Cancel(slot, generation),
    MessageKind.RUN: lambda lease, rank, generation, payload: Run(lease, rank, generation),
    MessageKind.LOAD: lambda model_id, at_once, c, payload: Load(model_id, payload[:32].hex(), at_once != 0),
    MessageKind.UNLOAD: lambda model_id, b, c, payload: Unload(model_id),
    MessageKind.EXIT: lambda a, b, c, payload: Exit(),
    MessageKind.LEFT: _make_left,
    MessageKind.LOADED: lambda model_id, ok, c, payload: Loaded(
        model_id, ok != 0, payload.rstrip(b"\0").decode(errors="replace")
    ),
    MessageKind.UNLOADED: lambda model_id, b, c, payload: Unloaded(model_id),
    MessageKind.READY: lambda pid, b, c, payload: Ready(pid),
}


def _pack(kind: MessageKind, a: int = 0, b: int = 0, c: int = 0, payload: bytes = b"") -> bytes:
    return _WORDS.pack(kind, a, b, c, payload)


# Rings of messages and the bells that wake their readers; the memory operations are native/ring.c.
#
# A ring has one producer and one consumer process. Its state is right after every single instruction, so it outlives
# the death of either side: a successor goes on where the dead one was, or calls `discard` first. (Threads of one
# process may share a side: `send` and `receive` keep the GIL.)

BELL_BYTES: Final = _native.BELL_BYTES


def ring_bytes(capacity: int) -> int:
    """Size of a ring that holds `capacity` messages (a power of two)."""
    return _native.RING_HEADER_BYTES + capacity * MESSAGE_BYTES


class Ring:
    """A single-producer single-consumer queue of 64-byte messages at `offset` of a segment."""

    def __init__(self, segment: Segment, offset: int) -> None:
        self._segment = segment
        self._offset = offset

    def init(self, capacity: int) -> None:
        """Make it empty, while nobody uses it. Raises ValueError unless `capacity` is a power of two that fits."""
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
    """Wakes one consumer of several rings. Any number of producers."""

    def __init__(self, segment: Segment, offset: int) -> None:
        self._segment = segment
        self._offset = offset

    def ring(self) -> None:
        """Wake the consumer (a system call only if it sleeps)."""
        _native.bell_ring(self._segment.view, self._offset)

    def ring_unless_calm(self) -> None:
        """Wake the consumer for a message that can wait, if it wants that at present."""
        _native.bell_ring_unless_calm(self._segment.view, self._offset)

    def ring_for_letter(self) -> None:
        """Wake the consumer for something that is in no ring, and was put where it is before."""
        _native.bell_ring_for_letter(self._segment.view, self._offset)

    def letters(self) -> int:
        """Return how often that was done. To be read before one looks there: without a new one there is nothing."""
        return _native.bell_letters(self._segment.view, self._offset)

    def seen(self) -> int:
        """Return the count of strokes so far. To be read BEFORE the rings are looked at, then given to `wait`."""
        return _native.bell_seen(self._segment.view, self._offset)

    def wait(
        self, seen: int, spin_us: int = 20, timeout_us: int = 1_000_000, patient: bool = False, calm: bool = False
    ) -> int:
        """Wait until the bell has been rung since `seen`, or the time is up; return the new count. Releases the GIL.

        Who is `patient` is not woken for messages of workers that can wait (native/worker.c says which), who is `calm`
        not by `ring_unless_calm`; they find the messages later. One of them at a time: else nothing might wake them.
        """
        return _native.bell_wait(self._segment.view, self._offset, seen, spin_us, timeout_us, patient, calm)

    def take_over(self) -> None:
        """Be its consumer from now on, in place of one that may have died while it was patient or calm."""
        _native.bell_take_over(self._segment.view, self._offset)
