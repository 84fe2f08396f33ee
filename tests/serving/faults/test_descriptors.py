"""Few descriptors, and many connections that say nothing or half of something: health is answered, all comes back."""

import json
import resource
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton

from gangway.clients.inputs import infer_request
from gangway.server.access import HTTP2_PREFACE
from testing.live_server import LiveServer, live_server
from testing.load import raw_channel, raw_infer
from testing.processes import open_descriptors
from testing.raw_connection import RawConnection
from testing.waiting import until
from tests.conftest import CompiledZoo
from tests.helpers.certificates import Authority
from tests.helpers.http_requests import ask_http
from tests.helpers.own_time import within
from tests.helpers.python_models import write
from tests.helpers.whole_server import all_pids, small_repository

pytestmark = pytest.mark.long

CONNECTIONS = 400
LOOKS = 2
PERIOD_S = 0.3  # the server looks more often
SETTINGS = bytes(3) + b"\4" + bytes(5)  # the frame that a client of HTTP/2 begins with
HALF_A_FRAME = (200).to_bytes(3) + b"\1\4" + (1).to_bytes(4) + b"\x82\x86"
HALF_A_POST = b"POST /v2/models/simple/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{"
HALF_A_HELLO = b"\x16\x03\x01\x02\x00\x01"
IDLERS = {  # by name: whether over HTTP, and what each of them sends
    "silent gRPC": (False, b""),
    "idle gRPC": (False, HTTP2_PREFACE + SETTINGS),
    "half a gRPC call": (False, HTTP2_PREFACE + SETTINGS + HALF_A_FRAME),
    "silent HTTP": (True, b""),
    "half an HTTP head": (True, b"GET /v2/health"),
    "half an HTTP body": (True, HALF_A_POST),
}
NO_FIELDS = bytes(5)  # a message with its prefix
VALUES = np.ones((1, 16), np.int32)
REQUEST = infer_request("simple", "", dict.fromkeys(("INPUT0", "INPUT1"), ("INT32", VALUES))).SerializeToString()
TENSOR = {"shape": [1, 16], "datatype": "INT32", "data": [1] * 16}
BODY = json.dumps({"inputs": [{"name": name, **TENSOR} for name in ("INPUT0", "INPUT1")]}).encode()


def few_files(count: int) -> list[str]:
    return ["sh", "-c", f'ulimit -n {count} && exec "$@"', "sh"]


@pytest.fixture(scope="module")
def repository(compiled_zoo: CompiledZoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_repository(tmp_path_factory.mktemp("models"), compiled_zoo, "simple")


@pytest.fixture(scope="module", params=[256, 1024])
def server(request: pytest.FixtureRequest, compiled_zoo: CompiledZoo, repository: Path) -> Iterator[LiveServer]:
    with live_server(repository, [f"--cache-dir={compiled_zoo.cache_dir}"], prefix=few_files(request.param)) as running:
        yield running


def front_end(server: LiveServer) -> int:
    (pid,) = server.pids()["front end"]
    return pid


def many(address: str, sent: bytes) -> ExitStack:
    """Open connections that send so much and no more; the server may close some at once."""
    host, _, port = address.rpartition(":")
    connections = ExitStack()
    for _ in range(CONNECTIONS):
        connection = connections.enter_context(socket.create_connection((host, int(port)), timeout=20))
        with suppress(ConnectionError):
            connection.sendall(sent)
    return connections


def lives(server: LiveServer) -> None:
    """Ask over a new connection, which is answered within a second."""
    with within(1):
        assert ask_http(server.http_url, "GET", "/v2/health/live").status == 200


def watched(server: LiveServer, ask: Callable[[], object]) -> None:
    """Ask for health while the server looks at its connections several times, and something else in between."""
    end = time.monotonic() + LOOKS * PERIOD_S
    while time.monotonic() < end:
        lives(server)
        ask()
        time.sleep(0.02)


@contextmanager
def asking(server: LiveServer) -> Iterator[Callable[[], None]]:
    """Yield what asks for inference over two connections that stay open."""
    with raw_channel(server.url) as channel, closing(HTTPConnection(server.http_url, timeout=20)) as kept:
        infer = raw_infer(channel)

        def ask() -> None:
            assert infer(REQUEST, timeout=5)
            kept.request("POST", "/v2/models/simple/infer", BODY)
            answer = kept.getresponse()
            assert (answer.status, json.loads(answer.read())["outputs"][0]["data"]) == (200, [2] * 16)

        ask()
        local = kept.sock.getsockname()
        yield ask
        assert kept.sock.getsockname() == local, "the connection has not been replaced"


def is_answered(connection: RawConnection) -> bool:
    """Ask for health over a connection that is there."""
    stream = connection.begin("ServerLive")
    connection.send(stream, NO_FIELDS, end=True)
    return connection.answer(stream)[0]["grpc-status"] == "0"


def test_a_server_without_clients_takes_no_further_descriptors(server: LiveServer) -> None:
    pid = front_end(server)
    lives(server)
    before = open_descriptors(pid)
    watched(server, lambda: None)
    until(lambda: open_descriptors(pid) <= before)


@pytest.mark.parametrize("kind", IDLERS)
def test_idle_connections_keep_nobody_out(server: LiveServer, kind: str) -> None:
    pid = front_end(server)
    over_http, sent = IDLERS[kind]
    with asking(server) as ask:
        before = open_descriptors(pid)
        with many(server.http_url if over_http else server.url, sent):
            watched(server, ask)
        until(lambda: open_descriptors(pid) <= before)
        ask()
    with triton.InferenceServerClient(server.url) as client:
        assert client.is_server_live()
    assert front_end(server) == pid


@pytest.mark.parametrize("kind", [kind for kind, (over_http, _) in IDLERS.items() if not over_http])
def test_a_client_that_is_quiet_while_others_connect_keeps_its_connection(server: LiveServer, kind: str) -> None:
    """Each of the others has said something later than it, and none of them has called."""
    with RawConnection(server.url) as quiet:
        assert is_answered(quiet)
        watched(server, lambda: None)
        with many(server.url, IDLERS[kind][1]):
            watched(server, lambda: None)
            assert is_answered(quiet)


def test_clients_that_have_called_make_room_for_another_one(server: LiveServer) -> None:
    with ExitStack() as stack:
        with suppress(ConnectionError):  # there are as many as there may be
            for _ in range(CONNECTIONS):
                assert is_answered(stack.enter_context(RawConnection(server.url)))
        watched(server, lambda: None)
        with RawConnection(server.url) as late:
            assert is_answered(late)


def test_half_a_tls_handshake_keeps_nobody_out(compiled_zoo: CompiledZoo, repository: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    identity = authority.issue("server")
    flags = [f"--cache-dir={compiled_zoo.cache_dir}", "--grpc-use-ssl=1", f"--grpc-server-cert={identity.certificate}"]
    flags.append(f"--grpc-server-key={identity.key}")
    trusted = grpc.ssl_channel_credentials(authority.root.read_bytes())
    with live_server(repository, flags, trusted, few_files(256)) as server, raw_channel(server.url, trusted) as channel:
        infer = raw_infer(channel)
        pid = front_end(server)
        assert infer(REQUEST, timeout=5)
        before = open_descriptors(pid)
        with many(server.url, HALF_A_HELLO):
            watched(server, lambda: infer(REQUEST, timeout=5))
        until(lambda: open_descriptors(pid) <= before)
        assert front_end(server) == pid


def test_without_any_descriptor_health_is_answered(server: LiveServer) -> None:
    pid = front_end(server)
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    with asking(server) as ask:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (open_descriptors(pid), hard))
        try:
            until(lambda: "descriptors are free" in server.log.read_text())
            watched(server, ask)
            assert ask_http(server.http_url, "GET", "/v2/health/ready").status == 200
            assert ask_http(server.http_url, "POST", "/v2/models/simple/infer", BODY).status == 503
            with urllib.request.urlopen(server.metrics_url, timeout=20) as answer:
                assert answer.status == 200
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
        until(lambda: "descriptors are free again" in server.log.read_text())
    assert server.log.read_text().count("can ask for health only") == 1
    assert ask_http(server.http_url, "POST", "/v2/models/simple/infer", BODY).status == 200
    assert front_end(server) == pid


@pytest.fixture(scope="module")
def explicit(compiled_zoo: CompiledZoo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server that has loaded nothing."""
    repository = small_repository(tmp_path_factory.mktemp("models"), compiled_zoo, "simple")
    write(repository, "adder")
    flags = [f"--cache-dir={compiled_zoo.cache_dir}", "--model-control-mode=explicit"]
    with live_server(repository, flags) as server:
        yield server


@pytest.mark.parametrize("kind", ["compiled", "Python"])
def test_models_that_come_and_go_leave_no_descriptors(explicit: LiveServer, kind: str) -> None:
    adds = infer_request("adder", "", {"x": ("FP32", np.zeros(4, np.float32))}).SerializeToString()
    name, message = ("simple", REQUEST) if kind == "compiled" else ("adder", adds)
    with triton.InferenceServerClient(explicit.url) as client, raw_channel(explicit.url) as channel:
        infer = raw_infer(channel)

        def once() -> None:
            client.load_model(name)
            assert infer(message, timeout=20)
            client.unload_model(name)

        def held() -> int:
            return sum(map(open_descriptors, all_pids(explicit)))

        once()
        first = held()
        for _ in range(2):
            once()
            until(lambda: held() <= first)
