"""Hostile bytes over HTTP: each is answered or refused, nobody else notices, nothing stays taken."""

import gzip
import json
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gangway.protos import grpc_service_pb2 as pb
from gangway.server.options.endpoints import GrpcOptions
from gangway.server.serving import limits as connection_limit
from gangway.server.serving.http import front_end as http_front_end
from gangway.server.serving.http import http1 as connections
from testing.processes import cpu_ns, memory_of
from testing.waiting import until
from tests.helpers.sampled import sampled

Ask = Callable[..., Any]
GOOD = json.dumps(
    {"inputs": [{"name": n, "shape": [1, 16], "datatype": "INT32", "data": [1] * 16} for n in ("INPUT0", "INPUT1")]}
).encode()
IMAGE = {"name": "x", "shape": [1, 3, 224, 224], "datatype": "FP32"}
HEAD = b"POST /v2/models/simple/infer HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n"
LIVE = b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n"
FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
STATUSES = {200, 400, 404, 413, 415, 431, 501, 503}


@contextmanager
def connected(address: str) -> Iterator[socket.socket]:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        yield connection


def everything(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    pieces = []
    try:
        while piece := connection.recv(1 << 16):
            pieces.append(piece)
    except ConnectionResetError:
        pass  # it closed before it had read all
    return b"".join(pieces)


def one_reply(connection: socket.socket) -> tuple[int, bytes]:
    """The next reply: status and body."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(1 << 16)
        assert piece, data
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while len(body) < size:
        body += connection.recv(1 << 16)
    return int(head.split()[1]), body


@pytest.fixture(scope="module")
def unharmed(gangway_server: Any, live_http: Ask) -> Iterator[Any]:
    """The server; after all that a test has sent it must be as it was."""
    pids = gangway_server.pids()
    yield gangway_server
    assert live_http("POST", "/v2/models/simple/infer", GOOD).content["outputs"][0]["data"] == [2] * 16
    assert gangway_server.pids() == pids
    until(lambda: not gangway_server.busy_slots())


@FUZZ
@given(data=st.one_of(st.binary(max_size=300), st.binary(max_size=200).map(lambda data: HEAD % 5 + data)))
def test_any_bytes(unharmed: Any, data: bytes) -> None:
    with connected(unharmed.http_url) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        reply = everything(connection)
    assert not reply or int(reply.split()[1]) in STATUSES


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(["name", "shape", "datatype", "data", "parameters", "binary_data_size", "x", "id"]),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=20,
)
TENSORS = st.fixed_dictionaries(
    {"name": st.sampled_from(["INPUT0", "INPUT1", "é"]), "shape": st.one_of(st.just([1, 16]), JSON)},
    optional={
        "datatype": st.one_of(st.just("INT32"), JSON),
        "data": st.one_of(st.just([1] * 16), JSON),
        "parameters": st.one_of(st.just({"binary_data_size": 64}), JSON),
    },
)
REQUESTS = st.fixed_dictionaries(
    {"inputs": st.one_of(st.lists(TENSORS, max_size=3), JSON)},
    optional={"outputs": JSON, "parameters": JSON, "id": JSON},
)


@FUZZ
@given(content=REQUESTS, cut=st.integers(0, 400))
@pytest.mark.parametrize("kind", ["infer", "generate"])
def test_any_json(unharmed: Any, live_http: Ask, kind: str, content: Any, cut: int) -> None:
    text = json.dumps(content).encode()
    body = text if cut > 200 else text[: len(text) - cut]
    answer = live_http("POST", f"/v2/models/simple/{kind}", body)
    assert answer.status in STATUSES
    assert answer.status == 200 or answer.content["error"]


@FUZZ
@given(
    headers=st.dictionaries(
        st.sampled_from(
            ["Inference-Header-Content-Length", "Content-Encoding", "Accept-Encoding", "Transfer-Encoding", "Expect"]
        ),
        st.one_of(
            st.sampled_from(
                ["gzip", "deflate", "identity", "chunked", "100-continue", "q=", ";,;", "0", "999999999999"]
            ),
            st.text(st.characters(min_codepoint=33, max_codepoint=255), max_size=30),
        ),
        max_size=3,
    )
)
def test_any_headers(unharmed: Any, headers: dict[str, str]) -> None:
    lines = b"".join(f"{name}: {value}\r\n".encode("latin-1") for name, value in headers.items())
    with connected(unharmed.http_url) as connection:
        connection.sendall(HEAD % len(GOOD) + lines + b"\r\n" + GOOD)
        connection.shutdown(socket.SHUT_WR)
        reply = everything(connection)
    assert not reply or int(reply.split()[1]) in STATUSES | {100}


def test_a_request_has_so_many_headers(unharmed: Any) -> None:
    for count, expected in ((connections.MAX_HEADERS - 2, 200), (connections.MAX_HEADERS, 431)):
        with connected(unharmed.http_url) as connection:
            lines = b"".join(b"x-%d: y\r\n" % number for number in range(count))
            connection.sendall(HEAD % len(GOOD) + lines + b"\r\n" + GOOD)
            status, body = one_reply(connection)
            assert (status, b"more than 256 headers" in body) == (expected, expected == 431)


def test_headers_that_trickle_are_cut_off(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STALL_SECONDS", 0.3)
    with connected(server.http_url) as connection:
        begin = time.monotonic()
        with pytest.raises(OSError):
            for number in range(400):  # no pause is as long as the patience with the whole
                connection.sendall(b"GET /v2 HTTP/1.1\r\n" if number == 0 else b"x-%d: y\r\n" % number)
                time.sleep(0.05)
        assert time.monotonic() - begin < 10


@pytest.mark.parametrize(
    "flood",
    [
        b"GET /v2/" + b"x" * 100_000,
        b"GET /v2 HTTP/1.1\r\n" + b"a: b\r\n" * 20_000,
        b"GET /v2 HTTP/1.1\r\na: " + b"b" * 1_000_000,
        b"POST /v2/models/simple/infer HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 100_000,
    ],
    ids=["path", "headers", "header", "trailers"],
)
def test_floods_of_headers_are_cut_off(unharmed: Any, flood: bytes) -> None:
    with connected(unharmed.http_url) as connection:
        try:
            connection.sendall(flood)
            reply = everything(connection)
        except (ConnectionResetError, BrokenPipeError):
            reply = b""
    assert not reply or int(reply.split()[1]) in {400, 431}


def test_idle_connections_cost_little(unharmed: Any, live_http: Ask) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    (front_end,) = unharmed.pids()["front end"]
    live_http("POST", "/v2/models/simple/infer", GOOD)
    memory = memory_of(front_end).private_bytes
    with ExitStack() as stack:
        idle = [stack.enter_context(connected(unharmed.http_url)) for _ in range(1000)]
        for connection in idle[::2]:
            connection.sendall(LIVE)
        for connection in idle[::2]:
            assert one_reply(connection)[0] == 200
        spent = cpu_ns(front_end)
        time.sleep(0.5)
        assert cpu_ns(front_end) - spent < 25e6  # of 500 ms
        assert memory_of(front_end).private_bytes - memory < 30e6
        assert live_http("POST", "/v2/models/simple/infer", GOOD).status == 200
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


STALLS = [b"", b"GET /v2", HEAD % 10 + b"\r\n", HEAD % 10 + b"\r\n{"]


@pytest.mark.parametrize("begin", STALLS[1:])
def test_clients_that_stall_are_sent_away(server: Any, monkeypatch: pytest.MonkeyPatch, begin: bytes) -> None:
    monkeypatch.setattr(connections, "STALL_SECONDS", 0.1)
    with connected(server.http_url) as connection:
        connection.sendall(begin)
        assert b" 408 " in everything(connection)


def test_a_body_that_trickles_is_cut_off(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STALL_SECONDS", 0.3)
    with connected(server.http_url) as connection:
        connection.sendall(HEAD % 1000 + b"\r\n")
        begin = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - begin < 20:  # no pause is as long as the patience with one
                connection.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() - begin < 10


def test_a_body_has_the_time_that_its_size_takes(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STALL_SECONDS", 0.6)
    monkeypatch.setattr(connections, "MIN_BYTES_PER_SECOND", 1000)
    with connected(server.http_url) as connection:
        text = GOOD + b" " * (2000 - len(GOOD))
        connection.sendall(HEAD % len(text) + b"\r\n")
        for at in range(0, len(text), 200):  # a second in all
            connection.sendall(text[at : at + 200])
            time.sleep(0.1)
        assert one_reply(connection)[0] == 200


def test_an_answer_that_is_not_taken_is_cut_off(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STALL_SECONDS", 0.1)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(20)
        host, _, port = server.http_url.rpartition(":")
        connection.connect((host, int(port)))
        image = json.dumps({"inputs": [{**IMAGE, "data": [0] * 150528}]}).encode()  # answered with as much
        with pytest.raises(ConnectionError):
            for _ in range(50):
                connection.sendall(HEAD.replace(b"simple", b"image") % len(image) + b"\r\n" + image)


@pytest.fixture(scope="module")
def narrow(start_front_end: Callable[[GrpcOptions], Any]) -> str:
    """Where HTTP listens for four connections, and some more for health."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_front_end, "MAX_CONNECTIONS", 4)
        server = start_front_end(GrpcOptions())
    return str(server.http_url)


def status_over(connection: socket.socket, request: bytes = LIVE) -> int:
    connection.sendall(request)
    return one_reply(connection)[0]


def test_the_connection_that_is_silent_for_longest_gives_way(narrow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        used, first, second, third = (stack.enter_context(connected(narrow)) for _ in range(4))
        assert status_over(used) == 200
        fourth, fifth = (stack.enter_context(connected(narrow)) for _ in range(2))
        assert everything(first) == everything(second) == b""
        assert [status_over(each) for each in (used, third, fourth, fifth)] == [200] * 4
        early = stack.enter_context(connected(narrow))
        assert status_over(early, HEAD % len(GOOD) + b"\r\n" + GOOD) == 503, "the others have asked just now"
        monkeypatch.setattr(connection_limit, "IDLE_GRACE_SECONDS", 0.0)
        sixth = stack.enter_context(connected(narrow))
        assert status_over(sixth, HEAD % len(GOOD) + b"\r\n" + GOOD) == 200
        assert everything(used) == b"", "of those that have asked the one that is idle for longest"


def test_a_connection_is_reserved_for_health(narrow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        for _ in range(4):  # whose requests have begun to come
            connection = stack.enter_context(connected(narrow))
            connection.sendall(HEAD % 10 + b"expect: 100-continue\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 100")
        health = stack.enter_context(connected(narrow))
        assert status_over(health) == 200
        assert status_over(health, HEAD % len(GOOD) + b"\r\n" + GOOD) == 503
        assert everything(health) == b""
        again = stack.enter_context(connected(narrow))
        assert status_over(again, b"GET /v2/models/simple/ready HTTP/1.1\r\n\r\n") == 200
        monkeypatch.setattr(connection_limit, "GRACE_SECONDS", -1.0)
        assert status_over(stack.enter_context(connected(narrow)), HEAD % len(GOOD) + b"\r\n" + GOOD) == 200


def test_half_requests_keep_nobody_from_asking_for_health(narrow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limit, "RESERVED", 3)
    with ExitStack() as stack:
        for _ in range(20):
            connection = stack.enter_context(connected(narrow))
            with suppress(ConnectionError):
                connection.sendall(HEAD % 10 + b"expect: 100-continue\r\n\r\n")
                connection.recv(100)
            assert status_over(stack.enter_context(connected(narrow))) == 200


@pytest.mark.parametrize(
    "header", ["Content-Encoding: identity \t", "Inference-Header-Content-Length:\t {} ", "Accept-Encoding: identity "]
)
def test_blanks_around_a_value_are_no_part_of_it(unharmed: Any, header: str) -> None:
    with connected(unharmed.http_url) as connection:
        line = header.format(len(GOOD)).encode() + b"\r\n\r\n"
        assert status_over(connection, HEAD % len(GOOD) + line + GOOD) == 200


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_who_has_closed_the_sending_side_may_wait_for_long(
    server: Any, monkeypatch: pytest.MonkeyPatch, version: bytes
) -> None:
    monkeypatch.setattr(connections, "GONE_SECONDS", 0.02)
    server.scheduler.holding = True
    with connected(server.http_url) as connection:
        connection.sendall(HEAD.replace(b"1.1", version) % len(GOOD) + b"\r\n" + GOOD)
        connection.shutdown(socket.SHUT_WR)
        submitted = server.scheduler.held.get(timeout=10)
        time.sleep(0.2)  # it is found out several times whether the client is there
        server.scheduler.answer(submitted)
        reply = everything(connection)
    assert reply.startswith(b"HTTP/1.1 200 OK\r\n")
    assert reply.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    "coding",
    [b"gzip, chunked", b"identity", b"chunked, chunked", b"chunked\r\ntransfer-encoding: chunked", b"chunked;x=y"],
)
def test_other_transfer_codings_are_refused(unharmed: Any, coding: bytes) -> None:
    """What stands in front may see the request's end elsewhere."""
    with connected(unharmed.http_url) as connection:
        head = b"POST /v2/models/simple/infer HTTP/1.1\r\ntransfer-encoding: " + coding + b"\r\n\r\n"
        connection.sendall(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(GOOD), GOOD) + LIVE)
        reply = everything(connection)
    assert int(reply.split()[1]) in (400, 501)
    assert reply.count(b"HTTP/1.1 ") == 1


def test_inference_needs_no_thread(start_front_end: Callable[[GrpcOptions], Any]) -> None:
    server = start_front_end(GrpcOptions())
    server.scheduler.holding = True
    reported = json.dumps({**json.loads(GOOD), "parameters": {"gangway_stats": True}}).encode()
    request = HEAD % len(reported) + b"\r\n" + reported  # no plain one
    with ExitStack() as stack, server.without_threads():
        running = [stack.enter_context(connected(server.http_url)) for _ in range(4)]
        for connection in running:
            connection.sendall(request)
        for _ in running:
            server.scheduler.answer(server.scheduler.held.get(timeout=10))
        assert [one_reply(connection)[0] for connection in running] == [200] * len(running)


def json_bomb(http: Ask, _url: str) -> None:
    """24 KB that are 16 MiB of JSON, two million objects."""
    body = gzip.compress(b'{"inputs":[' + b'{"a":1},' * (2 << 20) + b"{}]}")
    assert http("POST", "/v2/models/simple/infer", body, {"Content-Encoding": "gzip"}).status == 413


def json_values(http: Ask, _url: str) -> None:
    text = b'{"inputs":[' + b'{"a":1},' * (2 << 20) + b"{}]}"
    assert http("POST", "/v2/models/simple/infer", text).status == 400


def json_image(http: Ask, _url: str) -> None:
    data = np.random.default_rng(0).random(150528).tolist()
    given = {"name": "input", "shape": [1, 3, 224, 224], "datatype": "FP32", "data": data}
    assert http("POST", "/v2/models/mobilenetv2/infer", json.dumps({"inputs": [given]}).encode()).status == 200


def json_rows(http: Ask, _url: str) -> None:
    """Almost 16 MiB of rows of one number each, whose shape must be found."""
    text = b'{"instances":[' + b"[1]," * ((4 << 20) - 16) + b"[1]]}"
    assert http("POST", "/v1/models/mlp:predict", text).status == 400


def typed_numbers(_http: Ask, url: str) -> None:
    """16 MiB of numbers of one byte each, for a model that takes 16."""
    request = pb.ModelInferRequest(model_name="simple")
    tensor = request.inputs.add(name="INPUT0", datatype="INT32", shape=[1, 16])
    tensor.contents.int_contents.extend([1] * (16 << 20))
    with grpc.insecure_channel(url, [("grpc.max_send_message_length", -1)]) as channel:
        infer: Any = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError, match="expected 2 inputs but got 1 inputs"):
            infer(request.SerializeToString(), timeout=20)


@pytest.mark.alone
@pytest.mark.parametrize(
    "send", sampled([json_bomb, json_values, json_image, json_rows, typed_numbers], [json_values, typed_numbers])
)
def test_large_texts_do_not_hold_up_others(unharmed: Any, live_http: Ask, send: Callable[[Ask, str], None]) -> None:
    sender = threading.Thread(target=lambda: [send(live_http, unharmed.url) for _ in range(2)])
    sender.start()
    waits_s = []
    while sender.is_alive():
        begin_s = time.monotonic()
        assert live_http("POST", "/v2/models/simple/infer", GOOD).status == 200
        waits_s.append(time.monotonic() - begin_s)
        time.sleep(0.005)
    sender.join()
    assert sum(wait_s > 0.1 for wait_s in waits_s) <= 2, sorted(waits_s)[-5:]


@pytest.mark.parametrize("name", ["\ud800", "a\udfffb"])
def test_half_a_character_is_answered(http: Ask, name: str) -> None:
    for path, content in (
        ("/v2/models/simple/infer", {"inputs": [], "parameters": {name: 1}}),
        ("/v2/models/simple/generate", {name: 1}),
        ("/v2/models/simple/trace/setting", {name: "1"}),
    ):
        answer = http("POST", path, json.dumps(content).encode())
        assert (answer.status, "the string is not UTF-8" in answer.content["error"]) == (400, True)
