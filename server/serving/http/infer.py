"""Inference over HTTP: requests as JSON with tensors behind it, or as one raw tensor.

A request becomes what `Inference.begin` takes; tensors in the body stay where they are. A response becomes JSON,
and after it the tensors that are wanted as binary data.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import invalid
from gangway.server.models.served import ServedModel
from gangway.server.models.tensors import Tensor, item_bytes
from gangway.server.requests.contents import MAX_ID_BYTES, Raws
from gangway.server.requests.remembered import Remembered
from gangway.server.serving.http.json_text import (
    MAX_INT64,
    MAX_RANK,
    NumberText,
    UnreadTensor,
    dump,
    element_count,
    flatten,
    from_raw,
    kind_of,
    parameters_of,
    parse_object,
    raw_of,
    set_parameters,
    shown,
    string_of,
    utf8,
)
from gangway.server.serving.http.replies import BINARY, JSON, Reply

MAX_CACHED_TEXT_BYTES: Final = 32 << 10  # a longer one most often has tensors in it; to look it up takes time
MAX_INPUTS: Final = 1024  # more than any model has, so that messages name what is wrong

ELEMENT_BYTES: Final = 64  # of JSON for one element, at most, with blanks around it
ROOM_BYTES: Final = 256 * 1024  # for all else: names, ids, parameters

Body = bytes | memoryview


def most_body_bytes(model: ServedModel) -> int | None:
    """Return how many bytes a request's body can have, by the model's inputs; None if they set no bound.

    Generous: each element may be a long number in JSON.
    """
    most_bytes = ROOM_BYTES
    for tensor in model.inputs.values():
        sizes = [model.max_rows if axis == 0 and model.has_rows else size for axis, size in enumerate(tensor.shape)]
        if tensor.datatype == "BYTES" or min(sizes, default=0) < 0:
            return None
        most_bytes += math.prod(sizes) * ELEMENT_BYTES
    return most_bytes


@dataclass(frozen=True)
class BinaryOutputs:
    """Which outputs are wanted as binary data: those named, and the others by default."""

    binary: bool = False
    named: tuple[tuple[str, bool], ...] = ()

    def wants_binary(self, output: str) -> bool:
        """Whether this output is to follow the JSON as it is."""
        return dict(self.named).get(output, self.binary)


@dataclass(frozen=True)
class HttpRequest:
    """What a body says, as JSON or as one raw tensor.

    `contents`: of each input that is sent, its bytes, or how many of them follow the JSON.
    Numbers of a large array are read when the rest of the request has been found right.
    """

    header: bytes  # serialised ModelInferRequest without id and raw contents
    request_id: bytes
    contents: tuple[Body | int | UnreadTensor, ...]
    binary_outputs: BinaryOutputs

    @property
    def cachable(self) -> bool:
        """Whether it holds no tensor."""
        return all(isinstance(content, int) for content in self.contents)

    def raws(self, model: str, binary: memoryview) -> Raws:
        """Return the tensors; `binary` is what follows the JSON. Raises RequestError (INVALID_ARGUMENT)."""
        raws: list[memoryview] = []
        unread: dict[int, UnreadTensor] = {}
        position = 0
        for content in self.contents:
            if isinstance(content, int):
                raws.append(binary[position : position + content])
                position += content
            elif isinstance(content, UnreadTensor):
                unread[len(raws)] = content
                raws.append(binary[:0])
            else:
                raws.append(memoryview(content))
        if position != len(binary):
            invalid(
                f"model '{model}': {len(binary)} bytes follow the JSON, but the inputs' binary_data_size make"
                f" {position}"
            )
        return partial(_with_unread, raws, unread) if unread else raws


def _with_unread(raws: list[memoryview], unread: Mapping[int, UnreadTensor]) -> list[memoryview]:
    return [unread[index].read() if index in unread else raw for index, raw in enumerate(raws)]


class HttpRequests:
    """Reads requests. Those of equal JSON (a client's differ only in their tensors) are understood once."""

    def __init__(self) -> None:
        self._requests: Remembered[tuple[str, str, bytes], HttpRequest] = Remembered()

    def read(self, model: str, version: str, text: memoryview) -> HttpRequest:
        """Return what the JSON says. Raises RequestError (INVALID_ARGUMENT)."""
        if len(text) > MAX_CACHED_TEXT_BYTES:
            return read_request(model, version, text)
        key = (model, version, bytes(text))
        request = self._requests.known.get(key)
        if request is None:
            request = read_request(model, version, text)
            if request.cachable:
                self._requests.add(key, request, len(text))
        return request


def read_request(model: str, version: str, text: Body) -> HttpRequest:
    """Understand the JSON. Raises RequestError (INVALID_ARGUMENT)."""
    content = parse_object(text)
    where = f"request for model '{model}'"
    message = pb.ModelInferRequest(model_name=model, model_version=version)
    parameters = dict(_object(content, "parameters", where))
    binary_output = _flag(parameters, "binary_data_output", where)
    set_parameters(message.parameters, parameters, where)
    contents: list[bytes | int | UnreadTensor] = []
    for item in _array(content, "inputs", where, needed=True):
        contents += _add_input(message, item, model)
    named = [_add_output(message, item, model) for item in _array(content, "outputs", where)]
    binary_outputs = BinaryOutputs(
        bool(binary_output), tuple((name, is_binary) for name, is_binary in named if is_binary is not None)
    )
    header = message.SerializeToString(deterministic=True)
    return HttpRequest(header, _request_id(content, where), tuple(contents), binary_outputs)


def _request_id(content: Mapping[str, Any], where: str) -> bytes:
    request_id = utf8(string_of(content, "id", where), where).encode() if "id" in content else b""
    if len(request_id) > MAX_ID_BYTES:
        invalid(f"{where}: expected an id of at most {MAX_ID_BYTES} bytes")
    return request_id


def _add_input(message: pb.ModelInferRequest, item: Any, model: str) -> list[bytes | int | UnreadTensor]:
    """Add an input; return its contents, if the request has them."""
    if not isinstance(item, dict):
        invalid(f"request for model '{model}': expected an object as input, got {kind_of(item)}")
    name = string_of(item, "name", f"an input of the request for model '{model}'")
    where = f"input '{name}' for model '{model}'"
    shape = _shape(item, where)
    tensor = message.inputs.add(name=name, datatype=string_of(item, "datatype", where), shape=shape)
    parameters = dict(_object(item, "parameters", where))
    size_bytes = parameters.pop("binary_data_size", None)
    set_parameters(tensor.parameters, parameters, where)
    given = [
        "'data'" * ("data" in item),
        "'binary_data_size'" * (size_bytes is not None),
        "'shared_memory_region'" * ("shared_memory_region" in parameters),
    ]
    if sum(map(bool, given)) != 1:
        several = " and ".join(filter(None, given))
        invalid(f"{where}: expected 'data', 'binary_data_size' or 'shared_memory_region', got {several or 'none'}")
    if size_bytes is not None:
        if isinstance(size_bytes, bool) or not isinstance(size_bytes, int) or not 0 <= size_bytes <= MAX_INT64:
            invalid(f"{where}: binary_data_size is {shown(size_bytes)}")
        return [size_bytes]
    return [_data(item["data"], tensor.datatype, math.prod(shape), where)] if "data" in item else []


def _data(data: Any, datatype: str, expected: int, where: str) -> bytes | UnreadTensor:
    if not isinstance(data, list | NumberText):
        invalid(f"{where}: expected an array as 'data', got {kind_of(data)}")
    elements = flatten(data, where)
    if element_count(elements) != expected:
        invalid(f"{where}: expected {expected} elements in 'data' for the shape, got {element_count(elements)}")
    return raw_of(elements, datatype, where)


def _shape(item: Mapping[str, Any], where: str) -> list[int]:
    shape = item.get("shape")
    if isinstance(shape, NumberText):  # thousands of bytes of text
        invalid(f"{where}: expected at most {MAX_RANK} dimensions in 'shape', got {shape.count}")
    if not isinstance(shape, list) or not all(type(size) is int and abs(size) <= MAX_INT64 for size in shape):
        given = shown(shape) if "shape" in item else "nothing"
        invalid(f"{where}: expected an array of numbers as 'shape', got {given}")
    if len(shape) > MAX_RANK:
        invalid(f"{where}: expected at most {MAX_RANK} dimensions in 'shape', got {len(shape)}")
    if min(shape, default=0) < 0:
        invalid(f"{where}: expected sizes of 0 or more in 'shape', got {shown(shape)}")
    return shape


def _add_output(message: pb.ModelInferRequest, item: Any, model: str) -> tuple[str, bool | None]:
    """Add an output; return its name and whether it is wanted as binary data, None if that is not said."""
    if not isinstance(item, dict):
        invalid(f"request for model '{model}': expected an object as output, got {kind_of(item)}")
    name = string_of(item, "name", f"an output of the request for model '{model}'")
    where = f"output '{name}' for model '{model}'"
    parameters = dict(_object(item, "parameters", where))
    binary = _flag(parameters, "binary_data", where)
    set_parameters(message.outputs.add(name=name).parameters, parameters, where)
    return name, binary


def _object(content: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    value = content.get(name, {})
    if not isinstance(value, dict):
        invalid(f"{where}: expected an object as '{name}', got {kind_of(value)}")
    return value


def _array(content: Mapping[str, Any], name: str, where: str, needed: bool = False) -> list[Any]:
    value = content.get(name, None if needed else [])
    if not isinstance(value, list):
        invalid(f"{where}: expected an array as '{name}', got {kind_of(value) if name in content else 'nothing'}")
    if len(value) > MAX_INPUTS:
        invalid(f"{where}: {len(value)} {name} are too many")
    return value


def _flag(parameters: dict[str, Any], name: str, where: str) -> bool | None:
    """Take a parameter that is for HTTP alone out of the others."""
    value = parameters.pop(name, None)
    if value is not None and not isinstance(value, bool):
        invalid(f"{where}: expected a boolean as '{name}', got {kind_of(value)}")
    return value


_ID_TAG: Final = pb.ModelInferResponse.ID_FIELD_NUMBER << 3 | 2
_RAW_TAG: Final = pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER << 3 | 2
_SHARED_MEMORY: Final = "shared_memory_region"


class SplitResponse(NamedTuple):
    """A response in three parts: all other fields, the id (UTF-8), and views of the raw tensors."""

    header: bytes
    request_id: bytes
    raws: list[memoryview]


def split_response(message: bytes) -> SplitResponse:
    """Take a serialised ModelInferResponse apart, one that this process has made. Tensors are not copied."""
    view, end = memoryview(message), len(message)
    header: list[memoryview] = []
    raws: list[memoryview] = []
    request_id = b""
    position = kept = 0
    while position < end:
        start, tag = position, message[position]
        length = shift = 0
        while True:  # every field is length-delimited, with a number below 16
            position += 1
            length |= (message[position] & 0x7F) << shift
            shift += 7
            if message[position] < 0x80:
                break
        content, position = position + 1, position + 1 + length
        if tag in (_RAW_TAG, _ID_TAG):
            header.append(view[kept:start])
            kept = position
            if tag == _RAW_TAG:
                raws.append(view[content:position])
            else:
                request_id = bytes(view[content:position])
    header.append(view[kept:])
    return SplitResponse(b"".join(header), request_id, raws)


class Output(NamedTuple):
    """One output of a response. `raw` is None if it is in shared memory."""

    tensor: pb.ModelInferResponse.InferOutputTensor
    raw: memoryview | None


def outputs_of(message: pb.ModelInferResponse, raws: Sequence[memoryview]) -> list[Output]:
    """Pair the outputs with their contents; those in shared memory may have none, or empty ones."""
    rest = list(raws)
    everyone_has = len(raws) == len(message.outputs)
    outputs = []
    for tensor in message.outputs:
        shared = _SHARED_MEMORY in tensor.parameters
        raw = rest.pop(0) if everyone_has or not shared else None
        outputs.append(Output(tensor, None if shared else raw))
    return outputs


class JsonResponses:
    """Writes responses. What is equal in them, all but ids and tensors, is written once."""

    def __init__(self) -> None:
        self._heads: Remembered[tuple[bytes, BinaryOutputs, tuple[int, ...]], bytes] = Remembered()

    def reply(self, response: bytes, binary_outputs: BinaryOutputs) -> Reply:
        """Return the reply to a served request. Raises RequestError if an output cannot be sent as it is wanted."""
        header, request_id, raws = split_response(response)
        key = (header, binary_outputs, tuple(map(len, raws)))
        head = self._heads.known.get(key)
        if head is not None:
            return _binary_reply(_with_id(head, request_id), raws)
        message = pb.ModelInferResponse.FromString(header)
        outputs = outputs_of(message, raws)
        head = _head(message, outputs, binary_outputs)
        if not any(raw is not None and binary_outputs.wants_binary(tensor.name) for tensor, raw in outputs):
            return Reply(200, (_with_id(head, request_id),), JSON)
        if (
            all(raw is None or binary_outputs.wants_binary(tensor.name) for tensor, raw in outputs)
            and not message.parameters
        ):
            self._heads.add(key, head, len(header) + len(head))
        binary = [raw for tensor, raw in outputs if raw is not None and binary_outputs.wants_binary(tensor.name)]
        return _binary_reply(_with_id(head, request_id), binary)


def _binary_reply(head: bytes, tensors: Sequence[memoryview]) -> Reply:
    return Reply(200, (head, *tensors), BINARY, json_bytes=len(head))


def _with_id(head: bytes, request_id: bytes) -> bytes:
    return b'{"id":' + dump(request_id.decode()) + b"," + head[1:] if request_id else head


def _head(message: pb.ModelInferResponse, outputs: Sequence[Output], binary_outputs: BinaryOutputs) -> bytes:
    """Return the JSON without the id."""
    content: dict[str, Any] = {"model_name": message.model_name, "model_version": message.model_version}
    if message.parameters:
        content["parameters"] = parameters_of(message.parameters)
    tensors = b",".join(_tensor(output, binary_outputs.wants_binary(output.tensor.name)) for output in outputs)
    return dump(content)[:-1] + b',"outputs":[' + tensors + b"]}"


def _tensor(output: Output, binary: bool) -> bytes:
    """Return an output as JSON. Triton's C++ client wants `binary_data_size` wherever there are parameters at all."""
    tensor, raw = output
    shape = list(tensor.shape)
    content: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": shape}
    if raw is not None and binary:
        content["parameters"] = {"binary_data_size": len(raw)}
    if raw is None or binary:
        return dump(content)
    data = from_raw(raw, tensor.datatype, math.prod(shape), f"output '{tensor.name}'")
    return dump(content)[:-1] + b',"data":' + data + b"}"


def deduced_shape(tensor: Tensor, elements: int, where: str, one_row: bool = False) -> list[int]:
    """Return the shape of a tensor of so many elements: the last unknown size follows from them, all others are 1.

    `one_row`: so is the first of all. Raises RequestError (INVALID_ARGUMENT) if there is no such shape.
    """
    shape = list(tensor.shape)
    if shape and shape[0] == -1 and one_row:
        shape[0] = 1
    unknown = [axis for axis, size in enumerate(shape) if size == -1]
    for axis in unknown:
        shape[axis] = 1
    known = math.prod(shape)
    if unknown and known and elements % known == 0:
        shape[unknown[-1]] = elements // known
    if math.prod(shape) != elements:
        invalid(f"{where}: {elements} elements do not make a tensor of {list(tensor.shape)}")
    return shape


_LENGTH: Final = struct.Struct("<I")


def read_raw(model: ServedModel, version: str, body: memoryview) -> HttpRequest:
    """Return the request of a body without JSON: it is the one input of the model, for one row.

    One of BYTES has one element, which is the body. Every output is wanted in the same way. Raises RequestError
    (INVALID_ARGUMENT) if the model has not exactly one input, or none of this size.
    """
    if len(model.inputs) != 1:
        invalid(f"model '{model.name}' has {len(model.inputs)} inputs: a request without JSON is only possible for one")
    (tensor,) = model.inputs.values()
    where = f"input '{tensor.name}' for model '{model.name}'"
    size = item_bytes(tensor.datatype)
    if not size and any(each != 1 for each in tensor.shape[model.max_batch_size > 0 :]):
        invalid(f"For BYTE datatype raw {where}, the model must have input shape [1]")
    shape = deduced_shape(tensor, len(body) // size if size else 1, where, one_row=model.max_batch_size > 0)
    if size and math.prod(shape) * size != len(body):
        invalid(f"{where}: {len(body)} bytes do not make a tensor of {list(tensor.shape)}")
    content = body if size else b"".join((_LENGTH.pack(len(body)), body))
    message = pb.ModelInferRequest(model_name=model.name, model_version=version)
    message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
    return HttpRequest(message.SerializeToString(), b"", (content,), BinaryOutputs(binary=True))
