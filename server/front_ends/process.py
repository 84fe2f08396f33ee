"""One front end as the supervisor sees it: its process, which may be replaced, and the link to it."""

import socket
import subprocess
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

from gangway.executor.process import take_precedence
from gangway.scheduler.messages import packet_pair
from gangway.server.children import Child, KeptProcess, pin
from gangway.server.front_end_messages import FrontEndMessage, from_json, to_json
from gangway.server.front_end_options import FrontEndOptions
from gangway.server.link import Link
from gangway.server.logs.server_log import ServerLog

Launch = Callable[["FrontEndProcess"], "subprocess.Popen[bytes]"]
Hear = Callable[["FrontEndProcess", FrontEndMessage], None]
Ended = Callable[["FrontEndProcess", Child], None]
Prepare = Callable[["FrontEndProcess"], Awaitable[None]]


class FrontEndProcess:
    """`index` is its number in the control segment, `name` what the log calls it.

    `launch` calls `start_with`; it, `ended` and `prepare` are as in KeptProcess. `hear` gets what the process says.
    """

    def __init__(
        self,
        index: int,
        name: str,
        core: int,
        log: ServerLog,
        launch: Launch,
        hear: Hear,
        ended: Ended,
        prepare: Prepare,
    ) -> None:
        self.index = index
        self.name = name
        self.listened = False  # until then there are no requests
        self._core = core
        self._log = log
        self._hear = hear
        self._ended = ended
        self.kept = KeptProcess(name, lambda: launch(self), self._has_ended, lambda: prepare(self), self._begun)
        self._our_end: socket.socket | None = None
        self._known: tuple[FrontEndMessage, ...] = ()
        self._link: Link[FrontEndMessage] | None = None

    def start_with(self, options: FrontEndOptions, known: Iterable[FrontEndMessage]) -> "subprocess.Popen[bytes]":
        """Start a process, which is told what is known. Raises OSError."""
        self._known = tuple(known)
        self._our_end, theirs = packet_pair()
        with theirs, self._log.of_child(self.name) as stderr:
            options = replace(options, supervisor_fd=theirs.fileno())
            process = options.start(stderr)
        pin(process.pid, self._core)
        take_precedence(process.pid)
        return process

    def _begun(self) -> None:
        assert self._our_end is not None, "it has been launched"
        self._link = Link(self._our_end, to_json, from_json, lambda message: self._hear(self, message))
        for message in self._known:
            self.send(message)
        self._our_end, self._known = None, ()

    @property
    def pid(self) -> int:
        """The running process's id."""
        return self.kept.pid

    @property
    def is_up(self) -> bool:
        """Whether there is a process, as far as is known."""
        return self._link is not None

    def send(self, message: FrontEndMessage) -> None:
        """Tell it something; a dead one's successor will be told everything."""
        if self._link is not None:
            self._link.send(message)

    async def end(self, timeout_seconds: float) -> bool:
        """Return when the process has ended, which is killed if that takes too long; False if requests were left."""
        self.kept.keep_no_more()
        child = self.kept.child
        if child is None:
            return True
        await child.wait(timeout_seconds)
        return child.returncode == 0 or not self.listened

    def _has_ended(self, child: Child) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        self._ended(self, child)
