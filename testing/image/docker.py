"""Docker: the daemon that runs, or one of our own on a private socket, which ends with us."""

import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

STATE_DIR = Path(os.environ.get("GANGWAY_DOCKER_DIR", "/var/lib/gangway-docker"))  # images of our own daemon
BRIDGE_ADDRESS = "172.31.254.1/24"  # of its network: no other daemon's default
START_SECONDS = 30
STOP_SECONDS = 30
BUILD_SECONDS = 900
PACKAGES = "docker.io iptables mmdebstrap"  # Debian's, for a daemon and a base


class DockerMissingError(Exception):
    """No daemon answers, and none can be started; the message says why."""


@dataclass(frozen=True)
class Docker:
    """The command `docker` for one daemon."""

    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def run(self, *arguments: str, seconds: float = 60, check: bool = True) -> str:
        """Return the standard output of a command, without blanks at its end. Raises CalledProcessError."""
        done = subprocess.run(
            ["docker", *arguments], env=self.environment, capture_output=True, text=True, timeout=seconds, check=False
        )
        if check and done.returncode:
            raise subprocess.CalledProcessError(done.returncode, ["docker", *arguments], done.stdout, done.stderr)
        return done.stdout.strip()

    def answers(self) -> bool:
        """Whether there is a daemon."""
        with suppress(OSError, subprocess.SubprocessError):
            return bool(self.run("version", "--format", "{{.Server.Version}}", seconds=10))
        return False

    def build(self, *arguments: str) -> None:
        """Build an image, and say on the terminal how that goes. Raises CalledProcessError."""
        environment = dict(self.environment)
        if subprocess.run(["docker", "buildx", "version"], capture_output=True, check=False).returncode:
            environment["DOCKER_BUILDKIT"] = "0"
        subprocess.run(["docker", "build", *arguments], env=environment, timeout=BUILD_SECONDS, check=True)

    def size_bytes(self, image: str) -> int:
        """Return the size of an image with all its layers."""
        return int(self.run("image", "inspect", "--format", "{{.Size}}", image))


@contextmanager
def docker() -> Iterator[Docker]:
    """Yield the daemon that runs, else one of our own, which ends with the block. Raises DockerMissingError."""
    if shutil.which("docker") is None:
        raise DockerMissingError(f"there is no docker (Debian: apt-get install {PACKAGES})")
    running = Docker()
    if running.answers():
        yield running
        return
    with _own_daemon() as own:
        yield own


@contextmanager
def _own_daemon() -> Iterator[Docker]:
    """Yield a daemon on a private socket, one at a time. Its images stay in STATE_DIR for the next one."""
    if os.geteuid() != 0:
        raise DockerMissingError("no Docker daemon answers, and to start one takes root")
    if missing := [name for name in ("dockerd", "iptables", "setpriv") if shutil.which(name) is None]:
        raise DockerMissingError(f"no Docker daemon answers, and {', '.join(missing)} is missing (Debian: {PACKAGES})")
    STATE_DIR.mkdir(mode=0o711, parents=True, exist_ok=True)
    with (STATE_DIR / "lock").open("w") as lock, tempfile.TemporaryDirectory(prefix="gangway-docker-") as name:
        fcntl.flock(lock, fcntl.LOCK_EX)
        scratch = Path(name)
        host = f"unix://{scratch}/docker.sock"
        command = [
            "setpriv",
            "--pdeathsig=TERM",
            "dockerd",
            f"--host={host}",
            f"--data-root={STATE_DIR}",
            f"--exec-root={scratch}/exec",
        ]
        command += [f"--pidfile={scratch}/pid", f"--bip={BRIDGE_ADDRESS}"]
        own = Docker({**os.environ, "DOCKER_HOST": host})
        with (scratch / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as daemon:
            try:
                deadline = time.monotonic() + START_SECONDS
                while daemon.poll() is None and not own.answers() and time.monotonic() < deadline:
                    time.sleep(0.1)
                if daemon.poll() is not None or not own.answers():
                    last = (scratch / "log").read_text().strip().rpartition("\n")[2]
                    raise DockerMissingError(f"dockerd does not start: {last}")
                yield own
            finally:
                daemon.send_signal(signal.SIGTERM)
                try:
                    daemon.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    daemon.kill()
