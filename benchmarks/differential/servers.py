"""Both servers with the same repository, and what they answer to all cases."""

import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.differential.asked import TCP, Case
from benchmarks.differential.clients import Client
from benchmarks.differential.connections import Addresses
from benchmarks.differential.models import Model
from benchmarks.differential.transports import transport
from benchmarks.differential.wire import Answer
from benchmarks.peers.triton_server import triton_serving
from gangway.clients.connection import SERVICE
from gangway.protos import grpc_service_pb2 as pb
from testing.fetch.triton import ROOT
from testing.live_server import live_server, reserved_port

HOST = "127.0.0.1"
LOAD_TIMEOUT_S, POLL_S = 300, 0.1
COMMON = (
    *("--model-control-mode=explicit", "--strict-readiness=false", "--exit-on-error=false"),
    *("--cache-config=local,size=16777216", "--grpc-header-forward-pattern=x-.*", "--http-header-forward-pattern=x-.*"),
)
TRITON = (
    f"--cache-directory={ROOT / 'pytriton' / 'tritonserver' / 'caches'}",
    "--backend-config=python,shm-default-byte-size=1048576",
    "--allow-gpu-metrics=false",
    "--allow-cpu-metrics=false",
    f"--http-address={HOST}",
    f"--metrics-address={HOST}",
)


@contextmanager
def triton(models: Sequence[Model], by: str = TCP) -> Iterator[Addresses]:
    """Serve the models by Triton until the block ends. Raises FetchError, RuntimeError."""
    with ExitStack() as stack:
        reached = stack.enter_context(transport(by))
        repository = stack.enter_context(written(models))
        http, metrics = (stack.enter_context(reserved_port()) for _ in range(2))
        flags = [*COMMON, *TRITON, f"--http-port={http}", f"--metrics-port={metrics}", *_loaded(models)]
        flags += reached.flags
        server = stack.enter_context(triton_serving(repository, flags, reached.credentials, reached.path))
        renamed = {str(repository): "REPOSITORY", str(ROOT): "TRITON", sys.base_prefix: "PYTHON"}
        yield _settled(Addresses(server.url, f"{HOST}:{http}", f"{HOST}:{metrics}", renamed, reached))


@contextmanager
def gangway(models: Sequence[Model], flags: Sequence[str] = (), by: str = TCP) -> Iterator[Addresses]:
    """Serve the models by Gangway until the block ends. Raises FetchError, RuntimeError."""
    with ExitStack() as stack:
        reached = stack.enter_context(transport(by))
        repository = stack.enter_context(written(models))
        flags = [*COMMON, *flags, *reached.flags, *_loaded(models)]
        server = stack.enter_context(live_server(repository, flags, reached.credentials, path=reached.path))
        metrics = server.metrics_url.split("/")[2]
        yield _settled(Addresses(server.url, server.http_url, metrics, {str(repository): "REPOSITORY"}, reached))


def answers(addresses: Addresses, cases: Sequence[Case]) -> dict[str, list[Answer]]:
    """Ask everything, in order; return answers by name of the case."""
    client = Client(addresses)
    try:
        return {case.name: client.ask(case.steps) for case in cases}
    finally:
        client.close()


@contextmanager
def written(models: Sequence[Model]) -> Iterator[Path]:
    """Write a repository, which is removed in the end."""
    with tempfile.TemporaryDirectory(prefix="differential-") as name:
        for model in models:
            model.write(Path(name))
        yield Path(name)


def _loaded(models: Sequence[Model]) -> list[str]:
    return [f"--load-model={model.name}" for model in models]


def _settled(addresses: Addresses) -> Addresses:
    """Return the addresses when no model is being loaded. Raises RuntimeError."""
    end_s = time.monotonic() + LOAD_TIMEOUT_S
    with addresses.channel() as channel:
        index = channel.unary_unary(
            SERVICE + "RepositoryIndex",
            pb.RepositoryIndexRequest.SerializeToString,
            pb.RepositoryIndexResponse.FromString,
        )
        while any(each.state == "LOADING" for each in index(pb.RepositoryIndexRequest()).models):
            if time.monotonic() > end_s:
                raise RuntimeError(f"models are not loaded after {LOAD_TIMEOUT_S} s")
            time.sleep(POLL_S)
    while not _listens(addresses.http_at):  # Triton's HTTP comes after its gRPC
        time.sleep(POLL_S)
    return addresses


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0
