"""Alarms that ring when a process has computed for some time: timers of the kernel on its CPU clock.

The kernel looks at such a timer when a tick comes while the process computes. So an alarm costs nothing until then,
and may be late by some ticks. It signals the loop's thread, which takes signals as it takes what comes on sockets.
"""

import asyncio
import ctypes
import os
import signal
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Final

from gangway.python_backend.cpu_clock import clock_of

_SIGNAL: Final = signal.SIGRTMIN + 1
_TO_THREAD: Final = 4  # SIGEV_THREAD_ID
_SIGSET_BYTES, _INFO_BYTES, _NUMBER_AT = 128, 128, 44  # of sigset_t and signalfd_siginfo; its ssi_int
_MOST_AT_ONCE: Final = 64
_MOST_NUMBER: Final = (1 << 31) - 1
_S: Final = 10**9


class _Event(ctypes.Structure):
    """What a timer does: struct sigevent."""

    _fields_ = (
        ("number", ctypes.c_ssize_t),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("thread", ctypes.c_int),
        ("_padding", ctypes.c_char * 44),
    )


class _Times(ctypes.Structure):
    """When it does: struct itimerspec."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("every_s", "every_ns", "after_s", "after_ns"))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.timer_create.argtypes = [ctypes.c_int, ctypes.POINTER(_Event), ctypes.POINTER(ctypes.c_void_p)]
_libc.timer_settime.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Times), ctypes.c_void_p]
_libc.timer_delete.argtypes = [ctypes.c_void_p]


class CpuAlarm:
    """An alarm for some processes. It is made by `CpuAlarms.make`."""

    def __init__(self, alarms: "CpuAlarms", number: int) -> None:
        self._alarms, self._number = alarms, number
        self._timers: dict[int, ctypes.c_void_p | None] = {}  # by process; None: the system gives none

    def set(self, pids: Sequence[int], after_ns: int) -> None:
        """Ring once for each of these processes that has computed for so long from now on. None is set any more."""
        for pid in self._timers.keys() - set(pids):
            self._delete(self._timers.pop(pid))
        times = _Times(0, 0, *divmod(after_ns, _S))
        for pid in pids:
            if pid not in self._timers:
                self._timers[pid] = self._create(pid)
            if (timer := self._timers[pid]) is not None:
                _libc.timer_settime(timer, 0, times, None)

    def close(self) -> None:
        """Ring no more."""
        self._alarms.forget(self._number)
        for timer in self._timers.values():
            self._delete(timer)
        self._timers.clear()

    def _create(self, pid: int) -> ctypes.c_void_p | None:
        event = _Event(self._number, _SIGNAL, _TO_THREAD, threading.get_native_id())
        timer = ctypes.c_void_p()
        return None if _libc.timer_create(clock_of(pid), event, timer) else timer

    @staticmethod
    def _delete(timer: ctypes.c_void_p | None) -> None:
        if timer is not None:
            _libc.timer_delete(timer)


class CpuAlarms:
    """Makes alarms. For the loop's thread, which has the signal blocked from the first one on."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ring: dict[int, Callable[[], object]] = {}
        self._numbers = count()
        self._fd = -1

    def make(self, ring: Callable[[], object]) -> CpuAlarm:
        """Return an alarm that calls `ring`, unless there is no descriptor for it. Its user closes it."""
        if self._fd < 0:
            self._listen()
        number = next(self._numbers) & _MOST_NUMBER
        self._ring[number] = ring
        return CpuAlarm(self, number)

    def forget(self, number: int) -> None:
        """Let an alarm ring no more."""
        self._ring.pop(number, None)

    def _listen(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {_SIGNAL})
        wanted = (1 << _SIGNAL - 1).to_bytes(_SIGSET_BYTES, "little")
        self._fd = _libc.signalfd(-1, wanted, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._take)

    def _take(self) -> None:
        with suppress(BlockingIOError):
            rung = os.read(self._fd, _MOST_AT_ONCE * _INFO_BYTES)
            for at in range(0, len(rung), _INFO_BYTES):
                (number,) = struct.unpack_from("=i", rung, at + _NUMBER_AT)
                if ring := self._ring.get(number):
                    ring()
