"""One front end as the supervisor sees it: its process, which may be replaced, and the link to it."""

import os
from collections.abc import Callable, Iterable
from dataclasses import replace

from gangway.executor.process import take_precedence
from gangway.scheduler.packets import packet_pair
from gangway.server.children import Child
from gangway.server.front_end_messages import FrontEndMessage, from_json, to_json
from gangway.server.front_end_options import FrontEndOptions
from gangway.server.link import Link
from gangway.server.logs.server_log import ServerLog

Hear = Callable[["FrontEndProcess", FrontEndMessage], None]
Exited = Callable[["FrontEndProcess", Child], None]


class FrontEndProcess:
    """`index` is its number in the control segment, `name` what the log calls it.

    `hear` gets what it says, `exited` is called once for each process that has ended.
    """

    def __init__(self, index: int, name: str, core: int, log: ServerLog, hear: Hear, exited: Exited) -> None:
        self.index = index
        self.name = name
        self.listened = False  # until then there are no requests
        self._core = core
        self._log = log
        self._hear = hear
        self._exited = exited
        self._child: Child | None = None
        self._link: Link[FrontEndMessage] | None = None

    def start(self, options: FrontEndOptions, known: Iterable[FrontEndMessage]) -> None:
        """Start a process and tell it what is known."""
        ours, theirs = packet_pair()
        options = replace(options, supervisor_fd=theirs.fileno())
        with self._log.of_child(self.name) as stderr:
            process = options.start(stderr)
        theirs.close()
        os.sched_setaffinity(process.pid, {self._core})
        take_precedence(process.pid)
        self._child = Child(self.name, process, self._ended)
        self._link = Link[FrontEndMessage](ours, to_json, from_json, lambda message: self._hear(self, message))
        for message in known:
            self.send(message)

    @property
    def pid(self) -> int:
        """The running process's id."""
        assert self._child is not None, "started"
        return self._child.pid

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
        if self._child is None:
            return True
        await self._child.wait(timeout_seconds)
        return self._child.returncode == 0 or not self.listened

    def _ended(self, child: Child) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        self._exited(self, child)
