"""What a server holds: memory, mappings, descriptors of all its processes."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from testing.live_server import LiveServer
from testing.report import Row

PAGE_BLOCK_BYTES = 512


@dataclass(frozen=True)
class Resources:
    """What must not grow, all processes of a server together."""

    private_bytes: int  # memory that is no file and not shared
    shared_bytes: int  # of the segments of shared memory, as far as they take memory
    mappings: int  # of files
    descriptors: int

    def row(self) -> Row:
        """Return it for a table."""
        return {
            "private MB": self.private_bytes / 1e6,
            "shared MB": self.shared_bytes / 1e6,
            "mapped files": self.mappings,
            "descriptors": self.descriptors,
        }


def resources_of(server: LiveServer) -> Resources:
    """Look at all processes of a server."""
    pids = [pid for same in server.pids().values() for pid in same]
    return Resources(
        sum(_anonymous_bytes(pid) for pid in pids),
        _shared_bytes(pids),
        sum(_mapped_files(pid) for pid in pids),
        sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
    )


def _anonymous_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


def _shared_bytes(pids: Sequence[int]) -> int:
    """Each segment once, however many processes have it."""
    sizes = {}
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(descriptor).startswith(("/dev/shm/", "/memfd:")):
                status = descriptor.stat()
                sizes[status.st_dev, status.st_ino] = status.st_blocks * PAGE_BLOCK_BYTES
    return sum(sizes.values())


def _mapped_files(pid: int) -> int:
    lines = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return len({(line[4], line[5]) for line in lines if len(line) == 6 and line[5].startswith("/")})
