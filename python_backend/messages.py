"""Messages between an instance of a Python model and its callers: workers and front ends, over a Unix stream socket.

A message is 16 bytes (sizes of header and payload, little endian), a header in JSON, and a payload: the contents of
tensors, one after the other. A payload that is too large is refused by its size, before it arrives. A descriptor may
come along with a message. Tensors that a worker sends or gets lie in shared memory instead, each at a multiple of 64
bytes, in the order of the header. Most headers are equal to earlier ones, and are understood once.

| sender | header | meaning |
|---|---|---|
| instance | `hello`: pid, `thread`, `cores`, `nice`, `idle` | first; its descriptor: the status (`model_threads.py`) |
| worker | `run`: requests, `core` | execute (NO_CORE: later); the descriptor is the memory, if it is another one |
| worker | `resume`: execution, `core` | the execution may use this core |
| worker | `leave`: number | what has begun with it waits, and has no core any more; responses are the front end's |
| instance | `done`: outcomes, `memory_bytes` | the run has ended; an outcome is a response, or says `left` |
| instance | `stopped`, `waits` | the resumed execution uses the core no more; `waits`: it, or its threads, may go on |
| instance | `left`: number | the memory of that run is not used any more; the only answer to one without a core |
| front end | `attach`: execution, `request` | send this request's responses here; BACKGROUND: `infer` only |
| instance | `grant` | have a worker resume the execution |
| instance | `begun` | the model begins to execute what has waited for it |
| instance | `infer`: number, and a request | execute a request to another model |
| instance | `cancel`: number | end that request: no response to it is wanted |
| front end | `result`: number, and a response, `final` | one response to it |
| instance | a response, `final` | one response to the front end's request |

`cores` are all that an instance may have, `nice` its nice value while it has one, `idle` threads that only wait.

`run` and `resume` have a number, which `done` or `stopped` repeats: it is the first line of the payload. That of `run`
is the execution's. A line in JSON follows for each of its requests, with what it has not in common with others.

A request has `inputs`, a response `outputs`: lists of (name, datatype, shape, bytes of contents). A response may have
`error`: (code, message), where codes are Triton's, or RESOURCE_EXHAUSTED where the answer would be too large.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple, Union

PREFIX = struct.Struct("<QQ")
_DESCRIPTOR = struct.Struct("i")
_DESCRIPTOR_ROOM = socket.CMSG_LEN(_DESCRIPTOR.size)
READ_BYTES = 4096  # are read at once, if so many are there: most messages are shorter
MAX_HEADER_BYTES = 64 << 20
MAX_PAYLOAD_BYTES = 1 << 36
KNOWN_HEADERS, KNOWN_HEADER_BYTES = 64, 4096  # of so many and so long ones it is remembered what they say
ALIGNMENT_BYTES = 64
JOIN_BYTES = 16 << 10  # of a message are sent by one call
CORE_BITS = 10  # of the number of a run: the worker's core; above them is when it began, of CLOCK_MONOTONIC in ns
WAITING_NICE = 10  # of an instance without a core, above its nice value with one: a tenth of the weight
BACKGROUND = 0  # the number of the execution that nobody has asked for
OCCUPIED = 255  # no execution could begin at once
NO_CORE = -1  # of a run that a worker does not wait for
ERROR_CODES = (
    "UNKNOWN",
    "INTERNAL",
    "NOT_FOUND",
    "INVALID_ARG",
    "UNAVAILABLE",
    "UNSUPPORTED",
    "ALREADY_EXISTS",
    "CANCELLED",
)

Buffer = Union[bytes, bytearray, memoryview]  # noqa: UP007 - Python 3.9
Described = tuple[str, str, Sequence[int], int]  # of a tensor: name, datatype, shape, bytes of its contents


class PayloadTooLargeError(ValueError):
    """A message whose payload is not read: it has `size_bytes`."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(f"a payload of {size_bytes} bytes")
        self.size_bytes = size_bytes


class Message(NamedTuple):
    """One message. `text`: of its header, which equal messages may share. `descriptor`: -1 if none came along."""

    header: Mapping[str, Any]
    payload: memoryview
    descriptor: int = -1
    text: bytes = b""


@lru_cache(maxsize=KNOWN_HEADERS)
def _parsed(text: bytes) -> dict[str, Any]:
    header = json.loads(text.decode())
    if not isinstance(header, dict):
        raise ValueError("a message whose header is no object")
    return header


def header_of(text: bytes) -> Mapping[str, Any]:
    """Return what a header says: one object for equal ones. Raises ValueError for what is no header."""
    return _parsed(text) if len(text) <= KNOWN_HEADER_BYTES else _parsed.__wrapped__(text)


class Connection:
    """One end of a socket. Any thread may send; one calls `receive`, or any number `take_now`.

    `most_bytes`: of a payload that it receives.
    """

    def __init__(self, connected: socket.socket, most_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self._socket = connected
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._receiving = threading.Lock()
        self._read = memoryview(bytearray(READ_BYTES))
        self._begin = self._end = 0  # of what was read there of messages to come
        self._position = 0  # of that within all that comes
        self._descriptors: list[tuple[int, int]] = []  # each with the position of a byte of its message

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    @property
    def has_read(self) -> bool:
        """Whether a further message has begun to come that no poll tells of."""
        return self._begin < self._end

    def send(self, header: Mapping[str, Any] | bytes, payload: Sequence[Buffer] = (), descriptor: int = -1) -> None:
        """Send a message; its header may be JSON already. Raises OSError if the other end is gone."""
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        payload_bytes = sum(map(len, payload))
        parts: Sequence[Buffer] = (PREFIX.pack(len(text), payload_bytes) + text, *payload)
        if payload and len(parts[0]) + payload_bytes <= JOIN_BYTES:
            parts = (b"".join(parts),)
        with self._lock:
            sent = 0
            if descriptor >= 0:
                sent = socket.send_fds(self._socket, [parts[0]], [descriptor])
            for part in parts:
                if sent < len(part):
                    self._socket.sendall(memoryview(part)[sent:] if sent else part)
                sent = 0

    def receive(self) -> Message:
        """Return the next message. Raises EOFError at the end, OSError, ValueError for what is no message."""
        while self._end - self._begin < PREFIX.size:
            self._fill()
        header_bytes, payload_bytes = PREFIX.unpack_from(self._read, self._begin)
        if header_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"a message of {header_bytes} and {payload_bytes} bytes")
        if payload_bytes > self._most_bytes:
            raise PayloadTooLargeError(payload_bytes)
        self._begin += PREFIX.size
        text, payload = bytes(self._next(header_bytes)), self._next(payload_bytes)
        self._position += PREFIX.size + header_bytes + payload_bytes
        descriptor = -1
        if self._descriptors and self._descriptors[0][0] < self._position:
            descriptor = self._descriptors.pop(0)[1]
        return Message(header_of(text), payload, descriptor, text)

    def take_now(self, take: Callable[[Message, Connection], None]) -> None:
        """Have the messages taken that have begun to come, in their order; raises as `receive` does."""
        with self._receiving:
            if not self.has_read:
                try:
                    self._fill(socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return
            while self.has_read:
                take(self.receive(), self)

    def give_back(self, read: bytes) -> None:
        """Have `receive` go on with what was read from the socket by other means, after what was read before."""
        found = b"".join((self._read[self._begin : self._end], read))
        if len(found) > len(self._read):
            self._read = memoryview(bytearray(len(found)))
        self._read[: len(found)] = found
        self._begin, self._end = 0, len(found)

    def end(self) -> None:
        """End it, for both sides; a thread that receives gets EOFError, and is the one to close it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End it, and let go of it."""
        self.end()
        self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.pop()[1])

    def _fill(self, flags: int = 0) -> None:
        """Read some of what comes, after what was read."""
        kept = self._end - self._begin
        if self._begin:
            self._read[:kept] = self._read[self._begin : self._end]
            self._begin, self._end = 0, kept
        # Not socket.recv_fds, which passes its flags on to nobody (Python 3.11).
        room = self._read[kept:] if kept else self._read
        count, ancillary, _, _ = self._socket.recvmsg_into((room,), _DESCRIPTOR_ROOM, flags)
        if not count:
            raise EOFError
        self._end += count
        for level, kind, about in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS) and len(about) >= _DESCRIPTOR.size:
                # The kernel reads nothing behind what a descriptor came with.
                self._descriptors.append((self._position + self._end - 1, *_DESCRIPTOR.unpack_from(about)))

    def _next(self, size_bytes: int) -> memoryview:
        """Return the next bytes of the message that has begun."""
        begin, self._begin = self._begin, min(self._begin + size_bytes, self._end)
        at = self._begin - begin
        if at == size_bytes:
            return memoryview(bytearray(self._read[begin : self._begin]))
        view = memoryview(bytearray(size_bytes))
        view[:at] = self._read[begin : self._begin]
        while at < size_bytes:
            count = self._socket.recv_into(view[at:])
            if not count:
                raise EOFError
            at += count
        return view


def places(sizes_bytes: Sequence[int]) -> tuple[list[int], int]:
    """Return where tensors of these sizes lie in shared memory, and how many bytes they take."""
    offsets, end = [], 0
    for size_bytes in sizes_bytes:
        offsets.append(end)
        end += -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return offsets, end


def is_same_user(connected: socket.socket) -> bool:
    """Whether the process at the other end is the same user's, or root's."""
    return peer_of(connected)[1] in (os.geteuid(), 0)


def peer_of(connected: socket.socket) -> tuple[int, int]:
    """Return process and user at the other end."""
    pid, user, _ = struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user
