"""The example of `deploy/ray` on this machine: started, waited for, stopped."""

import re
import select
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from testing.fetch.ray import PYTHON, with_ray
from testing.live_server import stop
from testing.processes import command_of, descendants_of
from testing.repository import GANGWAY

EXAMPLE = Path(__file__).parent.parent / "deploy/ray/gangway_on_ray.py"
START_SECONDS = 90
SERVER = re.compile(r"--server=(?P<name>[\w.-]+)=(?P<host>[\d.]+):(?P<grpc>\d+),(?P<http>\d+),(?P<metrics>\d+)")


@dataclass(frozen=True)
class OnRay:
    """Servers that Ray keeps: the flags that it printed, and where they answer."""

    flags: tuple[str, ...]
    process: subprocess.Popen[bytes]

    @property
    def urls(self) -> list[str]:
        """Address of each server for gRPC."""
        return [f"{found['host']}:{found['grpc']}" for found in map(SERVER.fullmatch, self.flags) if found]

    def servers(self) -> list[int]:
        """Return the process ids of the servers, which live as children of Ray's workers."""
        return [pid for pid in descendants_of(self.process.pid) if re.search(r"gangway\S* serve ", command_of(pid))]


@contextmanager
def on_ray(repository: Path, log: Path, flags: Sequence[str] = ()) -> Iterator[OnRay]:
    """Run the example until the block ends. Raises RuntimeError with its log if it prints no servers."""
    command = [str(PYTHON), str(EXAMPLE), str(repository), f"--command={' '.join(GANGWAY)}", *flags]
    with (
        log.open("w") as errors,
        subprocess.Popen(command, env=with_ray(), stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        try:
            yield OnRay(tuple(_first_line(process, log).split()), process)
        finally:
            stop(process)


def _first_line(process: "subprocess.Popen[bytes]", log: Path) -> str:
    assert process.stdout is not None
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if select.select([process.stdout], [], [], 0.1)[0] and SERVER.match(line := process.stdout.readline().decode()):
            return line
    raise RuntimeError(f"no server runs on Ray:\n{log.read_text()}")
