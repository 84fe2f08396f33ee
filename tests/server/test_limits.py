"""Limits that the documentation states and no other test reaches, and HTTP clients that stall: nobody else notices."""

import json
import resource
import socket
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import grpc
import pytest

from gangway.protos import health_pb2
from gangway.server.descriptors import max_connections
from gangway.server.requests.data_plane import Usage
from gangway.server.serving.http import http1
from gangway.server.serving.http import json_text as tensors
from gangway.server.serving.http import site as http_site
from gangway.server.serving.protocol import MAX_WATCHERS

Ask = Callable[..., Any]
INFER = "/v2/models/simple/infer"
STALLED = 60  # many more than there are slots
IMAGE_BYTES = 602112
HEAD = (
    "POST /v2/models/image/infer HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n"
    "inference-header-content-length: {}\r\n\r\n"
)


def simple_request(**more: Any) -> dict[str, Any]:
    tensor = {"shape": [1, 16], "datatype": "INT32", "data": [1] * 16}
    return {"inputs": [{"name": name, **tensor} for name in ("INPUT0", "INPUT1")], **more}


def padded(size_bytes: int) -> bytes:
    text = json.dumps(simple_request()).encode()
    return text + b" " * (size_bytes - len(text))


def test_bodies_of_all_requests_together(http: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_site, "MAX_HELD_BYTES", 1000)
    for _ in range(2):
        refused = http("POST", INFER, padded(1001))
        assert (refused.status, refused.content["error"]) == (503, "too many large requests at once")
        assert http("POST", INFER, padded(1000)).status == 200  # what was refused holds nothing


def test_one_output_as_json(http: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "MAX_OUTPUT_BYTES", 63)
    refused = http("POST", INFER, simple_request())
    assert (refused.status, "output 'OUTPUT0': 64 bytes are too many for JSON" in refused.content["error"]) == (
        400,
        True,
    )
    assert http("POST", INFER, simple_request(parameters={"binary_data_output": True})).status == 200


@pytest.mark.parametrize("kind", ["inputs", "outputs"])
def test_tensors_of_one_request(http: Ask, kind: str) -> None:
    refused = http("POST", INFER, {**simple_request(), kind: [{"name": "x"}] * 1025})
    assert (refused.status, f"1025 {kind} are too many" in refused.content["error"]) == (400, True)


def test_connections_are_as_many_as_descriptors_allow() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
        assert 100 < max_connections() <= 300, "gRPC and HTTP have so many each"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_connection_without_a_request_is_closed(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "IDLE_SECONDS", 0.05)
    host, _, port = server.http_url.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as idle:
        assert idle.recv(1) == b""


def test_watchers_of_the_health(server: Any) -> None:
    with grpc.insecure_channel(server.url) as channel, ExitStack() as stack:
        watch = channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        for _ in range(MAX_WATCHERS):
            call = watch(health_pb2.HealthCheckRequest(), timeout=20)
            stack.callback(call.cancel)
            assert next(call).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            next(watch(health_pb2.HealthCheckRequest(), timeout=20))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert server.client.is_server_ready()


def test_http_clients_that_stall_hold_nobody(server: Any, http: Ask) -> None:
    """Some send half a body, others take no byte of a large answer: none has a thread, a slot or tensors."""
    given = {"name": "x", "shape": [1, 3, 224, 224], "datatype": "FP32"}
    request = {"inputs": [{**given, "parameters": {"binary_data_size": IMAGE_BYTES}}]}
    text = json.dumps({**request, "parameters": {"binary_data_output": True}}).encode()
    head = HEAD.format(len(text) + IMAGE_BYTES, len(text)).encode()
    message = head + text + bytes(IMAGE_BYTES)
    host, _, port = server.http_url.rpartition(":")
    with ExitStack() as stack:
        for number in range(STALLED):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(20)
            client.connect((host, int(port)))
            client.sendall(message if number % 2 else message[: len(message) // 2])
            if number % 2:
                assert client.recv(1) == b"H"  # it is answered, and reads no further
        assert http("POST", INFER, simple_request()).status == 200
        assert server.plane.usage() == Usage(0, 0)
