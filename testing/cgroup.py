"""A group of processes with limits of its own."""

import os
import time
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


class Cgroup:
    """A cgroup of its own for a server, of one controller, version 1 or 2. Raises OSError where none can be made."""

    def __init__(self, controller: str) -> None:
        mount = CGROUPS / controller if (CGROUPS / controller).is_dir() else CGROUPS
        self.version = 1 if mount != CGROUPS else 2
        self.folder = mount / f"gangway-faults-{os.getpid()}"
        self.folder.mkdir()
        if controller == "cpuset" and self.version == 1:  # empty in a new group, and nobody may enter it then
            for name in ("cpuset.mems", "cpuset.cpus"):
                self.write(name, (mount / name).read_text())

    def write(self, name: str, value: object) -> None:
        """Set a limit. Raises OSError."""
        (self.folder / name).write_text(str(value))

    def read(self, name: str) -> str:
        """Return what a file says. Raises OSError."""
        return (self.folder / name).read_text().strip()

    @property
    def prefix(self) -> list[str]:
        """What goes before a command that shall run in this group."""
        return ["sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh"]

    def limit_memory(self, size_bytes: int) -> None:
        """Allow so much memory. Raises OSError."""
        self.write("memory.limit_in_bytes" if self.version == 1 else "memory.max", size_bytes)

    def out_of_memory_kills(self) -> int:
        """Return how many processes the kernel has killed because the group's memory was full."""
        lines = self.read("memory.oom_control" if self.version == 1 else "memory.events").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))

    def remove(self) -> None:
        """Remove it as soon as its processes are gone."""
        while self.read("cgroup.procs"):
            time.sleep(0.01)
        self.folder.rmdir()
