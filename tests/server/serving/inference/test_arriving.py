"""Long requests that come in pieces: their tensors go to shared memory as they come, and all else is as ever."""

import gzip
import struct
import time
from typing import Any

import numpy as np
import pytest

from gangway.protos import grpc_service_pb2 as pb
from gangway.server.serving.grpc.http2 import CONNECTION_WINDOW_BYTES
from testing.raw_connection import RawConnection
from testing.waiting import until

ELEMENTS = 3 * 224 * 224
IMAGE = np.arange(ELEMENTS, dtype=np.float32)
HALF_BYTES = 160_000  # each tensor of `pair` has them


def framed(message: bytes, compressed: bool = False) -> bytes:
    return struct.pack(">BI", compressed, len(message)) + message


def image_request(raw: bytes = IMAGE.tobytes(), **fields: Any) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="image", raw_input_contents=[raw], **fields)
    request.inputs.add(name="x", datatype="FP32", shape=[1, 3, 224, 224])
    return request


def response_of(body: bytes) -> pb.ModelInferResponse:
    return pb.ModelInferResponse.FromString(body[5:])


def requests_in(server: Any) -> int:
    """How many requests have memory."""
    return int(server.plane.usage().requests)


def sent(connection: RawConnection, pieces: list[bytes], metadata: dict[str, str] | None = None) -> tuple[Any, bytes]:
    """Send a message in these pieces, each in a frame of its own; return the answer."""
    stream = connection.begin("ModelInfer", metadata)
    for piece in pieces:
        connection.send_message(stream, piece, end=False)
    connection.send(stream, b"", end=True)
    return connection.answer(stream)


def cut(message: bytes, sizes: list[int]) -> list[bytes]:
    """Cut a message into pieces of these sizes, and the rest."""
    pieces = []
    for size in sizes:
        pieces.append(message[:size])
        message = message[size:]
    return [*pieces, message]


@pytest.mark.parametrize("sizes", [[], [1] * 80, [5], [7, 11, 13, 17], [5, 40], [100, 100_000, 1], [16384] * 36])
def test_pieces_of_any_size(server: Any, sizes: list[int]) -> None:
    message = framed(image_request(id="seven").SerializeToString())
    with RawConnection(server.url) as connection:
        headers, body = sent(connection, cut(message, sizes))
    response = response_of(body)
    assert (headers["grpc-status"], response.id) == ("0", "seven")
    np.testing.assert_array_equal(np.frombuffer(response.raw_output_contents[0], np.float32), IMAGE)


def test_tensors_are_in_shared_memory_as_they_come(server: Any) -> None:
    message = framed(image_request().SerializeToString())
    with RawConnection(server.url) as connection:
        stream = connection.begin("ModelInfer")
        connection.send_message(stream, message[:HALF_BYTES], end=False)
        until(lambda: requests_in(server) == 1)
        other = connection.begin("ModelInfer")  # there is no further place: it is collected
        connection.send_message(other, message[:HALF_BYTES], end=False)
        for each in (other, stream):
            connection.send_message(each, message[HALF_BYTES:])
            headers, body = connection.answer(each)
            assert headers["grpc-status"] == "0"
            np.testing.assert_array_equal(np.frombuffer(response_of(body).raw_output_contents[0], np.float32), IMAGE)
    until(lambda: not requests_in(server))


def test_what_comes_no_more_has_no_memory(server: Any) -> None:
    """And the connection's window is as large as before, whatever was cut off."""
    message = framed(image_request().SerializeToString())
    with RawConnection(server.url) as connection:
        for _ in range(CONNECTION_WINDOW_BYTES // HALF_BYTES + 1):
            stream = connection.begin("ModelInfer")
            connection.send_message(stream, message[:HALF_BYTES], end=False)
            connection.reset(stream)
        while connection.http.outbound_flow_control_window < HALF_BYTES:
            connection.read()
    until(lambda: not requests_in(server))


def others() -> dict[str, tuple[bytes, dict[str, str], str]]:
    """Messages that are to be collected: their bytes, metadata, and a part of the error; "": they are right."""
    plain = image_request().SerializeToString()
    tensor = plain[plain.index(b"\x3a") :]
    head = plain[: -len(tensor)]
    return {
        "tensor first": (framed(tensor + head), {}, ""),
        "compressed": (framed(gzip.compress(plain, 1), True), {"grpc-encoding": "gzip"}, ""),
        "typed": (framed(typed()), {}, ""),
        "too short": (framed(image_request(bytes(400_000)).SerializeToString()), {}, "Expected 602112, got 400000"),
        "too long": (framed(plain + tensor), {}, "expected 1 raw_input_contents but got 2"),
        "cut off": (framed(plain[:-1]), {}, "field 7 has 602112 bytes, but only 602111 follow"),
        "unknown": (framed(plain.replace(b"image", b"egami")), {}, "'egami' is not found"),
        "another id": (framed(plain + b"\x1a\x01x"), {}, ""),
        "two ids": (framed(b"\x1a\x00\x1a\x01x" + plain), {}, "expected one id"),
    }


def typed() -> bytes:
    request = pb.ModelInferRequest(model_name="image")
    tensor = request.inputs.add(name="x", datatype="FP32", shape=[1, 3, 224, 224])
    tensor.contents.fp32_contents.extend(IMAGE)
    return request.SerializeToString()


@pytest.mark.parametrize("kind", others())
def test_other_messages_are_as_ever(server: Any, kind: str) -> None:
    message, metadata, error = others()[kind]
    with RawConnection(server.url) as connection:
        stream = connection.begin("ModelInfer", metadata)
        connection.send_message(stream, message)
        headers, body = connection.answer(stream)
    assert error in headers["grpc-message"]
    assert (headers["grpc-status"] == "0") is (not error)
    if not error:
        np.testing.assert_array_equal(np.frombuffer(response_of(body).raw_output_contents[0], np.float32), IMAGE)
    until(lambda: not requests_in(server))


@pytest.mark.parametrize("kind", ["", "tensor first", "compressed", "typed"])
@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_a_message_that_is_cut_off_by_the_end_of_the_call(server: Any, kind: str, method: str) -> None:
    plain = framed(image_request().SerializeToString())
    message, metadata, _ = others()[kind] if kind else (plain, {}, "")
    with RawConnection(server.url) as connection:
        stream = connection.begin(method, metadata)
        connection.send_message(stream, message[:HALF_BYTES])
        headers, body = connection.answer(stream)
        assert connection.answer(connection.call("ServerLive", b""))[0]["grpc-status"] == "0"
    if method == "ModelInfer":
        assert "requires exactly one request message" in headers["grpc-message"]
    assert not body
    until(lambda: not requests_in(server))


@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("change", [0, 1])
def test_two_tensors(server: Any, order: str, change: int) -> None:
    """Those of other lengths than expected are as long together as they should be."""
    request = pb.ModelInferRequest(model_name="pair")
    for name, size in zip(order, (HALF_BYTES + change, HALF_BYTES - change), strict=True):
        request.inputs.add(name=name, datatype="FP32", shape=[1, HALF_BYTES // 4])
        request.raw_input_contents.append(name.encode() * size)
    with RawConnection(server.url) as connection:
        headers, body = sent(connection, cut(framed(request.SerializeToString()), [16384] * 5))
    if change:
        expected = f"for input '{order[0]}' for model 'pair'. Expected {HALF_BYTES}, got {HALF_BYTES + 1}"
        assert expected in headers["grpc-message"]
    else:
        assert response_of(body).raw_output_contents[0] == b"b" * HALF_BYTES


def test_a_begin_that_comes_in_small_pieces_is_read_a_few_times(server: Any) -> None:
    """Many fields take about as much time as one, which is not read before all of it is there."""
    with RawConnection(server.url) as connection:
        costs_s = []
        for begin in (b"\x12\xff\xff\xff\x01" + bytes(8000), b"\x12\x00" * 4000):
            stream = connection.begin("ModelInfer")
            began_s = time.process_time()
            for piece in cut(struct.pack(">BI", 0, 1 << 20), [5]) + cut(begin, [2] * 4000):
                connection.http.send_data(stream, piece)
            connection.reset(stream)
            connection.answer(connection.call("ServerLive", b""))
            costs_s.append(time.process_time() - began_s)
    assert costs_s[1] < 3 * costs_s[0]
