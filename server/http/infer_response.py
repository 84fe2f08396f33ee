"""A ModelInferResponse as an HTTP body: JSON, and after it the tensors that are wanted as they are."""

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from gangway.protos import grpc_service_pb2 as pb
from gangway.server.http.infer_request import Wishes
from gangway.server.http.json_text import dump
from gangway.server.http.messages import parameters_of
from gangway.server.http.replies import BINARY, JSON, Reply
from gangway.server.http.tensors import from_raw

MAX_CACHED_HEADS: Final = 1024
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
        self._heads: dict[tuple[bytes, Wishes, tuple[int, ...]], bytes] = {}

    def reply(self, response: bytes, wishes: Wishes) -> Reply:
        """Return the reply to a served request. Raises RequestError if an output cannot be sent as it is wanted."""
        header, request_id, raws = split_response(response)
        key = (header, wishes, tuple(map(len, raws)))
        head = self._heads.get(key)
        if head is not None:
            return _binary_reply(_with_id(head, request_id), raws)
        message = pb.ModelInferResponse.FromString(header)
        outputs = outputs_of(message, raws)
        head = _head(message, outputs, wishes)
        if not any(raw is not None and wishes.wants_binary(tensor.name) for tensor, raw in outputs):
            return Reply(200, (_with_id(head, request_id),), JSON)
        if all(raw is None or wishes.wants_binary(tensor.name) for tensor, raw in outputs) and not message.parameters:
            if len(self._heads) >= MAX_CACHED_HEADS:
                self._heads.clear()
            self._heads[key] = head
        binary = [raw for tensor, raw in outputs if raw is not None and wishes.wants_binary(tensor.name)]
        return _binary_reply(_with_id(head, request_id), binary)


def _binary_reply(head: bytes, tensors: Sequence[memoryview]) -> Reply:
    return Reply(200, (head, *tensors), BINARY, json_bytes=len(head))


def _with_id(head: bytes, request_id: bytes) -> bytes:
    return b'{"id":' + dump(request_id.decode()) + b"," + head[1:] if request_id else head


def _head(message: pb.ModelInferResponse, outputs: Sequence[Output], wishes: Wishes) -> bytes:
    """Return the JSON without the id."""
    content: dict[str, Any] = {"model_name": message.model_name, "model_version": message.model_version}
    if message.parameters:
        content["parameters"] = parameters_of(message.parameters)
    tensors = b",".join(_tensor(output, wishes.wants_binary(output.tensor.name)) for output in outputs)
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
