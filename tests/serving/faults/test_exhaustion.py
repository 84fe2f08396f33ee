"""A server with few descriptors and no further threads: whoever takes them, both protocols tell of health."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
import tritonclient.grpc as triton

from benchmarks.faults.surroundings import Cgroup
from benchmarks.lib.live_server import LiveServer, live_server
from benchmarks.lib.raw_connection import RawConnection
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.serving.grpc.front_end import READY_THREADS
from tests.helpers.http_requests import ask_http
from tests.helpers.whole_server import small_repository, until

OPEN_FILES = 512
MLP = pb.RepositoryModelLoadRequest(model_name="mlp").SerializeToString()
LOAD = b"\0" + len(MLP).to_bytes(4) + MLP  # holds a thread until the model is loaded
SILENT = 400  # to each port: more than it may have
BODY = json.dumps(
    {"inputs": [{"name": n, "shape": [1, 16], "datatype": "INT32", "data": [1] * 16} for n in ("INPUT0", "INPUT1")]}
).encode()


@pytest.fixture(scope="module")
def group() -> Iterator[Cgroup | None]:
    """A cgroup whose processes can be limited; None where there can be none."""
    try:
        made = Cgroup("pids")
    except OSError:
        yield None
        return
    yield made if (made.folder / "pids.max").exists() else None
    made.remove()


@pytest.fixture(scope="module")
def server(group: Cgroup | None, compiled_zoo: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    repository = small_repository(tmp_path_factory.mktemp("models"), compiled_zoo)
    few_files = ["sh", "-c", f'ulimit -n {OPEN_FILES} && exec "$@"', "sh"]
    flags = [f"--cache-dir={compiled_zoo.cache_dir}", "--model-control-mode=explicit", "--load-model=simple"]
    with live_server(repository, flags, prefix=[*(group.prefix if group else ()), *few_files]) as running:
        yield running


def silent(address: str, count: int) -> ExitStack:
    host, _, port = address.rpartition(":")
    connections = ExitStack()
    for _ in range(count):
        connections.enter_context(socket.create_connection((host, int(port)), timeout=20))
    return connections


def lives(server: LiveServer) -> bool:
    """Ask gRPC, over a connection of its own."""
    with triton.InferenceServerClient(server.url) as client:
        try:
            return bool(client.is_server_live(client_timeout=5))
        except triton.InferenceServerException:
            return False


def test_silent_connections_keep_nobody_out(server: LiveServer) -> None:
    pids = server.pids()
    with silent(server.http_url, SILENT), silent(server.url, SILENT):
        assert ask_http(server.http_url, "GET", "/v2/health/live").status == 200
        assert ask_http(server.http_url, "POST", "/v2/models/simple/infer", BODY).status == 200
        begin = time.monotonic()
        until(lambda: lives(server))
        assert time.monotonic() - begin < 5
    assert server.pids() == pids


def test_a_server_without_further_threads_refuses_and_lives(server: LiveServer, group: Cgroup | None) -> None:
    if group is None:
        pytest.skip("no cgroup can be made here")
    pids = server.pids()
    with RawConnection(server.url) as connection, triton.InferenceServerClient(server.url) as client:
        group.write("pids.max", group.read("pids.current"))
        streams = [connection.begin("RepositoryModelLoad") for _ in range(3 * READY_THREADS)]
        for stream in streams:
            connection.send(stream, LOAD, end=True)
        for stream in streams[2 * READY_THREADS :]:
            headers, _ = connection.answer(stream)
            assert headers["grpc-status"] == str(grpc.StatusCode.UNAVAILABLE.value[0])
            assert "no further thread can be started" in headers["grpc-message"]
        assert client.is_server_live() and client.is_model_ready("simple")
        assert ask_http(server.http_url, "GET", "/v2/health/live").status == 200
        assert ask_http(server.http_url, "POST", "/v2/models/simple/infer", BODY).status == 200
        connection.socket.close()
        until(lambda: _metadata_of(client) == "simple")  # the threads that there are suffice
        group.write("pids.max", "max")
        assert _metadata_of(client) == "simple"
    assert server.pids() == pids


def test_workers_without_further_threads_load_and_unload(server: LiveServer, group: Cgroup | None) -> None:
    if group is None:
        pytest.skip("no cgroup can be made here")
    pids = server.pids()
    with triton.InferenceServerClient(server.url) as client:
        group.write("pids.max", int(group.read("pids.current")) + 1)  # a process that looks into the cache
        client.load_model("mlp")
        assert client.is_model_ready("mlp")
        client.unload_model("mlp")
        group.write("pids.max", "max")
    assert server.pids() == pids


def _metadata_of(client: triton.InferenceServerClient) -> str:
    try:
        return str(client.get_model_metadata("simple", client_timeout=5).name)
    except triton.InferenceServerException:
        return ""
