"""How a front-end process is started: one dataclass, to and from its command line."""

import argparse
import sys
from dataclasses import dataclass, fields

DEFAULT_MAX_MESSAGE_BYTES = 256 * 1024 * 1024  # 445 float images of 3x224x224; Triton's own clients allow 2 GiB


@dataclass(frozen=True)
class FrontEndOptions:
    """The three descriptors are inherited; the io segment begins with `slots` request slots, its heap follows.

    `index` is the front end's number in the control segment, `address` is "host:port" (port 0: any). At most `slots`
    requests are in flight, whatever comes on top is answered UNAVAILABLE at once. `spin_us`: see DataPlane.spin_for.
    """

    index: int
    control_fd: int
    io_fd: int
    supervisor_fd: int
    slots: int
    address: str
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    log_verbose: int = 0
    spin_us: int = 0

    def command(self) -> list[str]:
        """Return the command line; start it with `pass_fds=options.descriptors`."""
        flags = (f"--{field.name.replace('_', '-')}={getattr(self, field.name)}" for field in fields(self))
        return [sys.executable, "-m", "gangway.server.front_end", *flags]

    @property
    def descriptors(self) -> tuple[int, int, int]:
        """What the process must inherit."""
        return self.control_fd, self.io_fd, self.supervisor_fd

    @classmethod
    def parse(cls, argv: list[str]) -> "FrontEndOptions":
        """Read what `command` wrote. Exits with 2 on anything else."""
        parser = argparse.ArgumentParser(prog="gangway.server.front_end", allow_abbrev=False)
        for field in fields(cls):
            name = f"--{field.name.replace('_', '-')}"
            parser.add_argument(name, required=True, type=str if field.name == "address" else int)
        return cls(**vars(parser.parse_args(argv)))
