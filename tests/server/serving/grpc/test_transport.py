"""The gRPC transport of a front end: who is admitted, compression, limits, and clients that stall."""

import socket
import statistics
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, DataReceived, ResponseReceived, StreamEnded, StreamReset, TrailersReceived
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes
from tritonclient.utils import InferenceServerException

from gangway.clients.connection import SERVICE
from gangway.clients.raw_channel import request_headers
from gangway.protos import grpc_service_pb2 as pb
from gangway.protos import health_pb2
from gangway.server.access import CATEGORY_OF_METHOD, HTTP2_PREFACE, Category, Restrictions, parse_restriction
from gangway.server.messages import ModelUnavailable
from gangway.server.options.endpoints import Compression, GrpcOptions
from gangway.server.serving.grpc import call as grpc_call
from gangway.server.serving.grpc import front_end as serving_grpc
from gangway.server.serving.grpc import http2
from gangway.server.serving.grpc.http2 import MAX_STREAMS, TABLE_BYTES
from gangway.server.serving.grpc.messages import MAX_METADATA_BYTES
from testing.raw_connection import RawConnection

Inputs = Callable[..., list[triton.InferInput]]
HEALTH = "/grpc.health.v1.Health/"
MAX_BYTES = 1 << 20
HALF_SENT = 600  # calls of one client
MESSAGE = b"\0\0\0\0\0"
CANCELLED = {"reset", str(grpc.StatusCode.CANCELLED.value[0])}


def infer_message() -> bytes:
    row = np.arange(16, dtype=np.int32).tobytes()
    request = pb.ModelInferRequest(model_name="simple", raw_input_contents=[row, row])
    for name in ("INPUT0", "INPUT1"):
        request.inputs.add(name=name, datatype="INT32", shape=[1, 16])
    return request.SerializeToString()


def framed(message: bytes, compressed: bool = False) -> bytes:
    return struct.pack(">BI", compressed, len(message)) + message


# --- restricted protocols


@pytest.fixture(scope="module")
def restricted(start_front_end: Any) -> Any:
    """Inference wants one key, all other categories another one."""
    others = ",".join(category for category in Category if category is not Category.INFERENCE)
    groups = ("inference:infer-key=s3cret", f"{others}:Other-Key=0ther")
    return start_front_end(GrpcOptions(restrictions=Restrictions(tuple(map(parse_restriction, groups)))))


def method_of(channel: grpc.Channel, name: str) -> Any:
    """A method on bytes that reads all answers."""
    path = HEALTH + name if name in ("Check", "Watch") else SERVICE + name
    if name == "ModelStreamInfer":
        streaming = channel.stream_stream(path)
        return lambda metadata: list(streaming(iter([b""]), metadata=metadata, timeout=10))
    if name == "Watch":
        watching = channel.unary_stream(path)
        return lambda metadata: next(watching(b"", metadata=metadata, timeout=10))
    unary = channel.unary_unary(path)
    return lambda metadata: unary(b"", metadata=metadata, timeout=10)


@pytest.mark.parametrize("name", CATEGORY_OF_METHOD)
def test_every_method_is_restricted(restricted: Any, name: str) -> None:
    key, value = ("infer-key", "s3cret") if "Infer" in name else ("other-key", "0ther")
    key = f"triton-grpc-protocol-{key}"
    with grpc.insecure_channel(restricted.url) as channel:
        call = method_of(channel, name)
        for metadata in ((), ((key, "wrong"),), ((key, value[:-1]),), ((key[len("triton-grpc-") :], value),)):
            with pytest.raises(grpc.RpcError) as refused:
                call(metadata)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert refused.value.details() == f"This protocol is restricted, expecting header '{key}'"
        try:
            call(((key, value),))
        except grpc.RpcError as error:
            assert "restricted" not in error.details()  # an empty message, or a method that is not served


# --- compression


@pytest.fixture(scope="module")
def compressing(start_front_end: Any) -> Any:
    return start_front_end(GrpcOptions(compression=Compression.HIGH, max_message_bytes=MAX_BYTES))


def test_a_bomb_costs_no_more_than_a_message(compressing: Any) -> None:
    compressor = zlib.compressobj(1)
    bomb = b"".join(compressor.compress(bytes(1 << 20)) for _ in range(128)) + compressor.flush()
    assert len(bomb) < MAX_BYTES
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before_bytes = memory_bytes("VmRSS")
    headers, _ = call(compressing.url, bomb, {"grpc-encoding": "deflate"}, compressed=True)
    assert headers["grpc-status"] == str(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
    assert memory_bytes("VmHWM") - before_bytes < 32 << 20


def memory_bytes(field: str) -> int:
    """Resident memory of this process, now or at most."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def call(
    address: str, message: bytes, metadata: dict[str, str], compressed: bool = False
) -> tuple[dict[str, str], bytes]:
    """One ModelInfer, seen from the wire."""
    with RawConnection(address) as connection:
        stream = connection.begin("ModelInfer", metadata)
        connection.send_message(stream, framed(message, compressed))
        return connection.answer(stream)


# --- limits


def test_too_much_metadata(server: Any, simple_inputs: Inputs) -> None:
    server.client.infer("simple", simple_inputs(), headers={"baggage": "x" * 12_000})
    with pytest.raises(InferenceServerException, match="RESOURCE_EXHAUSTED"):
        server.client.infer("simple", simple_inputs(), headers={"baggage": "x" * 20_000})
    server.client.infer("simple", simple_inputs())


def test_metadata_count_as_they_are_unpacked(server: Any) -> None:
    with RawConnection(server.url) as connection:
        statuses = [
            status_of(connection, [(b"x-part", b"a" * 3000)] * parts) for parts in (1, 4, 10)
        ]  # of each all but the first are references
        assert statuses == ["0", "0", str(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])]
        assert status_of(connection, []) == "0", "the connection serves on"


def status_of(connection: RawConnection, metadata: list[tuple[bytes, bytes]]) -> str:
    stream = connection.http.get_next_available_stream_id()
    headers = [*request_headers("localhost", SERVICE + "ServerLive", 10), *metadata]
    connection.http.send_headers(stream, headers)
    connection.send(stream, framed(b""), end=True)
    return connection.answer(stream)[0]["grpc-status"]


def test_clients_that_go_at_once_are_no_fault(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Their connection is lost while its answers are about to be sent."""
    for size in range(100):
        with RawConnection(server.url) as connection:
            for _ in range(5):
                stream = connection.begin("ServerLive")
                connection.send(stream, framed(b"")[: size % 6], end=bool(size % 2))
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with RawConnection(server.url) as connection:
        assert status_of(connection, []) == "0"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_bounds_that_the_server_announces(server: Any) -> None:
    with RawConnection(server.url) as connection:
        connection.http.update_settings({SettingCodes.HEADER_TABLE_SIZE: 1 << 20})
        assert status_of(connection, []) == "0"
        settings = connection.http.remote_settings
        assert settings.max_concurrent_streams == MAX_STREAMS
        assert settings.max_header_list_size == MAX_METADATA_BYTES
        assert settings.header_table_size == TABLE_BYTES
        assert connection.http.decoder.header_table_size <= TABLE_BYTES, "the server uses no more, whatever it may"


def test_a_larger_table_of_headers_is_refused(server: Any, simple_inputs: Inputs) -> None:
    with RawConnection(server.url) as connection:
        assert status_of(connection, []) == "0"
        connection.http.encoder.header_table_size = 2 * TABLE_BYTES
        with pytest.raises((ConnectionError, ProtocolError)):  # the tables of both sides differ: nothing can follow
            status_of(connection, [])
        (end,) = (event for event in connection.events if isinstance(event, ConnectionTerminated))
        assert end.error_code == ErrorCodes.COMPRESSION_ERROR
    server.client.infer("simple", simple_inputs())


def test_pings_without_calls_end_the_connection(server: Any, simple_inputs: Inputs) -> None:
    with RawConnection(server.url) as connection:
        assert status_of(connection, []) == "0"
        with pytest.raises((ConnectionError, ProtocolError)):  # by whichever is seen first
            for number in range(20):
                connection.http.ping(number.to_bytes(8))
                connection.socket.sendall(connection.http.data_to_send())
                connection.read()
        (end,) = (event for event in connection.events if isinstance(event, ConnectionTerminated))
        assert (end.error_code, end.additional_data) == (ErrorCodes.ENHANCE_YOUR_CALM, b"too_many_pings")
    server.client.infer("simple", simple_inputs())


def test_pings_while_an_answer_arrives_are_as_many_as_the_client_likes(server: Any) -> None:
    """Clients of grpcio ping while they read, to find out how much may be on the way."""
    part = 8
    with RawConnection(server.url, window_bytes=part) as connection:
        stream = connection.begin("ModelInfer")
        connection.send_message(stream, framed(infer_message()))
        received = pings = 0
        while True:
            connection.read()
            if any(isinstance(event, TrailersReceived) for event in connection.events):
                break
            came = sum(len(event.data or b"") for event in connection.events if isinstance(event, DataReceived))
            if came > received:
                received, pings = came, pings + 1
                connection.http.increment_flow_control_window(part, stream)
                connection.http.ping(pings.to_bytes(8))
                connection.socket.sendall(connection.http.data_to_send())
        assert pings > 10


def test_who_does_not_acknowledge_settings_is_sent_away(
    start_front_end: Callable[[GrpcOptions], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2, "SETTINGS_TIMEOUT_S", 0.2)
    host, _, port = start_front_end(GrpcOptions()).url.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(HTTP2_PREFACE + bytes(3) + b"\4" + bytes(5))
        while connection.recv(1 << 16):
            pass


# --- clients that stall


def latency_ms(server: Any, inputs: list[triton.InferInput], count: int = 100) -> float:
    times = []
    for _ in range(count):
        begin = time.monotonic()
        server.client.infer("simple", inputs, client_timeout=10)
        times.append(time.monotonic() - begin)
    return statistics.median(times) * 1e3


@pytest.fixture
def half_sent(server: Any) -> Iterator[None]:
    """Some hundred calls of which half a message has come."""
    half = framed(infer_message())[:50]
    with RawConnection(server.url) as connection:
        for _ in range(HALF_SENT):
            connection.send(connection.begin("ModelInfer"), half)
        yield


@pytest.fixture
def answers_unread(server: Any) -> Iterator[None]:
    """More calls than there are slots whose client takes no byte of the answer."""
    with RawConnection(server.url, window_bytes=0) as connection:
        calls = 5 * server.plane.slots.slots
        for _ in range(calls):
            connection.send(connection.begin("ModelInfer"), framed(infer_message()), end=True)
        while sum(isinstance(event, ResponseReceived) for event in connection.events) < calls:
            connection.read()  # the headers of an answer are sent in spite of all
        yield


def test_stalled_clients_do_not_hurt_the_others(
    server: Any, simple_inputs: Inputs, request: pytest.FixtureRequest
) -> None:
    alone_ms = latency_ms(server, simple_inputs())
    request.getfixturevalue("half_sent")
    request.getfixturevalue("answers_unread")
    assert latency_ms(server, simple_inputs()) < 2 * alone_ms + 50  # who is held up waits for seconds
    assert server.client.is_server_ready()


def test_an_early_answer_is_not_followed_by_a_reset_at_once(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node's gRPC loses the status if a reset comes with it, so the client may end the call first."""
    monkeypatch.setattr(http2, "RESET_S", 0.2)
    with RawConnection(server.url) as connection:
        stream = connection.begin("ModelInfer")
        connection.send(stream, framed(bytes(server.max_message_bytes + 1))[:100])
        while not any(isinstance(event, StreamEnded) for event in connection.events):
            connection.read()
        answered_s = time.monotonic()
        assert not any(isinstance(event, StreamReset) for event in connection.events)
        while not (resets := [event for event in connection.events if isinstance(event, StreamReset)]):
            connection.read()
        assert time.monotonic() - answered_s > 0.1
        assert [(event.stream_id, event.error_code) for event in resets] == [(stream, ErrorCodes.NO_ERROR)]


def ends(connection: RawConnection, count: int) -> dict[int, str]:
    """Wait until so many calls have ended, whichever; return how: a status, or "reset"."""
    found: dict[int, str] = {}
    while True:
        for event in connection.events:
            if isinstance(event, StreamReset):
                found[event.stream_id] = "reset"
            elif isinstance(event, (ResponseReceived, TrailersReceived)):  # a status stands in the last headers
                headers = dict(event.headers or ())
                if b"grpc-status" in headers:
                    found.setdefault(event.stream_id, headers[b"grpc-status"].decode())
        if len(found) >= count:
            return found
        connection.read()


def test_too_many_half_sent_calls_give_way(start_front_end: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_grpc, "MAX_ARRIVING", 2)
    monkeypatch.setattr(serving_grpc, "GRACE_S", 0.1)
    address = start_front_end(GrpcOptions()).url
    with RawConnection(address) as stalled, RawConnection(address) as other:
        for stream in [stalled.begin("ModelInfer") for _ in range(5)]:
            stalled.send(stream, MESSAGE[:-1])
        assert status_of(other, []) == "0"
        assert set(ends(stalled, 3).values()) <= CANCELLED


def test_unread_answers_give_way(start_front_end: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_grpc, "MAX_UNREAD_BYTES", 100)
    monkeypatch.setattr(serving_grpc, "GRACE_S", 0.1)
    monkeypatch.setattr(grpc_call, "LARGE_ANSWER_BYTES", 1)
    address = start_front_end(GrpcOptions()).url
    with RawConnection(address, window_bytes=0) as connection:
        for stream in [connection.begin("ServerMetadata") for _ in range(4)]:
            connection.send(stream, MESSAGE, end=True)
        assert set(ends(connection, 4).values()) <= CANCELLED
        assert not [event for event in connection.events if isinstance(event, DataReceived)]


def test_answers_come_as_the_client_makes_room(server: Any) -> None:
    with RawConnection(server.url, window_bytes=10) as connection:
        stream = connection.begin("ServerMetadata")
        connection.send(stream, MESSAGE, end=True)
        while not (came := [event for event in connection.events if isinstance(event, DataReceived)]):
            connection.read()
        assert [len(event.data or b"") for event in came] == [10]
        connection.http.increment_flow_control_window(1000, stream)
        connection.socket.sendall(connection.http.data_to_send())
        headers, body = connection.answer(stream)
    assert headers["grpc-status"] == "0"
    assert pb.ServerMetadataResponse.FromString(body[5:]).name == "gangway"


# --- health


def test_watch_tells_every_change(start_front_end: Any) -> None:
    server = start_front_end(GrpcOptions())
    request = health_pb2.HealthCheckRequest().SerializeToString()
    with grpc.insecure_channel(server.url) as channel:
        watching = channel.unary_stream(HEALTH + "Watch")(request, timeout=30)
        statuses = (health_pb2.HealthCheckResponse.FromString(answer).status for answer in watching)
        assert next(statuses) == health_pb2.HealthCheckResponse.SERVING
        server.front_end.handle(ModelUnavailable("broken", 1, "test"))
        assert next(statuses) == health_pb2.HealthCheckResponse.NOT_SERVING
        watching.cancel()
        unknown = health_pb2.HealthCheckRequest(service="nobody").SerializeToString()
        answer = next(channel.unary_stream(HEALTH + "Watch")(unknown, timeout=10))
        assert health_pb2.HealthCheckResponse.FromString(answer).status == 3  # SERVICE_UNKNOWN
        with pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary(HEALTH + "Check")(unknown, timeout=10)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
