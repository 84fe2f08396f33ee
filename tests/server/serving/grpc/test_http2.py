"""Connections of HTTP/2 over time: pings, age, clients that do not read, and memory for messages that are to come."""

import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, DataReceived, PingReceived

from gangway.base.host_limits import MemoryLimit
from gangway.base.memory_budget import MemoryBudget
from gangway.protos import StatusCode
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.descriptors import borrowed_socket, open_descriptors
from gangway.server.errors import RequestError
from gangway.server.options.endpoints import GrpcOptions, KeepaliveOptions
from gangway.server.serving.grpc import call as grpc_call
from gangway.server.serving.grpc import http2
from gangway.server.serving.grpc.call import MessageArrivals
from gangway.server.serving.loop import SLICE_S
from testing.raw_connection import RawConnection
from testing.waiting import until

Start = Callable[[GrpcOptions], Any]
EMPTY = b"\0\0\0\0\0"
LARGE_BYTES = 20 << 20  # more than a stream's window, and than a connection's


def framed(message: bytes) -> bytes:
    return struct.pack(">BI", 0, len(message)) + message


def image() -> bytes:
    request = pb.ModelInferRequest(model_name="image", raw_input_contents=[bytes(602112)])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 3, 224, 224])
    return framed(request.SerializeToString())


def seen(connection: RawConnection, kind: type[Any]) -> list[Any]:
    """Wait for events of a kind."""
    while not (found := [event for event in connection.events if isinstance(event, kind)]):
        connection.read()
    return found


def closes(connection: RawConnection) -> None:
    """Wait until the server has closed the connection."""
    with pytest.raises(ConnectionError):
        while True:
            connection.read()


def test_a_client_that_answers_pings_is_kept(start_front_end: Start) -> None:
    keepalive = KeepaliveOptions(100, 20_000, permit_without_calls=True, max_pings_without_data=0)
    with RawConnection(start_front_end(GrpcOptions(keepalive=keepalive)).url) as connection:
        for _ in range(3):
            assert seen(connection, PingReceived)
            connection.events.clear()
        stream = connection.begin("ServerLive")
        connection.send(stream, EMPTY, end=True)
        assert connection.answer(stream)[0]["grpc-status"] == "0"


def test_a_client_that_answers_no_ping_is_gone(start_front_end: Start) -> None:
    keepalive = KeepaliveOptions(100, 200, permit_without_calls=True)
    address = start_front_end(GrpcOptions(keepalive=keepalive)).url
    host, _, port = address.rpartition(":")
    settings = bytes(3) + b"\4" + bytes(5)
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + settings[:4] + b"\1" + bytes(4))
        with pytest.raises(ConnectionError):  # it is broken off, or has ended
            while connection.recv(1 << 16):
                pass
            raise ConnectionError


def test_nobody_without_calls_is_pinged_unless_that_is_permitted(start_front_end: Start) -> None:
    with RawConnection(start_front_end(GrpcOptions(keepalive=KeepaliveOptions(50, 50))).url) as connection:
        connection.socket.settimeout(0.5)
        with pytest.raises(TimeoutError):
            seen(connection, PingReceived)


def test_old_connections_end_when_their_calls_have(start_front_end: Start) -> None:
    server = start_front_end(GrpcOptions(keepalive=KeepaliveOptions(max_connection_age_ms=500)))
    with RawConnection(server.url) as connection:
        stream = connection.begin("ServerLive")
        (end,) = seen(connection, ConnectionTerminated)
        assert end.error_code == ErrorCodes.NO_ERROR
        # h2 itself takes part in nothing more.
        connection.socket.sendall(bytes([0, 0, 5, 0, 1]) + stream.to_bytes(4) + EMPTY)
        while connection.socket.recv(1 << 16):
            pass


def test_calls_of_old_connections_have_a_time_of_grace(start_front_end: Start) -> None:
    keepalive = KeepaliveOptions(max_connection_age_ms=100, max_connection_age_grace_ms=200)
    with RawConnection(start_front_end(GrpcOptions(keepalive=keepalive)).url) as connection:
        connection.begin("ModelStreamInfer")
        begin_s = time.monotonic()
        closes(connection)
        assert time.monotonic() - begin_s < 10


def is_connected(connection: RawConnection) -> bool:
    """Whether the server, which is in this process, has its end of the connection."""
    ours = connection.socket.getsockname()
    for descriptor in open_descriptors():
        with suppress(OSError), borrowed_socket(descriptor) as end:
            if end.getpeername() == ours:
                return True
    return False


def test_a_client_that_reads_nothing_is_gone(start_front_end: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2, "STALL_S", 0.2)
    monkeypatch.setattr(http2, "BUFFER_BYTES", 1 << 16)
    server = start_front_end(GrpcOptions())
    with RawConnection(server.url) as connection:
        connection.http.increment_flow_control_window((1 << 31) - 1 - 65535)
        until(lambda: is_connected(connection))
        with suppress(ConnectionError):  # it is broken off by then
            for _ in range(30):
                stream = connection.begin("ModelInfer")
                connection.http.increment_flow_control_window(1 << 20, stream)
                connection.send_message(stream, image())
                until(lambda: not server.plane.usage().requests)
        until(lambda: not is_connected(connection))


@pytest.mark.parametrize("slice_s", [SLICE_S, 0.0])
def test_calls_in_one_piece_are_dealt_with_in_turns(
    start_front_end: Start, monkeypatch: pytest.MonkeyPatch, slice_s: float
) -> None:
    """With calls that are given up at once, and others that bring an image."""
    monkeypatch.setattr(http2, "SLICE_S", slice_s)
    message = image()
    with RawConnection(start_front_end(GrpcOptions()).url) as connection:
        while connection.http.outbound_flow_control_window < 1 << 20:
            connection.read()
        streams = []
        for number in range(400):
            stream = connection.begin("ServerLive", flush=False)
            connection.http.send_data(stream, EMPTY, end_stream=True)
            if number % 7 == 3:
                connection.http.reset_stream(stream)
            else:
                streams.append(stream)
        large = connection.begin("ModelInfer", flush=False)
        connection.send(large, message, end=True)
        assert {connection.answer(stream)[0]["grpc-status"] for stream in streams} == {"0"}
        assert len(connection.answer(large)[1]) > len(message) - 100


def test_messages_larger_than_windows(start_front_end: Start) -> None:
    request = pb.ModelInferRequest(model_name="nobody", raw_input_contents=[bytes(LARGE_BYTES)])
    with RawConnection(start_front_end(GrpcOptions()).url) as connection:
        stream = connection.begin("ModelInfer")
        connection.send_message(stream, framed(request.SerializeToString()))
        headers, _ = connection.answer(stream)
    assert (headers["grpc-status"], "'nobody' is not found" in headers["grpc-message"]) == ("5", True)


def test_answers_of_many_streams_share_a_connection(server: Any) -> None:
    with RawConnection(server.url) as connection:
        streams = [connection.begin("ServerMetadata") for _ in range(200)]
        for stream in streams:
            connection.send(stream, EMPTY, end=True)
        while sum(isinstance(event, DataReceived) for event in connection.events) < len(streams):
            connection.read()
        assert {connection.answer(stream)[0]["grpc-status"] for stream in streams} == {"0"}


class Waiting:
    """A call with a long message."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def let_in(self) -> None:
        self.events.append("let in")

    def answer(self, error: RequestError) -> None:
        self.events.append(error.message)


def test_long_messages_come_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    free_bytes = 600 << 20
    budget = MemoryBudget(MemoryLimit(1 << 30, "a test"), lambda: free_bytes)
    arrivals, calls = MessageArrivals(budget), [Waiting() for _ in range(4)]
    entered = [arrivals.enter(call, 100 << 20) for call in calls]  # type: ignore[arg-type]
    assert entered == [True, True, False, False], "for each as it comes and as it is used"
    assert arrivals.waits
    arrivals.leave(calls[0])  # type: ignore[arg-type]
    free_bytes = 500 << 20
    assert [call.events for call in calls] == [[], [], ["let in"], []]
    arrivals.leave(calls[3])  # type: ignore[arg-type]
    assert not arrivals.waits


def test_who_waits_for_memory_for_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = MemoryBudget(MemoryLimit(1 << 30, "a test"), lambda: 600 << 20)
    arrivals, calls = MessageArrivals(budget), [Waiting() for _ in range(3)]
    assert [arrivals.enter(call, 200 << 20) for call in calls] == [True, False, False]  # type: ignore[arg-type]
    monkeypatch.setattr(grpc_call, "MAX_WAIT_S", 0.0)
    arrivals.poll(RequestError(StatusCode.UNAVAILABLE, "memory is full"))
    assert [call.events for call in calls] == [[], ["memory is full"], ["memory is full"]]
    monkeypatch.setattr(grpc_call, "SLOW_S", 0.0)
    late = Waiting()
    assert not arrivals.enter(late, 200 << 20)  # type: ignore[arg-type]
    monkeypatch.setattr(grpc_call, "MAX_WAIT_S", 60.0)
    arrivals.poll(RequestError(StatusCode.UNAVAILABLE, "memory is full"))
    assert late.events == ["let in"], "a slow client has lost its place"
