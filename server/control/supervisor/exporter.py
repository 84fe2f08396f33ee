"""The exporter's process as the supervisor sees it: started when traces are wanted, replaced when it dies."""

import logging
import socket
import subprocess

from gangway.base.backoff import Backoff
from gangway.base.peer import peer_sockets
from gangway.base.python_process import start_of
from gangway.server.control.supervisor.log import ServerLog
from gangway.server.control.supervisor.processes import Child, SupervisedProcess
from gangway.server.process_options import as_stdin
from gangway.server.tracing.exporter import STOP
from gangway.server.tracing.settings import TraceConfig

FIRST_PAUSE_SECONDS = 1.0  # after the second death in a row; requests are not concerned
SETTLED_SECONDS = 60.0  # of a life, after which it counts as one that works: a start takes seconds on a busy machine
LONGEST_PAUSE_SECONDS = 600.0  # where each one ends: whoever reads the log knows by then
LOSS = "traces are lost: the lines before say why; remove the cause, or turn tracing off"
_log = logging.getLogger(__name__)


class ExporterControl(SupervisedProcess):
    """`front_end_fd` is for front ends to inherit: what they send there reaches the running exporter."""

    def __init__(self, config: TraceConfig, log: ServerLog) -> None:
        pauses = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, SETTLED_SECONDS, free=1)
        super().__init__("trace exporter", pauses=pauses, loss=LOSS)
        self._config = config
        self._log = log
        self._ours, self._theirs = peer_sockets()
        self._wanted = False
        self._predecessors = 0
        if config.level:
            self.want()

    @property
    def front_end_fd(self) -> int:
        """The descriptor."""
        return self._ours.fileno()

    def want(self) -> None:
        """Have an exporter from now on."""
        if not self._wanted:
            self._wanted = True
            self.start_soon()

    async def stop(self, timeout_seconds: float) -> None:
        """Have everything written that was sent, then end the process. Front ends have ended before."""
        self.stop_restarting()
        if not self.is_running:
            return
        try:
            self._ours.send(STOP, socket.MSG_DONTWAIT)
        except BlockingIOError:  # it is far behind
            _log.warning("the last traces are lost, because the trace exporter does not keep up")
            timeout_seconds = 0.0
        await self.wait(timeout_seconds)

    def launch(self) -> "subprocess.Popen[bytes]":
        """Start a process. Raises OSError."""
        arguments = {
            "fd": self._theirs.fileno(),
            "predecessors": self._predecessors,
            "log-levels": self._log.settings.levels.to_number(),
        }
        start = start_of("gangway.server.tracing.exporter", [f"--{name}={value}" for name, value in arguments.items()])
        with self._log.of_child("trace exporter") as stderr, as_stdin(self._config) as stdin:
            return subprocess.Popen(
                start.command, env=start.environment, pass_fds=(self._theirs.fileno(),), stdin=stdin, stderr=stderr
            )

    def ended(self, child: Child) -> None:
        """Have the next one know that it is not the first."""
        self._predecessors += 1
