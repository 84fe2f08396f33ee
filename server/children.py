"""Child processes of the supervisor: started, watched by pidfd, and counted when they die."""

import asyncio
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable


class TooManyDeathsError(RuntimeError):
    """A kind of process dies again and again: something is broken that a restart does not cure."""


class DeathLimit:
    """At most `deaths` in `window_seconds`; more raise TooManyDeathsError, which ends the server."""

    def __init__(self, kind: str, deaths: int = 100, window_seconds: float = 60.0) -> None:
        self._kind = kind
        self._deaths = deaths
        self._window_seconds = window_seconds
        self._times: deque[float] = deque()

    def count(self, now: float | None = None) -> None:
        """Note one death at `now` (time.monotonic() seconds)."""
        now = time.monotonic() if now is None else now
        self._times.append(now)
        while self._times[0] < now - self._window_seconds:
            self._times.popleft()
        if len(self._times) > self._deaths:
            raise TooManyDeathsError(
                f"the {self._kind} died {len(self._times)} times within {self._window_seconds:.0f} seconds"
            )


class Child:
    """One running process. `on_exit(child)` is called once, by the event loop, when it has ended and is reaped."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], on_exit: Callable[["Child"], None]) -> None:
        self.name = name
        self._process = process
        self._on_exit = on_exit
        self._pidfd = os.pidfd_open(process.pid)
        self._exited = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    @property
    def pid(self) -> int:
        """The process id; of no use once `returncode` is set."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; then the exit status, or minus the signal's number."""
        return self._process.returncode

    def fate(self) -> str:
        """Say how it ended, for people."""
        code = self._process.returncode
        if code is None:
            return "is running"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"

    def kill(self) -> None:
        """Send SIGKILL, if it still runs."""
        self._process.kill()

    async def wait(self, timeout_seconds: float) -> None:
        """Wait until it has ended, and kill it when that takes longer than the time-out."""
        try:
            await asyncio.wait_for(self._exited.wait(), max(timeout_seconds, 0.0))
        except TimeoutError:
            self.kill()
            await self._exited.wait()

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()
        self._exited.set()
        self._on_exit(self)
