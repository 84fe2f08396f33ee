"""Other processes as the supervisor has them: children that are started again when they end or hang, and control
sockets.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

from gangway.base.backoff import Backoff
from gangway.base.blame import Blame
from gangway.base.peer import Peer, peer_sockets
from gangway.executor.control import Heartbeats
from gangway.python_backend.keeper import relations

_log = logging.getLogger(__name__)

Message = TypeVar("Message")
MAX_UNSENT: Final = 1 << 16  # messages that wait for room in a socket: more than a successor is told at its start
BATCH: Final = 64  # messages of one peer that are handled before others have their turn


class AsyncPeer(Generic[Message]):
    """A peer that the event loop reads and writes. Sends in order and never blocks.

    `on_message` gets each message with the descriptor that came along, which is then its own, or -1. `after_send` is
    called after each attempt to send. A closed other end is no error here: what was sent is lost, and the end of its
    process is noticed elsewhere. `on_overflow` is called once, when more than MAX_UNSENT messages wait.
    """

    def __init__(
        self,
        peer: Peer[Message],
        on_message: Callable[[Message, int], None],
        after_send: Callable[[], None] = lambda: None,
        on_overflow: Callable[[], None] = lambda: None,
    ) -> None:
        self._peer = peer
        self._on_message = on_message
        self._after_send = after_send
        self._on_overflow = on_overflow
        self._unsent: deque[tuple[Message, int]] = deque()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(peer.fileno(), self._read)
        self._is_open = True
        self._is_lost = False  # the other end is closed, or does not read

    def send(self, message: Message, descriptor: int = -1) -> None:
        """Send now, or as soon as there is room. The descriptor stays the caller's, and open until it is sent."""
        if self._is_lost:
            return
        self._unsent.append((message, descriptor))
        if len(self._unsent) == 1:
            self._flush()
        elif len(self._unsent) > MAX_UNSENT:
            self._lose()
            self._on_overflow()

    def finish(self) -> None:
        """Handle what the peer has said until now, then close."""
        while self._is_open and self._read():
            pass
        self.close()

    def close(self) -> None:
        """Close this end; what was said and not heard is lost. Calling it again does nothing."""
        if self._is_open:
            self._is_open, self._is_lost = False, True
            self._unsent.clear()
            self._loop.remove_reader(self._peer.fileno())
            self._loop.remove_writer(self._peer.fileno())
            self._peer.close()

    def _flush(self) -> None:
        while self._is_open and self._unsent:
            try:
                self._peer.send(*self._unsent[0])
            except BlockingIOError:
                self._loop.add_writer(self._peer.fileno(), self._flush)
                break
            except OSError:
                self._lose()
                break
            self._unsent.popleft()
        else:
            if self._is_open:
                self._loop.remove_writer(self._peer.fileno())
        self._after_send()

    def _lose(self) -> None:
        self._is_lost = True
        self._unsent.clear()
        self._loop.remove_writer(self._peer.fileno())

    def _read(self) -> bool:
        """Handle the next messages; return whether there may be more. The loop calls again as long as there are."""
        for _ in range(BATCH):
            if not self._is_open:
                return False
            try:
                received = self._peer.receive_with_descriptor()
                if received is None:
                    return False
                self._on_message(*received)
            except EOFError:
                self._loop.remove_reader(self._peer.fileno())
                return False
            except ValueError:
                _log.exception("a control message from another process of this server is ignored: not understood")
        return True


FREE_DEATHS: Final = 20  # in a row without a pause: requests need a successor at once
FIRST_PAUSE_SECONDS: Final = 0.05
LONGEST_PAUSE_SECONDS: Final = 5.0
ORPHAN_SECONDS: Final = 2.0
ORPHAN_POLL_SECONDS: Final = 0.01
SETTLED_SECONDS: Final = 5.0  # of a process's life, after which its start counts as a success
MOST_FIRST_TRIES: Final = 3  # of a process without which the server cannot start


class StartError(Exception):
    """The server cannot start, because the process called `name` ends again and again before it is ready."""

    def __init__(self, name: str, exit_text: str, last_words: str = "") -> None:
        cause = f": {last_words}" if last_words else ", and the log says why"
        super().__init__(f"cannot start, because the {name} {exit_text}, {MOST_FIRST_TRIES} times in a row{cause}")
        self.name = name
        self.exit_text = exit_text


_watched: Final[set[int]] = set()  # process ids of all children that are not reaped


class Child:
    """One running process. `on_exit(child)` is called once, by the event loop, when it has ended and is reaped.

    Raises OSError where it cannot be watched; the process has ended then.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes], on_exit: Callable[["Child"], None]) -> None:
        self.name = name
        self._process = process
        self._on_exit = on_exit
        try:
            self._pidfd = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.wait()
            raise
        self._exited = asyncio.Event()
        _watched.add(process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    @property
    def pid(self) -> int:
        """The process id; of no use once `returncode` is set."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; then the exit status, or minus the signal's number."""
        return self._process.returncode

    def exit_text(self) -> str:
        """Say how it ended, for people."""
        code = self._process.returncode
        if code is None:
            return "is running"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"

    def kill(self) -> None:
        """Send SIGKILL, if it still runs."""
        self._process.kill()

    def terminate(self) -> None:
        """Send SIGTERM, if it still runs."""
        self._process.terminate()

    async def wait(self, timeout_seconds: float) -> None:
        """Wait until it has ended, and kill it when that takes longer than the timeout."""
        try:
            await asyncio.wait_for(self._exited.wait(), max(timeout_seconds, 0.0))
        except TimeoutError:
            self.kill()
            await self._exited.wait()

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()
        _watched.discard(self.pid)
        self._exited.set()
        self._on_exit(self)


def reap_adopted() -> None:
    """Reap an orphan that this process has adopted and that has ended, if there is one: `Child` reaps all others."""
    with suppress(ChildProcessError):
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None and ended.si_pid not in _watched:
            os.waitpid(ended.si_pid, os.WNOHANG)


async def end_orphans(session: int, mark: bytes) -> None:
    """End the orphans that a child of this process has left to it; return when there is none.

    They are of its session, or have `mark` in their environment. One that waits for a device ends later.
    """
    end = time.monotonic() + ORPHAN_SECONDS
    while time.monotonic() < end:
        left = [pid for pid, of in _adopted().items() if of == session or mark in _environment(pid)]
        if not left:
            break
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        await asyncio.sleep(ORPHAN_POLL_SECONDS)


def _adopted() -> dict[int, int]:
    """Return the sessions of orphans that this process has adopted, by process id."""
    with suppress(OSError):  # no descriptor is left
        children = {pid: about.session for pid, about in relations().items() if about.parent == os.getpid()}
        return {pid: session for pid, session in children.items() if pid not in _watched}
    return {}


def _environment(pid: int) -> bytes:
    with suppress(OSError):  # it has ended
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


class SupervisedProcess:
    """A process that runs as long as the server does: whenever it has ended another one is started.

    `needed`: without it the server cannot start, so StartError is raised in the event loop where it ends again and
    again before `has_become_ready` is called. `pauses`: before others are launched. `loss`: what its absence costs, and
    what to do, said where there is a pause.
    """

    def __init__(self, name: str, needed: bool = False, pauses: Backoff | None = None, loss: str = "") -> None:
        self.name = name
        self._tries_left = MOST_FIRST_TRIES if needed else None
        self._pauses = pauses or Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, SETTLED_SECONDS, FREE_DEATHS)
        self._loss = f", and until then {loss}" if loss else ""
        self._again: asyncio.Task[None] | None = None
        self.is_stopping = False  # no other one is started
        self._said = ""
        self.child: Child | None = None  # the last one

    def launch(self) -> "subprocess.Popen[bytes]":
        """Return a new process, or raise OSError; then it is tried again, after pauses that grow."""
        raise NotImplementedError

    def begun(self) -> None:
        """A process has been launched, and is watched."""

    def ended(self, child: Child) -> None:
        """A process has ended."""

    async def prepare(self) -> None:
        """Do what must be done between the end of a process and the launch of another one."""

    def missing(self) -> None:
        """Each time: there is no process, because it cannot be launched."""

    def start(self) -> None:
        """Start the first one. Raises OSError."""
        self.child = Child(self.name, self.launch(), self._exited)
        self.begun()
        self._pauses.works()

    def start_soon(self) -> None:
        """Start the first one as soon as that is possible."""
        self._again = asyncio.get_running_loop().create_task(self._start_again(0.0))

    @property
    def is_running(self) -> bool:
        """Whether there is a process, as far as is known."""
        return self.child is not None and self.child.returncode is None

    @property
    def pid(self) -> int:
        """The process id of the last one; 0 before the first."""
        return 0 if self.child is None else self.child.pid

    def kill(self) -> None:
        """Send SIGKILL to the process, if there is one."""
        if self.child is not None and self.is_running:
            self.child.kill()

    async def wait(self, timeout_seconds: float) -> None:
        """Wait until the last one has ended, if there was any, and kill it when that takes longer than the timeout."""
        if self.child is not None:
            await self.child.wait(timeout_seconds)

    def stop_restarting(self) -> None:
        """Start no other one from now on."""
        self.is_stopping = True
        if self._again is not None:
            self._again.cancel()

    def has_become_ready(self) -> None:
        """Note that a process has become ready: from now on each one is replaced, whatever happens."""
        self._tries_left = None

    def _exited(self, child: Child) -> None:
        self.ended(child)
        if not self.is_stopping:
            if self._tries_left is not None:
                self._tries_left -= 1
                if not self._tries_left:
                    raise StartError(self.name, child.exit_text())
            pause_seconds = self._pauses.failed()
            when = f" in {pause_seconds:.3g} s{self._loss}" if pause_seconds else ""
            _log.error("the %s (process %d) %s; starting another%s", self.name, child.pid, child.exit_text(), when)
            self._again = asyncio.get_running_loop().create_task(self._start_again(pause_seconds))

    async def _start_again(self, pause_seconds: float) -> None:
        if self.child is not None:
            await self.prepare()
        while True:
            if pause_seconds:
                await asyncio.sleep(pause_seconds)
            try:
                self.start()
                break
            except OSError as error:
                pause_seconds = self._pauses.not_begun()
                if str(error) != self._said:  # else every few seconds
                    _log.error(
                        "the %s cannot be started, which is tried again and again%s: %s", self.name, self._loss, error
                    )
                self._said = str(error)
                self.missing()
        if self._said:
            self._said = ""
            _log.info("the %s is started again (process %d)", self.name, self.pid)


class PeerProcess(SupervisedProcess, Generic[Message]):
    """One without which the server cannot start, and which hears and says messages.

    `make_peer`: of the supervisor's end of a socket. One that does not read what it is told is killed and replaced.
    """

    def __init__(self, name: str, make_peer: Callable[[socket.socket], Peer[Message]]) -> None:
        super().__init__(name, needed=True)
        self._make_peer = make_peer
        self._our_end: socket.socket | None = None
        self._peer: AsyncPeer[Message] | None = None

    def inherited_end(self) -> socket.socket:
        """Return what the process that is being launched inherits (the caller closes it)."""
        self._our_end, theirs = peer_sockets()
        return theirs

    def heard(self, message: Message) -> None:
        """The process has said something."""

    def after_send(self) -> None:
        """The process has been told something, as far as there was room."""

    def begun(self) -> None:
        """Hear the process that has been launched."""
        assert self._our_end is not None, "it has been launched"
        peer = self._make_peer(self._our_end)
        self._peer = AsyncPeer(peer, lambda message, _: self.heard(message), self.after_send, self._overflows)
        self._our_end = None

    def ended(self, child: Child) -> None:
        """Hear what the process has said to its end."""
        if self._peer is not None:
            self._peer.finish()
            self._peer = None

    @property
    def is_up(self) -> bool:
        """Whether there is a process, as far as is known."""
        return self._peer is not None

    def send(self, message: Message) -> None:
        """Tell it something; a dead one's successor will be told everything."""
        if self._peer is not None:
            self._peer.send(message)

    def _overflows(self) -> None:
        text = "the %s (process %d) has not read its last %d control messages; it is killed and replaced"
        _log.error(text, self.name, self.pid, MAX_UNSENT)
        self.kill()


def pin(pid: int, core: int) -> None:
    """Bind a process to a core; it stays where it may be if the core has been taken from us, or it has just ended."""
    with suppress(OSError):
        os.sched_setaffinity(pid, {core})


POLL_SECONDS: Final = 0.15
STARTING_US: Final = 60e6  # until it is seen for the first time


@dataclass(frozen=True)
class Bounds:
    """What makes a process hung: `hung_us` without anything to run, or `computing_us` on a core."""

    hung_us: float
    computing_us: float


SCHEDULER: Final = Bounds(hung_us=0.7e6, computing_us=5e6)  # it sleeps 0.4 s at most; a turn takes milliseconds
FRONT_END: Final = Bounds(hung_us=0.55e6, computing_us=30e6)  # a message of many megabytes is read in one go


@dataclass
class _Seen:
    """A process as it was found. `blame`: since it was found so again."""

    pid: int
    last_ns: int
    starting: bool
    blame: Blame | None = None


class HeartbeatWatch:
    """Kills scheduler and front ends that hang; they are replaced as after any other death.

    Each writes a heartbeat into shared memory (`executor/control.py`), and so does the supervisor, for the server's
    health. `Blame` (`base/blame.py`) decides as for workers. A process that is stopped or sleeps is killed
    soon, one that computes without a heartbeat after `computing_us`. One that waits for a core is never killed.
    `front_ends`: by number, as in Heartbeats.
    """

    def __init__(
        self, beats: Heartbeats, scheduler: SupervisedProcess, front_ends: Mapping[int, SupervisedProcess]
    ) -> None:
        self._beats = beats
        self._watched = {beats.scheduler: (scheduler, SCHEDULER)}
        self._watched |= {number: (kept, FRONT_END) for number, kept in front_ends.items()}
        self._seen: dict[int, _Seen] = {}

    async def check(self) -> None:
        """Give the supervisor's heartbeat, look at all others, then wait until it is time for the next look."""
        self._beats.beat(self._beats.SUPERVISOR)
        for number, (kept, bounds) in self._watched.items():
            if kept.is_running:
                self._check(number, kept, bounds)
        await asyncio.sleep(POLL_SECONDS)

    def _check(self, number: int, kept: SupervisedProcess, bounds: Bounds) -> None:
        last_ns, now_us = self._beats.last_ns(number), time.monotonic_ns() / 1e3
        seen = self._seen.get(number)
        if seen is None or seen.pid != kept.pid:  # what stands there is of a predecessor
            self._seen[number] = _Seen(kept.pid, last_ns, starting=True)
        elif seen.last_ns != last_ns:
            self._seen[number] = _Seen(kept.pid, last_ns, starting=False)
        elif seen.blame is None:
            weight = bounds.hung_us / bounds.computing_us
            seen.blame = Blame(kept.pid, STARTING_US if seen.starting else bounds.hung_us, now_us, weight)
        elif seen.blame.is_too_much(now_us):
            _log.error("the %s (process %d) makes no progress; it is killed and replaced", kept.name, kept.pid)
            kept.kill()
