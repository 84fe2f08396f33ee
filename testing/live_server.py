"""A real `gangway serve` for a benchmark: started, waited for, looked into, stopped."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from gangway.clients.connection import SERVICE
from gangway.executor.segment import Segment
from gangway.executor.slots import SLOT_BYTES, SlotState, SlotTable
from gangway.protos import grpc_service_pb2 as pb
from testing.load import raw_channel
from testing.processes import command_of, descendants_of
from testing.repository import GANGWAY

ROLES = {"server": "front end", "scheduler": "scheduler", "executor": "worker"}
QUIET = ("--no-profile", "--compile-ahead=0")  # nothing begins in the background
START_TIMEOUT_S = 300  # a cold cache compiles every model first
STOP_TIMEOUT_S = 40
CALL_TIMEOUT_S = 1
POLL_S = 0.02


@dataclass(frozen=True)
class LiveServer:
    """A server that answers at `url` and, over HTTP, at `http_url`; `ready_after_s` is how long its start took."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    ready_after_s: float
    metrics_url: str = ""
    http_url: str = ""

    def pids(self) -> dict[str, list[int]]:
        """Return process ids by role: supervisor, front end, scheduler, worker."""
        found: dict[str, list[int]] = {"supervisor": [self.process.pid], **{role: [] for role in ROLES.values()}}
        for pid in descendants_of(self.process.pid):
            room = re.search(r"-m gangway\.(\w+)", command_of(pid))
            if room and room[1] in ROLES:
                found[ROLES[room[1]]].append(pid)
        return found

    def busy_slots(self, running: bool = False) -> int:
        """Count the request slots that are not free, or only those of requests that have begun."""
        return sum(state is SlotState.RUNNING or not running for state, _ in self._slots())

    def waiting_slots(self) -> int:
        """Count the request slots of requests that have not begun."""
        return sum(state is SlotState.SUBMITTED for state, _ in self._slots())

    def wanted_slots(self) -> int:
        """Count the request slots that are not free and that their front end has not cancelled."""
        return sum(not cancelled for _, cancelled in self._slots())

    def _slots(self) -> list[tuple[SlotState, bool]]:
        """Look into the front ends' shared memory itself: state of each slot in use, and whether it was cancelled."""
        return [slot for front_end in self.pids()["front end"] for slot in _slots_of(front_end)]


def _slots_of(front_end: int) -> list[tuple[SlotState, bool]]:
    given = Path(f"/proc/{front_end}/fd/0").read_text()  # its options
    options = dict(re.findall(r'"(io_fd|slots)":(\d+)', given))
    descriptor = os.open(f"/proc/{front_end}/fd/{options['io_fd']}", os.O_RDWR)
    segment = Segment.attach(descriptor)
    table = SlotTable(segment, int(options["slots"]))
    states = bytes(segment.view[: table.size_bytes : SLOT_BYTES])  # who waits for a state looks every few milliseconds
    in_use = [(slot, state) for slot, state in enumerate(states) if state != SlotState.FREE]
    slots = [(SlotState(state), table.cancelled(slot)) for slot, state in in_use]
    segment.close()
    return slots


@contextmanager
def live_server(
    repository: Path | str,
    flags: Sequence[str] = (),
    credentials: grpc.ChannelCredentials | None = None,
    prefix: Sequence[str] = (),
    cwd: Path | None = None,
    path: str = "",
    python: str = sys.executable,
    quiet: Sequence[str] = QUIET,
) -> Iterator[LiveServer]:
    """Serve a repository on a free port until the block ends; `credentials` if the flags ask for TLS.

    `repository`: a folder, an ONNX file or a URL.
    `prefix`: words before the command, of a program that becomes it.
    `path`: of a Unix socket for gRPC, in place of a port.
    `cwd`: where the server is started; the repository is named relative to it then.
    `python`: whose Gangway it is; of another checkout `cwd` must be that one, and `quiet` those flags that it knows.

    Raises RuntimeError with the log's end if it fails.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        log = stack.enter_context((Path(folder) / "server.log").open("wb"))
        port, metrics_port, http_port = (stack.enter_context(reserved_port()) for _ in range(3))
        address, url = "127.0.0.1", f"unix:{path}" if path else f"127.0.0.1:{port}"
        named = os.path.relpath(repository, cwd) if cwd else repository
        options = [f"--model-repository={named}", f"--grpc-address={url if path else address}", f"--grpc-port={port}"]
        options += [f"--metrics-address={address}", f"--metrics-port={metrics_port}"]
        options += [f"--http-address={address}", f"--http-port={http_port}"]
        options += [*quiet, *flags]
        begin = time.monotonic()
        command = [*prefix, python, *GANGWAY[1:], "serve", *options]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=cwd)
        try:
            wait_until_ready(url, process, Path(log.name), credentials)
            metrics_url = f"http://{address}:{metrics_port}/metrics"
            elapsed_s = time.monotonic() - begin
            yield LiveServer(url, process, Path(log.name), elapsed_s, metrics_url, f"{address}:{http_port}")
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> int:
    """Send SIGTERM, and SIGKILL when that does not help; return the exit status."""
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait(STOP_TIMEOUT_S)


def is_ready(url: str) -> bool:
    """Ask ServerReady over a connection of its own; False also when nobody answers."""
    with grpc.insecure_channel(url) as channel:
        return _is_ready(channel)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with reserved_port() as port:
        return port


@contextmanager
def reserved_port() -> Iterator[int]:
    """Keep a port of this machine for a server that is told to take it, until the block ends.

    Without this somebody else who takes any port, or a client's connection, might get it before the server does. It is
    only bound here, so nobody can connect to it; who sets SO_REUSEADDR, as servers do, can listen on it nevertheless.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def wait_until_ready(
    url: str, process: subprocess.Popen[bytes], log: Path, credentials: grpc.ChannelCredentials | None = None
) -> None:
    """Return as soon as a server is ready. Raises RuntimeError with the log's end when that is not to be expected."""
    deadline = time.monotonic() + START_TIMEOUT_S
    with raw_channel(url, credentials) as channel:
        while not _is_ready(channel):
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with status {process.returncode}:\n{_tail(log)}")
            if _some_model_failed(channel) and not _is_ready(channel):  # some servers are, without all their models
                raise RuntimeError(f"a model did not load:\n{_tail(log)}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"the server is not ready after {START_TIMEOUT_S} s:\n{_tail(log)}")
            time.sleep(POLL_S)


def _is_ready(channel: grpc.Channel) -> bool:
    ready = channel.unary_unary(
        SERVICE + "ServerReady",
        request_serializer=pb.ServerReadyRequest.SerializeToString,
        response_deserializer=pb.ServerReadyResponse.FromString,
    )
    try:
        return bool(ready(pb.ServerReadyRequest(), timeout=CALL_TIMEOUT_S).ready)
    except grpc.RpcError:
        return False


def _some_model_failed(channel: grpc.Channel) -> bool:
    """Say whether every model has been tried, and one of them in vain."""
    index = channel.unary_unary(
        SERVICE + "RepositoryIndex",
        request_serializer=pb.RepositoryIndexRequest.SerializeToString,
        response_deserializer=pb.RepositoryIndexResponse.FromString,
    )
    try:
        states = {model.state for model in index(pb.RepositoryIndexRequest(), timeout=CALL_TIMEOUT_S).models}
    except grpc.RpcError:
        return False
    return "LOADING" not in states and "UNAVAILABLE" in states


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-30:])
