"""A `gangway serve` of its own for the check: started, loaded with a mix, and asked for its processes' CPU time."""

import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from google.protobuf import text_format

from gangway.clients.connection import ServerConnection
from gangway.clients.errors import ClientError
from gangway.clients.open_loop import OpenLoopRun, drive
from gangway.clients.perf.prepare import prepare_requests
from gangway.protos import model_config_pb2 as pb
from gangway.workload.arrivals import poisson_for
from gangway.workload.mix import Mix
from gangway.workload.outcomes import Summary, summarise

ADDRESS: Final = "127.0.0.1"
PROC: Final = Path("/proc")
ROLES: Final = {"server": "front ends", "scheduler": "scheduler", "executor": "workers"}  # by room of the module
SERVING: Final = ("front ends", "scheduler", "supervisor")  # what is not computing
START_S: Final = 120.0
STOP_S: Final = 40.0
POLL_S: Final = 0.05
TIMEOUT_S: Final = 30.0
WARM_UP_PART: Final = 0.2  # of a run, sent before what counts
TARGET: Final = "target"


class ServeError(Exception):
    """The server has not come up; the message has the end of its log."""


@dataclass(frozen=True)
class RateRun:
    """A run at a rate. `cpu_us`: of each role of process, and of the client, a request; `seconds` of arrivals."""

    rate_per_s: float
    summary: Summary
    cpu_us: Mapping[str, float]
    queries: int

    @property
    def in_time(self) -> float:
        """The share of the worst model's requests that were answered in time."""
        return self.summary.least_satisfied(TARGET)


@dataclass(frozen=True)
class CheckedServer:
    """A server at `url`, whose supervisor is process `pid`; `requests` by model of the mix."""

    url: str
    pid: int
    mix: Mix
    requests: Mapping[str, bytes]

    def load(self, rate_per_s: float, seconds: float, seed: int) -> RateRun:
        """Send Poisson arrivals at a rate for so long, after a warm-up. Raises ClientError."""
        warm_up_s = WARM_UP_PART * seconds
        arrivals = poisson_for(self.mix, rate_per_s, warm_up_s + seconds, seed)
        before = cpu_ns_by_role(self.pid)
        run: OpenLoopRun = drive(self.url, self.requests, arrivals, TIMEOUT_S)
        after = cpu_ns_by_role(self.pid)
        counted = run.outcomes.since(warm_up_s * 1e6)
        targets_us = [None if model.qos is None else model.qos.resolve_us(None) for model in self.mix.models]
        count = max(1, len(run.outcomes))
        cpu_us = {role: (after[role] - before.get(role, 0)) / count / 1e3 for role in after}
        cpu_us["client"] = run.cpu_s / count * 1e6
        return RateRun(rate_per_s, summarise(counted, {TARGET: targets_us}), cpu_us, len(counted))


@contextmanager
def serving(repository: Path, mix: Mix, cache_dir: Path, cores: str) -> Iterator[CheckedServer]:
    """Serve a mix's models, with its targets, on cores as `--cores` names them, until the block ends.

    `repository`: has the models; the served one links to them. Raises ServeError, ClientError.
    """
    with tempfile.TemporaryDirectory(prefix="gangway-scale-check-") as name, socket.socket() as reserved:
        folder = Path(name)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((ADDRESS, 0))  # nobody else gets this port, and the server, which sets the same option, does
        port = reserved.getsockname()[1]
        _write_repository(folder / "models", repository, mix)
        log, url = folder / "log", f"{ADDRESS}:{port}"
        command = [sys.executable, "-m", "gangway.server.cli", "serve", f"--model-repository={folder}/models"]
        command += [f"--cache-dir={cache_dir}", f"--cores={cores}", f"--grpc-address={ADDRESS}", f"--grpc-port={port}"]
        command += ["--allow-http=false", "--allow-metrics=false", "--no-profile", "--compile-ahead=0"]
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            with ServerConnection(url, TIMEOUT_S) as connection:
                _wait(connection, mix.names, process, log)
                requests = prepare_requests(connection, mix.names, "random", seed=0)
            yield CheckedServer(url, process.pid, mix, requests)
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def cpu_ns_by_role(pid: int) -> dict[str, int]:
    """Return the nanoseconds that a server's living threads have computed, by role of process; `pid`: its supervisor.

    The kernel's schedstat is exact, where stat counts in ticks.
    """
    found: dict[str, int] = dict.fromkeys((*SERVING, "workers"), 0)
    found["supervisor"] = _cpu_ns(pid)
    for child in _descendants(pid):
        module = re.search(rb"-m\0gangway\.(\w+)", _read(PROC / str(child) / "cmdline"))
        if module and (role := ROLES.get(module[1].decode())):
            found[role] += _cpu_ns(child)
    return found


def _descendants(pid: int) -> list[int]:
    children = []
    with suppress(OSError):
        for task in (PROC / str(pid) / "task").iterdir():
            children += [int(child) for child in _read(task / "children").split()]
    return [found for child in children for found in (child, *_descendants(child))]


def _cpu_ns(pid: int) -> int:
    total = 0
    with suppress(OSError):
        for task in (PROC / str(pid) / "task").iterdir():
            total += int((_read(task / "schedstat").split() or [b"0"])[0])
    return total


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has ended
        return b""


def _write_repository(folder: Path, source: Path, mix: Mix) -> None:
    """Write a repository that links to models of another one and has the mix's targets."""
    for model in mix.models:
        config = text_format.Parse((source / model.name / "config.pbtxt").read_text(), pb.ModelConfig())
        if model.qos is not None:
            config.parameters["qos_ms"].string_value = f"{model.qos.resolve_us(None) / 1e3:.3f}"
        (folder / model.name).mkdir(parents=True)
        (folder / model.name / "config.pbtxt").write_text(text_format.MessageToString(config))
        (folder / model.name / "1").symlink_to((source / model.name / "1").resolve())


def _wait(connection: ServerConnection, names: Sequence[str], process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Return when all models are ready. Raises ServeError."""
    deadline = time.monotonic() + START_S
    while True:
        with suppress(ClientError):
            if connection.ready_models() >= {*names}:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            end = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
            raise ServeError(f"the server did not serve all models:\n{end}")
        time.sleep(POLL_S)
