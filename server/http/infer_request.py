"""The body of an inference request: JSON, and after it the tensors that are sent as they are.

Becomes what `Inference.infer_parts` takes. Tensors in the body stay where they are.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import invalid
from gangway.server.http.json_numbers import Numbers
from gangway.server.http.json_text import kind_of, parse_object, shown
from gangway.server.http.messages import MAX_INT64, set_parameters, string_of, utf8
from gangway.server.http.tensors import MAX_RANK, LateTensor, count_of, flatten, raw_of
from gangway.server.models import ServedModel
from gangway.server.wire import MAX_ID_BYTES, Raws

MAX_CACHED_REQUESTS: Final = 1024
MAX_CACHED_TEXT_BYTES: Final = 4096
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
        sizes = [model.max_rows if axis == 0 and model.batched else size for axis, size in enumerate(tensor.shape)]
        if tensor.datatype == "BYTES" or min(sizes, default=0) < 0:
            return None
        most_bytes += math.prod(sizes) * ELEMENT_BYTES
    return most_bytes


@dataclass(frozen=True)
class Wishes:
    """Which outputs are wanted as binary data: those named, and the others by default."""

    binary: bool = False
    named: tuple[tuple[str, bool], ...] = ()

    def wants_binary(self, output: str) -> bool:
        """Whether this output is to follow the JSON as it is."""
        return dict(self.named).get(output, self.binary)


@dataclass(frozen=True)
class JsonRequest:
    """What the JSON says. `contents`: of each input that is sent, its bytes, or how many of them follow the JSON.

    Numbers of a large array are read when the rest of the request has been found right.
    """

    header: bytes  # serialised ModelInferRequest without id and raw contents
    request_id: bytes
    contents: tuple[bytes | int | LateTensor, ...]
    wishes: Wishes

    @property
    def cachable(self) -> bool:
        """Whether it holds no tensor."""
        return all(isinstance(content, int) for content in self.contents)

    def raws(self, model: str, binary: memoryview) -> Raws:
        """Return the tensors; `binary` is what follows the JSON. Raises RequestError (INVALID_ARGUMENT)."""
        raws: list[memoryview] = []
        late: dict[int, LateTensor] = {}
        position = 0
        for content in self.contents:
            if isinstance(content, int):
                raws.append(binary[position : position + content])
                position += content
            elif isinstance(content, LateTensor):
                late[len(raws)] = content
                raws.append(binary[:0])
            else:
                raws.append(memoryview(content))
        if position != len(binary):
            invalid(
                f"model '{model}': {len(binary)} bytes follow the JSON, but the inputs' binary_data_size make"
                f" {position}"
            )
        return partial(_read_late, raws, late) if late else raws


def _read_late(raws: list[memoryview], late: Mapping[int, LateTensor]) -> list[memoryview]:
    return [late[index].read() if index in late else raw for index, raw in enumerate(raws)]


class JsonRequests:
    """Reads requests. Those of equal JSON (a client's differ only in their tensors) are understood once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str, bytes], JsonRequest] = {}

    def read(self, model: str, version: str, text: memoryview) -> JsonRequest:
        """Return what the JSON says. Raises RequestError (INVALID_ARGUMENT)."""
        if len(text) > MAX_CACHED_TEXT_BYTES:
            return read_request(model, version, text)
        key = (model, version, bytes(text))
        request = self._known.get(key)
        if request is None:
            request = read_request(model, version, text)
            if request.cachable:
                if len(self._known) >= MAX_CACHED_REQUESTS:
                    self._known.clear()
                self._known[key] = request
        return request


def read_request(model: str, version: str, text: Body) -> JsonRequest:
    """Understand the JSON. Raises RequestError (INVALID_ARGUMENT)."""
    content = parse_object(text)
    where = f"request for model '{model}'"
    message = pb.ModelInferRequest(model_name=model, model_version=version)
    parameters = dict(_object(content, "parameters", where))
    binary_output = _flag(parameters, "binary_data_output", where)
    set_parameters(message.parameters, parameters, where)
    contents: list[bytes | int | LateTensor] = []
    for item in _array(content, "inputs", where, needed=True):
        contents += _add_input(message, item, model)
    named = [_add_output(message, item, model) for item in _array(content, "outputs", where)]
    wishes = Wishes(bool(binary_output), tuple((name, wish) for name, wish in named if wish is not None))
    header = message.SerializeToString(deterministic=True)
    return JsonRequest(header, _request_id(content, where), tuple(contents), wishes)


def _request_id(content: Mapping[str, Any], where: str) -> bytes:
    request_id = utf8(string_of(content, "id", where), where).encode() if "id" in content else b""
    if len(request_id) > MAX_ID_BYTES:
        invalid(f"{where}: expected an id of at most {MAX_ID_BYTES} bytes")
    return request_id


def _add_input(message: pb.ModelInferRequest, item: Any, model: str) -> list[bytes | int | LateTensor]:
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


def _data(data: Any, datatype: str, expected: int, where: str) -> bytes | LateTensor:
    if not isinstance(data, list | Numbers):
        invalid(f"{where}: expected an array as 'data', got {kind_of(data)}")
    elements = flatten(data, where)
    if count_of(elements) != expected:
        invalid(f"{where}: expected {expected} elements in 'data' for the shape, got {count_of(elements)}")
    return raw_of(elements, datatype, where)


def _shape(item: Mapping[str, Any], where: str) -> list[int]:
    shape = item.get("shape")
    if isinstance(shape, Numbers):  # thousands of bytes of text
        invalid(f"{where}: expected at most {MAX_RANK} dimensions in 'shape', got {shape.count}")
    if not isinstance(shape, list) or not all(type(size) is int and abs(size) <= MAX_INT64 for size in shape):
        invalid(f"{where}: expected an array of numbers as 'shape', got {shown(shape)}")
    if len(shape) > MAX_RANK:
        invalid(f"{where}: expected at most {MAX_RANK} dimensions in 'shape', got {len(shape)}")
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
