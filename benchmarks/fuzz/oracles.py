"""What must be true of any bytes that a client sends: each function takes some, and raises AssertionError if it is not.

They need no server. Where it can be had, a second opinion decides: protobuf's own parser, Python's `json` with numpy,
zlib. What we accept these accept, too, with equal contents; what we refuse is refused by RequestError or HttpError, and
nothing else is ever raised.
"""

import json
import math
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from benchmarks.fuzz.service import answer, checked_plan
from gangway.artifact.datatypes import DTYPES
from gangway.protos.grpc_service_pb2 import ModelInferRequest
from gangway.server.errors import RequestError
from gangway.server.requests.contents import MalformedRequestError, split_request
from gangway.server.serving.http.infer import HttpRequest, read_request
from gangway.server.serving.http.json_text import from_raw, parse
from gangway.server.serving.http.replies import HttpError, inflate

MAX_INFLATED_BYTES = 1 << 20
STATUSES = {200, 400, 403, 404, 405, 413, 415}
KINDS = sorted({*DTYPES, "BYTES"} - {"FP16"})


def wire(message: bytes) -> None:
    """The walk over a request's bytes agrees with protobuf, and what it leaves can be planned or refused."""
    try:
        header, request_id, raws = split_request(message)
    except MalformedRequestError:
        return
    try:
        expected = ModelInferRequest.FromString(message)
    except DecodeError:
        # What is wrong lies inside another field; the header still contains it.
        with suppress(DecodeError):
            ModelInferRequest.FromString(header)
            raise AssertionError("protobuf refuses the whole, but not what the walk has left of it") from None
        return
    assert [bytes(raw) for raw in raws] == list(expected.raw_input_contents)
    assert request_id.decode() == expected.id
    expected.ClearField("raw_input_contents")
    expected.ClearField("id")
    assert _equal(ModelInferRequest.FromString(header), expected)
    with suppress(RequestError):
        checked_plan(header, raws)


def _equal(one: ModelInferRequest, other: ModelInferRequest) -> bool:
    """Messages with a NaN in them are not equal to themselves; their bytes are."""
    return one == other or one.SerializeToString(deterministic=True) == other.SerializeToString(deterministic=True)


def infer_json(text: bytes) -> None:
    """A request in JSON is understood as Python's `json` and numpy understand it."""
    try:
        request = read_request("simple", "", text)
    except RequestError:
        return
    content = json.loads(text)
    message = ModelInferRequest.FromString(request.header)
    assert request.request_id.decode() == content.get("id", "")
    assert [tensor.name for tensor in message.inputs] == [item["name"] for item in content["inputs"]]
    assert [list(tensor.shape) for tensor in message.inputs] == [item["shape"] for item in content["inputs"]]
    assert [output.name for output in message.outputs] == [item["name"] for item in content.get("outputs", [])]
    _check_contents(request, content["inputs"])
    with suppress(RequestError):
        total_bytes = sum(content for content in request.contents if isinstance(content, int))
        raws = request.raws("simple", memoryview(bytes(min(total_bytes, MAX_INFLATED_BYTES))))
        checked_plan(request.header, raws)


def _check_contents(request: HttpRequest, items: Sequence[Mapping[str, Any]]) -> None:
    contents = iter(request.contents)
    for item in items:
        if "data" in item:
            raw = next(contents)
            assert isinstance(raw, bytes)
            elements = _elements(item["data"])
            assert len(elements) == math.prod(item["shape"])
            assert _same(raw, elements, item["datatype"])
        elif "binary_data_size" in item.get("parameters", {}):
            assert next(contents) == item["parameters"]["binary_data_size"]
    assert next(contents, None) is None


def _elements(data: Any) -> list[Any]:
    return [element for part in data for element in _elements(part)] if isinstance(data, list) else [data]


def _same(raw: bytes, elements: Sequence[Any], datatype: str) -> bool:
    """Whether raw contents are these elements. Zeros may have either sign: JSON's -0 is a whole number to some."""
    if datatype == "BYTES":
        return raw == b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in elements)
    wanted = np.array(elements, DTYPES[datatype])
    return np.array_equal(np.frombuffer(raw, DTYPES[datatype]), wanted, equal_nan=wanted.dtype.kind == "f")


def output_json(data: bytes) -> None:
    """A tensor that is written as JSON is the same when it is read: its kind is the first byte, its contents follow."""
    datatype, raw = KINDS[data[0] % len(KINDS)] if data else "INT8", data[1:]
    if datatype == "BYTES":
        elements = len(_strings(raw) or ())
    else:
        elements = len(raw) // DTYPES[datatype].itemsize
        raw = raw[: elements * DTYPES[datatype].itemsize]
        raw = bytes(byte & 1 for byte in raw) if datatype == "BOOL" else raw
    try:
        text = from_raw(raw, datatype, elements, "output")
    except RequestError:
        assert datatype == "BYTES"
        return
    for read in (json.loads, parse):
        assert _same(raw, read(text), datatype)


def _strings(raw: bytes) -> list[bytes] | None:
    """The strings of BYTES contents; None if they are cut off."""
    found, at = [], 0
    while at < len(raw):
        if len(raw) - at < 4:
            return None
        begin = at + 4
        at = begin + int.from_bytes(raw[at:begin], "little")
        if at > len(raw):
            return None
        found.append(raw[begin:at])
    return found


def inflated(data: bytes) -> None:
    """A compressed body is what zlib makes of it. The first byte chooses how it is compressed."""
    encoding, body = ("gzip", "deflate")[data[0] % 2] if data else "gzip", data[1:]
    try:
        result = inflate(body, encoding, MAX_INFLATED_BYTES)
    except HttpError as error:
        assert error.reply.status in (400, 413)
        return
    assert len(result) <= MAX_INFLATED_BYTES
    windows = (31,) if encoding == "gzip" else (15, -15)
    assert result in [whole for bits in windows if (whole := _whole(body, bits)) is not None]


def _whole(body: bytes, bits: int) -> bytes | None:
    stream = zlib.decompressobj(bits)
    try:
        result = stream.decompress(body)
    except zlib.error:
        return None
    return result if stream.eof and not stream.unused_data else None


def http(data: bytes) -> None:
    """Any request over HTTP is answered, never by an internal error. Its first bytes choose path and headers."""
    reply = answer(data)
    body = b"".join(reply.parts)
    assert reply.status in STATUSES, (reply.status, body[:200])
    if reply.status != 200:
        assert not body or (reply.status == 400 and body.startswith(b'{"ready"')) or json.loads(body)["error"]


ORACLES: Mapping[str, Callable[[bytes], None]] = {
    "wire": wire,
    "json": infer_json,
    "output": output_json,
    "inflate": inflated,
    "http": http,
}
