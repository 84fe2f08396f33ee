"""How the supervisor starts a front-end process: one dataclass, on its standard input.

`serve` is all that the command line of `gangway serve` said, so a flag that matters here needs no further step: the
front end reads it as `options.serve.GROUP.VALUE`. The other fields are what the supervisor adds.
"""

import subprocess
import sys
from dataclasses import dataclass, field

from gangway.server.options.command_line import ServeOptions
from gangway.server.process_options import as_stdin


@dataclass(frozen=True)
class FrontEndOptions:
    """The descriptors are inherited; the io segment begins with `slots` request slots, its heap follows.

    `index` is the front end's number in the control segment, `address` is where gRPC listens, "host:port" (port 0: any;
    a successor gets its predecessor's). At most `slots` requests are in flight, whatever comes on top is answered
    UNAVAILABLE at once. `spin_us`: see DataPlane.spin_for. `trace_fd`: where traces go (-1: nowhere). `statistics_fd`:
    the table in which it counts (-1: in its own memory). `other_io_fds`: the io segments of other front ends.
    `regions_fd`: for having workers map regions (-1: they do not). `thread_share`: see `system.py`.
    """

    index: int
    control_fd: int
    io_fd: int
    supervisor_fd: int
    slots: int
    address: str
    spin_us: int = 0
    trace_fd: int = -1
    regions_fd: int = -1
    statistics_fd: int = -1
    other_io_fds: tuple[int, ...] = ()
    thread_share: float = 1.0
    serve: ServeOptions = field(default_factory=ServeOptions)

    def start(self, stderr: int | None = None) -> "subprocess.Popen[bytes]":
        """Start the process. `stderr`: a descriptor for its log, None for the standard error of this process."""
        command = [sys.executable, "-m", "gangway.server.front_end.process"]
        with as_stdin(self) as stdin:
            return subprocess.Popen(command, pass_fds=self.descriptors, stdin=stdin, stderr=stderr)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What the process must inherit."""
        optional = [fd for fd in (self.trace_fd, self.regions_fd, self.statistics_fd) if fd >= 0]
        return (self.control_fd, self.io_fd, self.supervisor_fd, *self.other_io_fds, *optional)
