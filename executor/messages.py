"""The messages that travel through rings: 64 bytes, little endian, laid out as `struct message` in native/layout.h.

| bytes | Submit, Cancel | Run | Load | Unload | Left | Loaded | Unloaded | Ready |
|---|---|---|---|---|---|---|---|---|
| 0-3 | kind | kind | kind | kind | kind | kind | kind | kind |
| 4-7 | slot | lease | model_id | model_id | lease | model_id | model_id | pid |
| 8-11 | sequence | rank | at_once | | rank | ok | | |
| 12-15 | | term | | | term | | | |
| 16-63 | | | key (32 bytes) | | see below | error (UTF-8, cut at 48) | | |

Left: reason at 16 (4 bytes), joined_ns at 24, left_ns at 32 (8 bytes each). Exit is its kind alone. Unused bytes are 0.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

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
    STALE = 6  # the Run named an earlier term of the lease


class Submit(NamedTuple):
    """Front end to scheduler: the slot holds a request."""

    slot: int
    sequence: int

    def pack(self) -> bytes:
        """Return the 64 bytes."""
        return _pack(MessageKind.SUBMIT, self.slot, self.sequence)


@dataclass(frozen=True)
class Cancel:
    """Front end to scheduler: nobody waits for this answer any more."""

    slot: int
    sequence: int

    def pack(self) -> bytes:
        """Return the 64 bytes."""
        return _pack(MessageKind.CANCEL, self.slot, self.sequence)


@dataclass(frozen=True)
class Run:
    """Scheduler to worker: join the lease, in its present term, as this rank. Answered by exactly one Left."""

    lease: int
    rank: int
    term: int

    def pack(self) -> bytes:
        """Return the 64 bytes."""
        return _pack(MessageKind.RUN, self.lease, self.rank, self.term)


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
    term: int
    reason: LeftReason
    joined_ns: int = 0
    left_ns: int = 0

    def pack(self) -> bytes:
        """Return the 64 bytes."""
        payload = _LEFT.pack(self.reason, self.joined_ns, self.left_ns)
        return _pack(MessageKind.LEFT, self.lease, self.rank, self.term, payload)


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


def pack_run(lease: int, rank: int, term: int) -> bytes:
    """Return what `Run(lease, rank, term).pack()` does, faster."""
    return _WORDS.pack(_RUN, lease, rank, term, b"")


def _make_left(lease: int, rank: int, term: int, payload: bytes) -> Left:
    reason, joined_ns, left_ns = _LEFT.unpack_from(payload)
    if reason >= len(_REASONS):
        raise ValueError(f"{reason} is no reason to leave")
    return Left(lease, rank, term, _REASONS[reason], joined_ns, left_ns)


_RUN: Final = int(MessageKind.RUN)
_REASONS: Final = tuple(LeftReason)
_MAKERS: Final[dict[int, Callable[[int, int, int, bytes], Message]]] = {
    MessageKind.SUBMIT: lambda slot, sequence, c, payload: Submit(slot, sequence),
    MessageKind.CANCEL: lambda slot, sequence, c, payload: Cancel(slot, sequence),
    MessageKind.RUN: lambda lease, rank, term, payload: Run(lease, rank, term),
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
