"""A server with few descriptors and no further threads: whoever takes them, both protocols tell of health."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import tritonclient.grpc as triton

from testing.cgroup import Cgroup
from testing.live_server import LiveServer, live_server
from testing.raw_connection import RawConnection
from testing.waiting import until
from tests.helpers.http_requests import ask_http
from tests.helpers.whole_server import small_repository

OPEN_FILES = 512
CALLS = 50
EMPTY = bytes(5)  # a message of gRPC
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


def test_a_server_without_further_threads_serves_all_methods(server: LiveServer, group: Cgroup | None) -> None:
    if group is None:
        pytest.skip("no cgroup can be made here")
    pids = server.pids()
    with RawConnection(server.url) as connection, triton.InferenceServerClient(server.url) as client:
        group.write("pids.max", group.read("pids.current"))
        streams = [connection.begin("RepositoryIndex") for _ in range(CALLS)]
        for stream in streams:
            connection.send(stream, EMPTY, end=True)
        for stream in streams:
            headers, _ = connection.answer(stream)
            assert headers["grpc-status"] == "0"
        assert client.is_server_live() and client.is_model_ready("simple")
        assert client.get_model_metadata("simple").name == "simple"
        assert client.get_inference_statistics().model_stats[0].name == "simple"
        client.update_trace_settings(settings={"trace_rate": "10"})
        client.update_log_settings({"log_verbose_level": 0})
        assert ask_http(server.http_url, "GET", "/v2/health/live").status == 200
        assert ask_http(server.http_url, "GET", "/v2/models/stats").status == 200
        assert ask_http(server.http_url, "POST", "/v2/models/simple/infer", BODY).status == 200
        group.write("pids.max", "max")
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
