"""A worker's connection to an instance of a Python model: it hands requests over, and sleeps until they are answered.

Meanwhile the instance has the worker's core. One that waits, for whatever it is, loses the core: the CPU clock of its
process and of those that it has started says so. So does one that computes while others want the core, as the
scheduler says (`scheduler/policies/turns.py`).
"""

import json
import math
import mmap
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from typing import Any, Final

from gangway.base.process import may_raise_priority
from gangway.executor import _native
from gangway.python_backend.cpu_clock import CpuClock, Thread, is_runnable, queued_ns
from gangway.python_backend.messages import (
    CORE_BITS,
    OCCUPIED,
    WAITING_NICE,
    Connection,
    Message,
    is_same_user,
    peer_of,
    places,
)
from gangway.python_backend.model_threads import Status, place_thread

CONNECT_TIMEOUT_S: Final = 5.0
GREET_MS: Final = 20  # what an instance executes may hold Python's lock: then its first message comes later
_TIME: Final = struct.Struct("@ll")  # struct timeval
LOWEST_MEMORY_BYTES: Final = 1 << 20
KEPT_MEMORY_BYTES: Final = 8 << 20
PATIENCE_MS: Final = 4  # in each half of that an instance that has a core must compute, or be kept from it
MOST_LOOK_MS: Final = 16
COMPUTING_SHARE: Final = 0.2  # of that time
MOST_UNREAD: Final = 16  # runs that an instance has not read yet: each has memory of its own


class InstanceLostError(Exception):
    """The process of the instance has ended, or was ended; the message says how."""


class NotReadyError(InstanceLostError):
    """No process of the instance is there at this moment."""


class Instance:
    """A connection to one instance, and the memory shared with it. Raises OSError, EOFError where there is none."""

    def __init__(self, address: str) -> None:
        connected = socket.socket(socket.AF_UNIX)
        try:
            connected.settimeout(CONNECT_TIMEOUT_S)
            connected.connect(address)
            if not is_same_user(connected):
                raise OSError("another user's process has the address of an instance")
            self.address = address
            pid = peer_of(connected)[0]
            self._process = os.pidfd_open(pid)
        except BaseException:
            connected.close()
            raise
        self._socket = connected
        self._connection = Connection(connected)
        self._ended = select.poll()
        self._ended.register(self._process, select.POLLIN)
        self._answers = select.poll()
        self._answers.register(connected, select.POLLIN)
        self._pid, self._clock = pid, CpuClock(pid)
        self._takers: Set[int] = {pid}  # threads that take what this asks for
        self._unsettled = 0  # a run that was left: the instance may be writing its answer
        self._unread: set[int] = set()  # runs without a core
        self._memory_fd, self._memory = -1, memoryview(b"")
        self.end = _native.InstanceEnd(connected.fileno(), self._process, pid)
        self._map: mmap.mmap | None = None
        self._status: Status | None = None
        self._cores: Set[int] = set()
        self._nice, self._may_raise = 0, False
        try:
            if self._answers.poll(GREET_MS):
                self._receive()
            # From now on the kernel limits the calls: with Python's time-outs each takes two calls more.
            connected.settimeout(None)
            self._answer_s = 0.0
            self._limit(socket.SO_SNDTIMEO, CONNECT_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    @property
    def load(self) -> int:
        """How many executions are open there; OCCUPIED while none can begin."""
        return OCCUPIED if self._status is None else self._status.load

    @property
    def takes_later(self) -> bool:
        """Whether none can begin there, and it can be left one to be executed later. Raises InstanceLostError."""
        if self._status is None or self.load != OCCUPIED:  # one that has not said hello yet may be free
            return False
        try:
            while self._unread and self._has_come(0):
                self._receive()
        except (OSError, EOFError, ValueError) as error:
            raise InstanceLostError("its process has ended") from error
        return len(self._unread) < MOST_UNREAD

    @property
    def pids(self) -> tuple[int, ...]:
        """Its process, and those that it has started, as far as they were looked for."""
        return self._clock.pids

    @property
    def has_ended(self) -> bool:
        """Whether its process has ended since the connection was made."""
        return bool(self._ended.poll(0))

    def ask(
        self,
        header: Mapping[str, Any],
        parts: Sequence[memoryview],
        timeout_s: float,
        patience_ms: int = PATIENCE_MS,
        own: Sequence[bytes] = (),
        text: bytes = b"",
    ) -> Message:
        """Send tensors and a header; return the answer. Raises InstanceLostError; the process is ended if it is late.

        `parts`: contents, to be placed one after the other as `places` says. `own`: what each request has not in common
        with others. `text`: the header as JSON, if that is known. The instance has the core until it computes less than
        COMPUTING_SHARE of `patience_ms`, or others want it. Then the answer is its number, as `waits`: that of the
        execution, if this has begun it. `goes_on`: it computes.
        """
        begin_ns, core = time.monotonic_ns(), header["core"]
        number, lines = _numbered(begin_ns, core, own or [b"{}"] * len(header.get("run", ())))
        try:
            # What rests may hold Python's lock. It wakes before the message: afterwards it may rest again already.
            if wakes := "resume" in header or self._rests:
                self._place(self._clock.threads(), {core}, 0)
            self._send(text or json.dumps(header).encode(), lines, parts, "run" in header)
            if not wakes and self._rests:
                self._place(self._clock.threads(), {core}, 0)
        except BlockingIOError:
            raise self._late(timeout_s) from None
        except (OSError, EOFError, ValueError) as error:
            raise InstanceLostError("its process has ended") from error
        return self._answer_to(number, core, begin_ns, timeout_s, patience_ms, patience_ms / 2)

    @property
    def _rests(self) -> bool:
        return self._status is not None and self._status.rests

    def leave_later(self, parts: Sequence[memoryview], own: Sequence[bytes], text: bytes, core: int) -> Message:
        """Send requests that it is to execute later, and do not wait: what it executes may hold Python's lock.

        `core`: the worker's, which they do not have: `text` says NO_CORE. The instance asks for one when it begins.
        Returns the answer, that they are left to it. Raises InstanceLostError.
        """
        number, lines = _numbered(time.monotonic_ns(), core, own)
        try:
            self._send(text, lines, parts, is_run=True)
        except (OSError, EOFError, ValueError) as error:
            raise InstanceLostError("its process has ended") from error
        self._unsettled = number
        self._unread.add(number)
        self.end.share(None)
        return Message({"done": [{"left": (number, index, (), False)} for index in range(len(own))]}, memoryview(b""))

    def go_on(
        self, number: int, core: int, begin_ns: int, timeout_s: float, looked: tuple[int, int], received: bytes
    ) -> Message:
        """Return the answer to what its `end` has handed over; raises as `ask` does.

        `looked`: when the clock was looked at last (0: never), and what it said. `received`: what was read since then.
        """
        self._connection.give_back(received)
        return self._answer_to(number, core, begin_ns, timeout_s, PATIENCE_MS, 0, looked)

    def _answer_to(
        self,
        number: int,
        core: int,
        begin_ns: int,
        timeout_s: float,
        patience_ms: int,
        look_ms: float,
        looked: tuple[int, int] = (0, 0),
    ) -> Message:
        try:
            if timeout_s != self._answer_s:
                self._answer_s = timeout_s
                self._limit(socket.SO_RCVTIMEO, timeout_s)
            answer = self._answer(number, core, begin_ns, timeout_s, patience_ms, look_ms, *looked)
        except BlockingIOError:
            raise self._late(timeout_s) from None
        except (OSError, EOFError, ValueError) as error:
            raise InstanceLostError("its process has ended") from error
        memory_bytes = answer.header.get("memory_bytes", 0)
        if memory_bytes > len(self._memory):
            self._remap(memory_bytes)
        return answer

    def _late(self, timeout_s: float) -> InstanceLostError:
        """End the process, which is late; return what is to be said."""
        self._kill()
        return InstanceLostError(f"it did not end within {timeout_s:g} s and was ended")

    def _answer(
        self,
        number: int,
        core: int,
        begin_ns: int,
        timeout_s: float,
        patience_ms: int,
        look_ms: float,
        looked_ns: int,
        computed_ns: int,
    ) -> Message:
        """Return the answer with this number. Raises BlockingIOError if it is late, and as `Connection.receive`.

        `executor/native/instance.c` begins in the same way.
        """
        waited_ns = -1  # for cores; in the first window in which it computes little it is not known yet
        while True:
            if self._connection.has_read or self.end.poll(look_ms):
                answer = self._receive()
                if answer.payload == b"%d" % number:  # else of a run that was left
                    return answer
                continue
            now_ns = time.monotonic_ns()
            if now_ns - begin_ns > timeout_s * 1e9:
                raise BlockingIOError
            if self.end.core_is_wanted and not self._has_come(0):
                return self._leave(number, self._clock.threads(), goes_on=True)
            now_computed_ns = self._computed_ns(now_ns)
            little_ns = COMPUTING_SHARE * (now_ns - looked_ns) - (now_computed_ns - computed_ns)
            if not looked_ns or little_ns < 0:  # the longer it computes, the less often is it looked at
                waited_ns, look_ms = -1, max(patience_ms / 2, min((now_ns - begin_ns) / 1e6, MOST_LOOK_MS))
            elif waited_ns < 0:
                if self._status is not None:
                    self._clock.leave_out(self._status.own_threads - self._takers)
                if self._clock.find_others():
                    self._place(self._clock.threads(), {core}, 0)  # it may be these that compute, until the next look
                waited_ns, look_ms = queued_ns(self._clock.threads()), patience_ms / 2
            else:
                threads = self._clock.threads()
                before_ns, waited_ns = waited_ns, queued_ns(threads)
                is_kept = waited_ns - before_ns > little_ns or is_runnable(threads)  # by others, from computing
                if not (is_kept or self._has_come(0)):
                    return self._leave(number, threads)
            looked_ns, computed_ns = now_ns, now_computed_ns

    def _computed_ns(self, now_ns: int) -> int:
        """Return what the CPU clock says. Raises OSError when the process has ended."""
        try:
            return self._clock.read_ns()
        except OSError:
            if self.has_ended:
                raise
            return now_ns  # the system tells nobody of others' clocks: then it counts as computing

    def _has_come(self, within_ms: float) -> bool:
        """Whether a message comes within this time."""
        return self._connection.has_read or bool(self._answers.poll(within_ms))

    def _receive(self) -> Message:
        """Return the next message; take what the first one says. Raises as `Connection.receive` does."""
        message = self._connection.receive()
        if "hello" in message.header:
            self._status = Status(message.descriptor, is_own=False)
            self.end.show(self._status.page)
            os.close(message.descriptor)
            self._cores, self._nice = set(message.header["cores"]), message.header["nice"]
            self._may_raise = may_raise_priority()
            self._takers = {self._pid, message.header["thread"]}
        elif "left" in message.header:
            self._unread.discard(message.header["left"])
        return message

    def _leave(self, number: int, threads: Sequence[Thread], goes_on: bool = False) -> Message:
        """Take the core from what this message has given it; return what stands for its answer."""
        self._place(threads, self._cores, WAITING_NICE)  # first: the instance may give some of its threads more weight
        self._connection.send({"leave": number})
        self._unsettled = number
        self.end.share(None)
        return Message({"waits": number, "goes_on": goes_on}, memoryview(b""))

    def _place(self, threads: Sequence[Thread], cores: Set[int], more_nice: int) -> None:
        """Have the instance's threads these cores, and a nice value so much above that with a core.

        The instance cannot always do so itself: what the model waits for may hold Python's lock.
        """
        if self._status is None:
            return
        nice = self._nice + more_nice if self._may_raise else None
        left_out, rests = self._status.own_threads - {self._pid}, self._status.rests
        for thread in (int(number) for _, number in threads):
            if thread not in left_out:
                place_thread(thread, cores, nice, wakes=rests)

    @property
    def memory(self) -> memoryview:
        """What is shared with the instance."""
        return self._memory

    def close(self) -> None:
        """Let go of it."""
        self.end.close()
        self._connection.close()
        os.close(self._process)
        if self._memory_fd >= 0:
            os.close(self._memory_fd)
            self._memory_fd = -1

    def trim(self) -> None:
        """Give memory back that few requests need."""
        if len(self._memory) > KEPT_MEMORY_BYTES and not self._unsettled:
            os.ftruncate(self._memory_fd, 0)  # the instance still maps it, and does not use it
            self._forget_memory()

    def _settle(self) -> None:
        """Use other memory if the instance may still write the answer of a run that was left.

        Raises OSError, EOFError.
        """
        while self._unsettled and self._has_come(0):
            if self._receive().header.get("left") == self._unsettled:
                self._unsettled = 0
        if self._unsettled and self._memory_fd >= 0:
            self._forget_memory()
        self._unsettled = 0
        self.end.share(self._map)

    def _forget_memory(self) -> None:
        self.end.share(None)
        self._memory.release()
        self._memory = memoryview(b"")
        self._map = None
        os.close(self._memory_fd)
        self._memory_fd = -1

    def _send(self, header: bytes, lines: bytes, parts: Sequence[memoryview], is_run: bool) -> None:
        descriptor = -1
        if self._unsettled:
            self._settle()
        if is_run:
            offsets, size_bytes = places([len(part) for part in parts])
            if size_bytes > len(self._memory) or self._memory_fd < 0:
                descriptor = self._grow(max(size_bytes, LOWEST_MEMORY_BYTES))
            for part, at in zip(parts, offsets, strict=True):
                self._memory[at : at + len(part)] = part
        self._connection.send(header, (lines,), descriptor)

    def _grow(self, size_bytes: int) -> int:
        if self._memory_fd < 0:
            self._memory_fd = os.memfd_create("gangway-python", os.MFD_CLOEXEC)
        os.posix_fallocate(self._memory_fd, 0, size_bytes)
        self._remap(size_bytes)
        return self._memory_fd

    def _remap(self, size_bytes: int) -> None:
        self._memory.release()
        self._map = mmap.mmap(self._memory_fd, size_bytes)
        self._memory = memoryview(self._map)
        self.end.share(self._map)

    def _limit(self, option: int, seconds: float) -> None:
        """Have calls that wait raise BlockingIOError after so long; 0: never."""
        time = _TIME.pack(*divmod(math.ceil(seconds * 1e6), 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, option, time)

    def _kill(self) -> None:
        with suppress(OSError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)


def _numbered(begin_ns: int, core: int, own: Sequence[bytes]) -> tuple[int, bytes]:
    """Return the number of what a worker asks for, which no other one has, and the payload that says it."""
    number = begin_ns << CORE_BITS | core & (1 << CORE_BITS) - 1
    return number, b"\n".join([b"%d" % number, *own])
