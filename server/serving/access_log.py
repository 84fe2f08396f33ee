"""The access log: a line for each request that has ended, of gRPC and of HTTP, written by a thread.

The event loop only notes what it knows anyway. A thread makes lines of it and writes them together, so a slow disk
holds up no request: lines that it has no time for are lost, and counted. Every front end appends whole lines to the
same file, which is opened again when it has been moved or removed.
"""

import json
import logging
import os
import re
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Final

from gangway.server.options.server import STANDARD_OUTPUT, AccessLogOptions
from gangway.server.threads import NoThreadError

_log = logging.getLogger(__name__)

TOGETHER_S: Final = 0.1  # so long lines are collected
MOST_WAITING: Final = 50_000  # requests whose lines have not been written
MOST_AT_ONCE_BYTES: Final = 64 * 1024
PIPE_BYTES: Final = 4096  # Linux's PIPE_BUF: what several processes write to a pipe is not mixed up to this
CLOSE_S: Final = 2.0  # for the last lines
_LINE_END: Final = ord("\n")
COMPLAINT_S: Final = 60.0
SHOWN_CHARACTERS: Final = 512  # of what a client says: its path, its id
CLIENT_CLOSED: Final = 499  # nginx's status of a request whose client has gone before the answer
JSON: Final = "json"
ISO8601: Final = "ISO8601"
_PLAIN: Final = re.compile(r"[!#-<>-~]+")  # needs no quotes: ASCII without blanks, quotes, equals signs
Peer = Any  # as a socket has it: (host, port, ...), or a path


class Access:
    """One request that gets a line. Whoever knows something of it sets that. For the loop's thread.

    `method`: of the service, or HTTP's. `path`: of HTTP. `queue_us`, `compute_us`: of a request that a model has
    executed, else negative.
    """

    __slots__ = (
        "_put", "bytes_in", "bytes_out", "client", "compute_us", "end_s", "method", "model", "path", "protocol",
        "queue_us", "request_id", "status", "total_us", "version",
    )  # fmt: skip

    def __init__(
        self, put: Callable[["Access"], None], protocol: str, client: Peer, method: str, path: bytes, total_us: float
    ) -> None:
        self._put: Callable[[Access], None] | None = put
        self.protocol, self.client, self.method, self.path = protocol, client, method, path
        self.model = self.version = ""
        self.request_id = b""
        self.status: str | int = 0
        self.bytes_in = self.bytes_out = 0
        self.queue_us = self.compute_us = -1.0
        self.end_s = 0.0
        self.total_us = total_us

    def part(self) -> "Access":
        """Return what one of several requests to a model notes, of which this one consists; it gets no line."""
        return Access(lambda _: None, self.protocol, self.client, self.method, self.path, 0.0)

    def join(self, part: "Access") -> None:
        """Note what a part has noted: the first task of all begins the computing, the last one ends it."""
        self.model, self.version = part.model or self.model, part.version or self.version
        if part.queue_us < 0:
            return
        end_us = max(self.queue_us + self.compute_us, part.queue_us + part.compute_us)
        self.queue_us = part.queue_us if self.queue_us < 0 else min(self.queue_us, part.queue_us)
        self.compute_us = end_us - self.queue_us

    def end(self, status: str | int) -> None:
        """The request has been answered, or given up. Saying it again does nothing."""
        put, self._put = self._put, None
        if put is not None:
            self.status, self.end_s = status, time.time()
            self.total_us += time.monotonic_ns() / 1000
            put(self)


class AccessLog:
    """Writes the lines of a front end. `format`: that of the log, which may change. Raises OSError, NoThreadError."""

    def __init__(self, options: AccessLogOptions, format: str) -> None:
        self.format = format
        self._sample = options.sample
        self._seen = self._lost = 0
        self._ended: deque[Access] = deque()
        self._file = _LineFile(options.file)
        self._complained_s = -COMPLAINT_S
        self._wakes, self._closes = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="access log", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            raise NoThreadError from None

    def begin(self, protocol: str, client: Peer, method: str, path: bytes = b"") -> Access | None:
        """Return what becomes the line of a request that has come; None: it gets none."""
        self._seen += 1
        if self._seen % self._sample:
            return None
        return Access(self._put, protocol, client, method, path, -time.monotonic_ns() / 1000)

    def close(self) -> None:
        """Write what there is, as far as that takes no long time."""
        self._closes.set()
        self._wakes.set()
        self._thread.join(CLOSE_S)

    def _put(self, access: Access) -> None:
        if len(self._ended) >= MOST_WAITING:
            self._lost += 1
            return
        self._ended.append(access)
        if not self._wakes.is_set():
            self._wakes.set()

    def _run(self) -> None:
        while not self._closes.is_set():
            self._wakes.wait()
            self._closes.wait(TOGETHER_S)
            self._wakes.clear()
            self._write()
        self._file.close()

    def _write(self) -> None:
        ended = (self._ended.popleft() for _ in range(len(self._ended)))
        try:
            for lines in _together((line_of(each, self.format) for each in ended), self._file.most_bytes):
                self._file.write(lines)
        except OSError as error:
            self._complain("cannot write the access log to %s: %s", self._file.path, error.strerror)
        if self._lost and self._complain("%d lines of the access log were lost: its file takes too long", self._lost):
            self._lost = 0

    def _complain(self, text: str, *values: object) -> bool:
        """Say it, if nothing has been said for a while."""
        now_s = time.monotonic()
        if now_s - self._complained_s < COMPLAINT_S:
            return False
        self._complained_s = now_s
        _log.warning(text, *values)
        return True


def _together(lines: Iterator[bytes], most_bytes: int) -> Iterator[bytes]:
    """Yield lines joined to pieces of at most so many bytes, or of one line."""
    piece: list[bytes] = []
    size_bytes = 0
    for line in lines:
        if piece and size_bytes + len(line) > most_bytes:
            yield b"".join(piece)
            piece, size_bytes = [], 0
        piece.append(line)
        size_bytes += len(line)
    if piece:
        yield b"".join(piece)


class _LineFile:
    """A file that lines are appended to, or standard output. Raises OSError."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._is_output = path == STANDARD_OUTPUT
        self._descriptor, self._identity = (1, os.fstat(1)) if self._is_output else self._opened()
        self._ends_cut = False  # in a part of a line
        is_file = stat.S_ISREG(self._identity.st_mode)
        self.most_bytes = MOST_AT_ONCE_BYTES if is_file else PIPE_BYTES

    def write(self, lines: bytes) -> None:
        """Append lines, to another file of this name if there is one now."""
        if not self._is_output and self._has_moved():
            moved = self._descriptor
            self._descriptor, self._identity = self._opened()
            self._ends_cut = False
            os.close(moved)  # after that: if nothing can be opened, its number stays this file's
        left = memoryview(b"\n" + lines if self._ends_cut else lines)
        while left:
            written = os.write(self._descriptor, left)
            self._ends_cut = left[written - 1] != _LINE_END  # the next write may find no space
            left = left[written:]

    def close(self) -> None:
        """Write nothing more."""
        if not self._is_output:
            os.close(self._descriptor)

    def _opened(self) -> tuple[int, os.stat_result]:
        """Open it. A pipe that nobody reads is an error; one that is read slowly holds the writer up."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(self.path, flags, 0o644)
        os.set_blocking(descriptor, True)
        return descriptor, os.fstat(descriptor)

    def _has_moved(self) -> bool:
        try:
            return not os.path.samestat(os.stat(self.path), self._identity)
        except FileNotFoundError:
            return True


# -- lines


def line_of(access: Access, format: str) -> bytes:
    """Return the line of a request that has ended, in a format of the log."""
    is_json = format == JSON
    written = _quoted if is_json else _shown
    members = [
        ("protocol", written(access.protocol)),
        ("client", written(_address(access.client))),
        ("method", written(access.method)),
    ]
    if access.path:
        members.append(("path", written(access.path[:SHOWN_CHARACTERS].decode("latin-1"))))
    if access.model:
        members.append(("model", written(access.model)))
    if access.version:
        members.append(("version", written(access.version)))
    if access.request_id:
        members.append(("id", written(access.request_id[:SHOWN_CHARACTERS].decode(errors="replace"))))
    status = access.status
    members.append(("status", str(status) if isinstance(status, int) else written(status)))
    members += (("bytes_in", str(access.bytes_in)), ("bytes_out", str(access.bytes_out)))
    if access.queue_us >= 0:
        members += (("queue_us", str(round(access.queue_us))), ("compute_us", str(round(access.compute_us))))
    members.append(("total_us", str(round(access.total_us))))
    second, fraction = divmod(access.end_s, 1)
    moment = _second(int(second), format)
    if is_json:
        rest = ", ".join([f'"{name}": {text}' for name, text in members])
        return f'{{"time": "{moment}.{int(fraction * 1e6):06d}Z", {rest}}}\n'.encode()
    milliseconds = int(fraction * 1000)
    moment = f"{moment}.{milliseconds:03d}Z" if format == ISO8601 else f"{moment},{milliseconds:03d}"
    return f"{moment} {' '.join([f'{name}={text}' for name, text in members])}\n".encode()


@lru_cache(maxsize=8)
def _second(second: int, format: str) -> str:
    """Return a time without its fraction: local for people, else UTC."""
    is_local = format not in (JSON, ISO8601)
    shape = "%Y-%m-%d %H:%M:%S" if is_local else "%Y-%m-%dT%H:%M:%S"
    return time.strftime(shape, (time.localtime if is_local else time.gmtime)(second))


# Most texts are those of earlier lines.
_quoted = lru_cache(maxsize=1024)(json.dumps)


@lru_cache(maxsize=1024)
def _shown(text: str) -> str:
    """Return a text as it stands behind its name: no client can begin a line, or a member of one."""
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


@lru_cache(maxsize=1024)
def _address(client: Peer) -> str:
    if not isinstance(client, tuple):
        return "unix"
    host = str(client[0]).removeprefix("::ffff:")  # IPv4 that has come to a socket of both families
    return f"[{host}]:{client[1]}" if ":" in host else f"{host}:{client[1]}"
