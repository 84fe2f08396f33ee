"""Rings of messages and the bells that wake their readers; the memory operations are native/ring.c.

A ring has one producer and one consumer process. Its state is right after every single instruction, so it outlives the
death of either side: a successor goes on where the dead one was, or calls `discard` first. (Threads of one process may
share a side: `send` and `receive` keep the GIL.)
"""

from collections.abc import Sequence
from typing import Final

from gangway.executor import _native
from gangway.executor.messages import MESSAGE_BYTES
from gangway.executor.segment import Segment

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
