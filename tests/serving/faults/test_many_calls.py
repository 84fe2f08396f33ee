"""A thousand calls at once of methods that wait, over each protocol: none has a thread, and all else is answered."""

import json
import select
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import pytest
import tritonclient.grpc as triton
from google.protobuf.message import Message

from gangway.clients.connection import SERVICE
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.serving.supervisor_calls import MAX_WAITING_CALLS
from testing.live_server import LiveServer, live_server
from testing.load import raw_channel
from testing.processes import command_of, threads_of
from tests.helpers.http_requests import ask_http

pytestmark = pytest.mark.long

CALLS = 1000
TIMEOUT_S = 60
THREADS_AT_MOST = 4
LOOK_S = 0.1
CONFIG = """
backend: "python"
input { name: "x" data_type: TYPE_FP32 dims: [1] }
output { name: "y" data_type: TYPE_FP32 dims: [1] }
"""
SOURCE = """
import os, time
import triton_python_backend_utils as utils

class TritonPythonModel:
    def initialize(self, args):
        while %(waits)r and not os.path.exists(%(go)r):
            time.sleep(0.01)

    def execute(self, requests):
        inputs = [utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [utils.InferenceResponse([utils.Tensor("y", values)]) for values in inputs]
"""
QUICK, WAITS = "quick", "waits"
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}]}


@dataclass(frozen=True)
class Scene:
    """A server with one model that answers and one that is loaded when `go` is there."""

    server: LiveServer
    go: Path

    @property
    def front_end(self) -> int:
        (pid,) = [pid for pid in self.server.pids()["front end"] if "serving.process" in command_of(pid)]
        return pid

    def is_used(self, client: triton.InferenceServerClient) -> None:
        """Health, metrics and inference are answered."""
        assert client.is_server_live(client_timeout=TIMEOUT_S) and client.is_model_ready(QUICK)
        assert ask_http(self.server.http_url, "GET", "/v2/health/live").status == 200
        assert ask_http(self.server.http_url, "POST", f"/v2/models/{QUICK}/infer", BODY).status == 200
        with urlopen(self.server.metrics_url, timeout=TIMEOUT_S) as response:
            assert b"nv_inference_request_success" in response.read()

    def watch(self, calls: "Calls") -> int:
        """Ask for other things as long as the calls wait; return how many threads the front end had at most."""
        most, front_end = 0, self.front_end
        with triton.InferenceServerClient(self.server.url) as client:
            while not calls.are_done():
                self.is_used(client)
                most = max(most, threads_of(front_end))
                if calls.are_sent():
                    self.go.touch()
        return most


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    go = tmp_path / "go"
    for name in (QUICK, WAITS):
        version = tmp_path / "models" / name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(CONFIG)
        (version / "model.py").write_text(SOURCE % {"waits": name == WAITS, "go": str(go)})
    flags = [f"--trace-config=triton,file={tmp_path / 'trace.json'}", f"--cache-dir={tmp_path / 'cache'}"]
    flags += ["--model-control-mode=explicit", f"--load-model={QUICK}"]
    with live_server(tmp_path / "models", flags) as server:
        yield Scene(server, go)


class Calls:
    """Calls that are under way."""

    def are_sent(self) -> bool:
        raise NotImplementedError

    def are_done(self) -> bool:
        """Look for a tenth of a second."""
        raise NotImplementedError


class GrpcCalls(Calls):
    def __init__(self, channel: grpc.Channel, requests: Mapping[str, Sequence[Message]]) -> None:
        self.futures = [
            (name, channel.unary_unary(SERVICE + name).future(request.SerializeToString(), timeout=TIMEOUT_S))
            for name, same in requests.items()
            for request in same
        ]

    def are_sent(self) -> bool:
        return sum(future.done() for _, future in self.futures) >= len(self.futures) - MAX_WAITING_CALLS

    def are_done(self) -> bool:
        left = [future for _, future in self.futures if not future.done()]
        with suppress(grpc.FutureTimeoutError, IndexError):
            left[0].exception(LOOK_S)
        return not left

    def codes(self, name: str) -> Counter[grpc.StatusCode]:
        return Counter(future.code() for called, future in self.futures if called == name)


class HttpCalls(Calls):
    def __init__(self, address: str, requests: Sequence[tuple[str, str, Any]]) -> None:
        host, _, port = address.rpartition(":")
        self.poll, self.waiting, self.said = select.poll(), {}, Counter[tuple[str, bytes]]()
        self.count = len(requests)
        for verb, path, content in requests:
            body = json.dumps(content).encode() if verb == "POST" else b""
            connection = socket.create_connection((host, int(port)), TIMEOUT_S)
            head = f"{verb} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            self.waiting[connection.fileno()] = path, connection
            self.poll.register(connection, select.POLLIN)

    def are_sent(self) -> bool:
        return len(self.waiting) <= MAX_WAITING_CALLS

    def are_done(self) -> bool:
        for descriptor, _ in self.poll.poll(int(1000 * LOOK_S)):
            self.poll.unregister(descriptor)
            path, connection = self.waiting.pop(descriptor)
            self.said[path, connection.recv(12)[-3:]] += 1
            connection.close()
        return not self.waiting


def load_request() -> pb.RepositoryModelLoadRequest:
    return pb.RepositoryModelLoadRequest(model_name=WAITS)


def trace_request(rate: int) -> pb.TraceSettingRequest:
    request = pb.TraceSettingRequest()
    request.settings["trace_level"].value.append("TIMESTAMPS")
    request.settings["trace_rate"].value.append(str(rate + 1))
    return request


def log_request() -> pb.LogSettingsRequest:
    request = pb.LogSettingsRequest()
    request.settings["log_verbose_level"].uint32_param = 0
    return request


def test_methods_that_wait_over_grpc(scene: Scene) -> None:
    each = CALLS // 5
    requests: Mapping[str, Sequence[Message]] = {
        "RepositoryModelLoad": [load_request()] * each,
        "TraceSetting": [trace_request(number) for number in range(each)],
        "LogSettings": [log_request()] * each,
        "ModelStatistics": [pb.ModelStatisticsRequest()] * each,
        "RepositoryIndex": [pb.RepositoryIndexRequest()] * each,
    }
    with raw_channel(scene.server.url) as channel:
        calls = GrpcCalls(channel, requests)
        assert scene.watch(calls) <= THREADS_AT_MOST
        loads = calls.codes("RepositoryModelLoad")
        assert loads == {
            grpc.StatusCode.OK: MAX_WAITING_CALLS,
            grpc.StatusCode.UNAVAILABLE: each - MAX_WAITING_CALLS,
        }
        for name in requests:
            assert name == "RepositoryModelLoad" or calls.codes(name) == {grpc.StatusCode.OK: each}, name


def test_methods_that_wait_over_http(scene: Scene) -> None:
    each = CALLS // 5
    requests: list[tuple[str, str, Any]] = [
        ("POST", f"/v2/repository/models/{WAITS}/load", {}),
        ("POST", "/v2/trace/setting", {"trace_level": ["TIMESTAMPS"], "trace_rate": "7"}),
        ("POST", "/v2/logging", {"log_verbose_level": 0}),
        ("GET", "/v2/models/stats", None),
        ("POST", "/v2/repository/index", {}),
    ]
    calls = HttpCalls(scene.server.http_url, requests * each)
    assert scene.watch(calls) <= THREADS_AT_MOST
    load = requests[0][1]
    assert {path: count for (path, status), count in calls.said.items() if status == b"200"} == {
        load: MAX_WAITING_CALLS,
        **{path: each for _, path, _ in requests[1:]},
    }
    assert calls.said[load, b"503"] == each - MAX_WAITING_CALLS
