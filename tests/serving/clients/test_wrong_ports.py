"""Clients at the wrong port are told so, in a way that they show."""

import http.client
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import grpc
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from testing.live_server import LiveServer
from testing.repository import GANGWAY

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"
CALLS = 250  # more than a connection may have


def ports_of(server: LiveServer) -> dict[str, str]:
    return {"http": server.http_url, "metrics": server.metrics_url.split("/")[2], "grpc": server.url}


def both_ports(server: LiveServer) -> str:
    ports = {name: address.rpartition(":")[2] for name, address in ports_of(server).items()}
    return f"HTTP is on port {ports['http']} and gRPC is on port {ports['grpc']}"


@pytest.fixture(params=["http", "metrics"])
def wrong(request: pytest.FixtureRequest, gangway_server: LiveServer) -> str:
    return ports_of(gangway_server)[request.param]


def test_a_client_of_grpc_shows_the_right_port(gangway_server: LiveServer, wrong: str) -> None:
    with triton.InferenceServerClient(wrong) as client:
        for _ in range(CALLS):
            with pytest.raises(InferenceServerException) as refused:
                client.get_model_metadata("mlp", client_timeout=20)
            assert refused.value.status() == "StatusCode.UNIMPLEMENTED"
            assert str(refused.value.message()).endswith(both_ports(gangway_server))


def test_calls_with_large_messages_and_streams_end_too(gangway_server: LiveServer, wrong: str) -> None:
    with grpc.insecure_channel(wrong) as channel:
        large = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError) as refused:
            large(bytes(8 << 20), timeout=20)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined]
        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(iter([b""]), timeout=20)
        with pytest.raises(grpc.RpcError) as ended:
            next(stream)
        assert ended.value.details().endswith(both_ports(gangway_server))  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", [("client", "mlp"), ("perf", "--mix=mlp=1", "--rate=1", "--seconds=1")])
def test_commands_name_the_right_port(gangway_server: LiveServer, wrong: str, command: tuple[str, ...]) -> None:
    ran = subprocess.run([*GANGWAY, *command, "--url", wrong], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 3
    assert both_ports(gangway_server) in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_requests_to_the_port_of_the_metrics_are_told_where_http_is(gangway_server: LiveServer) -> None:
    for method in ("GET", "POST"):
        connection = http.client.HTTPConnection(ports_of(gangway_server)["metrics"], timeout=20)
        connection.request(method, "/v2/models/mlp/infer", b"{}" if method == "POST" else None)
        answer = connection.getresponse()
        assert (answer.status, answer.read().decode().strip().partition(": ")[2]) == (404, both_ports(gangway_server))
        connection.close()


def test_scrapes_of_the_port_of_http_are_told_where_metrics_are(gangway_server: LiveServer) -> None:
    ports = ports_of(gangway_server)
    for method in ("GET", "POST"):
        connection = http.client.HTTPConnection(ports["http"], timeout=20)
        connection.request(method, "/metrics", b"{}" if method == "POST" else None)
        answer = connection.getresponse()
        told = f"Not Found: metrics are on port {ports['metrics'].rpartition(':')[2]}"
        assert (answer.status, json.loads(answer.read())) == (404, {"error": told})
        connection.close()


def test_a_client_of_http_shows_the_right_port(gangway_server: LiveServer) -> None:
    with triton_http.InferenceServerClient(gangway_server.url) as client:
        for _ in range(3):
            with pytest.raises(InferenceServerException) as refused:
                client.get_model_metadata("mlp")
            assert refused.value.status() == "400"
            assert str(refused.value.message()).endswith(both_ports(gangway_server))


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS"])
def test_a_request_of_http1_is_answered_and_closed_by_the_port_of_grpc(gangway_server: LiveServer, method: str) -> None:
    body = bytes(8 << 20) if method == "POST" else b""  # more than a socket holds: all of it is taken
    host, _, port = gangway_server.url.rpartition(":")
    with socket.create_connection((host, int(port)), 20) as connection:
        head = f"{method} /v2/health/ready HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        answer = b"".join(iter(partial(connection.recv, 1 << 16), b""))
    head_of_answer, _, content = answer.partition(b"\r\n\r\n")
    assert head_of_answer.startswith(b"HTTP/1.1 400 ")
    assert f"content-length: {len(content)}".encode() in head_of_answer
    assert json.loads(content)["error"].endswith(both_ports(gangway_server))


@pytest.mark.parametrize(("port", "status"), [("grpc", "415"), ("http", "505"), ("metrics", "505")])
def test_http2_without_grpc_is_told_the_ports(gangway_server: LiveServer, port: str, status: str) -> None:
    address = f"http://{ports_of(gangway_server)[port]}/v2/health/ready"
    command = ["curl", "--silent", "--http2-prior-knowledge", "--write-out", "%{http_code}", address]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    assert ran.stdout.endswith(f"{both_ports(gangway_server)}\n{status}")


def test_who_is_silent_is_told_nothing(gangway_server: LiveServer) -> None:
    """Until it says which protocol it speaks."""
    host, _, port = gangway_server.url.rpartition(":")
    with (
        socket.create_connection((host, int(port)), 20) as silent,
        socket.create_connection((host, int(port)), 20) as other,
    ):
        other.sendall(PREFACE + SETTINGS)
        assert other.recv(9)[3:4] == b"\4"  # settings
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):
            silent.recv(1)


@pytest.mark.parametrize(
    "rest",
    [
        b"",
        SETTINGS,
        SETTINGS[:5],
        SETTINGS + os.urandom(1000),
        b"\xff" * 100_000,
        SETTINGS + b"\0\0\1\1\5\0\0\0\1\xff",  # headers that no decoder takes
        SETTINGS + b"\0\0\4\3\0\0\0\0\1\0\0\0\0",  # the reset of a stream that there is not
        SETTINGS + b"\0\0\x08\6\0\0\0\0\0ABCDEFGH" * 1000,  # pings
    ],
)
def test_hostile_bytes_harm_nobody(gangway_server: LiveServer, wrong: str, rest: bytes) -> None:
    host, _, port = wrong.rpartition(":")
    with socket.create_connection((host, int(port)), 20) as connection:
        connection.sendall(PREFACE + rest)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 16):
            pass
    with triton.InferenceServerClient(gangway_server.url) as client:
        assert client.is_model_ready("mlp")
    ready = http.client.HTTPConnection(gangway_server.http_url, timeout=20)
    ready.request("GET", "/v2/health/ready")
    assert ready.getresponse().status == 200
    ready.close()


class OldServer(BaseHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def another_server() -> Iterator[int]:
    """A server of HTTP that knows nothing of gRPC."""
    with HTTPServer(("127.0.0.1", 0), OldServer) as server:
        Thread(target=server.serve_forever).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


def test_the_client_finds_out_that_another_server_speaks_http() -> None:
    with another_server() as port:
        command = [*GANGWAY, "client", "mlp", "--url", f"127.0.0.1:{port}"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 3
    assert f"127.0.0.1:{port} speaks HTTP/1.1, and this command speaks gRPC" in ran.stderr


def test_the_client_wants_no_scheme() -> None:
    command = [*GANGWAY, "client", "mlp", "--url", "http://localhost:8000"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 2
    assert "got 'http://localhost:8000'; gRPC has no scheme" in ran.stderr


def test_near_names_of_models(gangway_server: LiveServer) -> None:
    command = [*GANGWAY, "client", "mpl", "--url", gangway_server.url]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 1
    assert "NOT_FOUND: Request for unknown model: 'mpl' is not found\n" in ran.stderr  # too far from mlp
    command[-3] = "mlpp"
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "'mlpp' is not found; did you mean 'mlp'?" in ran.stderr
    connection = http.client.HTTPConnection(gangway_server.http_url, timeout=20)
    connection.request("GET", "/v2/models/sinple")
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (
        404,
        b"{\"error\":\"Request for unknown model: 'sinple' is not found; did you mean 'simple'?\"}",
    )
    connection.close()


def test_top_is_told_of_a_port_that_hangs_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def hang_up() -> None:
            for _ in range(2):  # the request, and the question whether TLS is spoken
                peer, _address = listener.accept()
                with peer:
                    peer.recv(1 << 16)

        asked = Thread(target=hang_up)
        asked.start()
        command = [*GANGWAY, "top", f"127.0.0.1:{port}", "--once"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        asked.join()
    assert (ran.returncode, "does not speak HTTP: is it the port of gRPC?" in ran.stderr) == (3, True)
