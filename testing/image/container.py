"""A server in a container, as an orchestrator runs it: no privilege, nothing written outside of the cache."""

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from testing.image.docker import Docker
from testing.live_server import reserved_port

HARDENED = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges")
START_SECONDS = 120.0  # with models to compile
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Container:
    """A container whose gRPC port is published at `url`."""

    docker: Docker
    name: str
    url: str

    def wait_until_ready(self, seconds: float = START_SECONDS) -> float:
        """Return seconds until all models are ready. Raises RuntimeError with the log if the container ends."""
        begin = time.monotonic()
        with triton.InferenceServerClient(self.url) as client:
            while time.monotonic() < begin + seconds:
                with suppress(InferenceServerException):
                    if client.is_server_ready(client_timeout=1):
                        return time.monotonic() - begin
                if not self.is_running():
                    break
                time.sleep(POLL_SECONDS)
        raise RuntimeError(f"{self.name} is not ready:\n{self.log()}")

    def is_running(self) -> bool:
        """Whether its first process lives."""
        return self.inspect("{{.State.Running}}") == "true"

    def inspect(self, what: str) -> str:
        """Return a part of what Docker knows of it, as a template of Go."""
        return self.docker.run("inspect", "--format", what, self.name)

    def log(self) -> str:
        """Return what it has printed, on both streams."""
        return subprocess.run(
            ["docker", "logs", self.name],
            env=self.docker.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=30,
            check=True,
        ).stdout

    def processes(self) -> dict[int, str]:
        """Return the command line of each process in it, by its id on this machine."""
        rows = self.docker.run("top", self.name, "-eo", "pid,args").splitlines()[1:]
        return {int(row.split()[0]): row.split(None, 1)[1] for row in rows}


@contextmanager
def container(
    docker: Docker, image: str, models: Path, cache: str, flags: Sequence[str] = HARDENED, command: Sequence[str] = ()
) -> Iterator[Container]:
    """Run an image until the block ends. `cache`: a volume's name; `command`: in place of the image's."""
    with ExitStack() as stack:
        port = stack.enter_context(reserved_port())
        arguments = ["run", "--detach", f"--publish=127.0.0.1:{port}:8001", f"--volume={cache}:/cache"]
        name = docker.run(*arguments, f"--volume={models}:/models:ro", *flags, image, *command)
        try:
            yield Container(docker, name, f"127.0.0.1:{port}")
        finally:
            docker.run("rm", "--force", name)


@contextmanager
def volume(docker: Docker) -> Iterator[str]:
    """Yield the name of a new volume, which is removed at the end."""
    name = docker.run("volume", "create")
    try:
        yield name
    finally:
        docker.run("volume", "rm", "--force", name)
