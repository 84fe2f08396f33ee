"""Triton's generate extension: JSON objects whose members are tensors and parameters, and server-sent events of them.

A model answers `generate` once, and `generate_stream` any number of times: each response is an event, and so is an
error that comes after the first of them. An error that comes first decides on the status.
"""

import asyncio
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import RequestError, invalid
from gangway.server.models.served import ServedModel
from gangway.server.models.tensors import Tensor
from gangway.server.requests.contents import EMPTY_FINAL_PARAMETER, MAX_ID_BYTES
from gangway.server.serving.http.call import CallResponses
from gangway.server.serving.http.infer import (
    BinaryOutputs,
    HttpRequest,
    Output,
    deduced_shape,
    outputs_of,
    split_response,
)
from gangway.server.serving.http.json_text import (
    UnreadTensor,
    dump,
    element_count,
    flatten,
    from_raw,
    kind_of,
    parameters_of,
    parse_object,
    raw_of,
    set_parameter,
    string_of,
)
from gangway.server.serving.http.replies import error_text

_log = logging.getLogger(__name__)

UNSENT_BYTES: Final = 1 << 30
WORTH_BYTES: Final = 1 << 20  # a stream with less unread is not ended for its memory
PARAMETERS: Final = "parameters"  # its members count as members of the whole
NOT_ONE: Final = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number"
    " of responses"
)


def read_generate(model: ServedModel, version: str, text: bytes | memoryview) -> HttpRequest:
    """Understand the body of a generate request: a JSON object whose members are inputs or parameters, by their names.

    A value is a tensor of as many elements as it has. Raises RequestError (INVALID_ARGUMENT).
    """
    content = parse_object(text)
    where = f"generate request for model '{model.name}'"
    nested = content.get(PARAMETERS, {})
    if not isinstance(nested, dict):
        invalid(f"{where}: expected an object as '{PARAMETERS}', got {kind_of(nested)}")
    members = {**{name: value for name, value in content.items() if name != PARAMETERS}, **nested}
    request_id = b""
    if "id" in content and "id" not in model.inputs:
        request_id = string_of(members, "id", where).encode()
        del members["id"]
        if len(request_id) > MAX_ID_BYTES:
            invalid(f"{where}: expected an id of at most {MAX_ID_BYTES} bytes")
    members.pop(EMPTY_FINAL_PARAMETER, None)  # the end of the body says that no response follows
    message = pb.ModelInferRequest(model_name=model.name, model_version=version)
    contents = []
    for name, value in members.items():
        tensor = model.inputs.get(name)
        if tensor is None:
            set_parameter(message.parameters[name], value, f"{where}: parameter '{name}'")
        else:
            contents.append(_add_input(message, tensor, value, model))
    return HttpRequest(message.SerializeToString(deterministic=True), request_id, tuple(contents), BinaryOutputs())


def _add_input(message: pb.ModelInferRequest, tensor: Tensor, value: Any, model: ServedModel) -> bytes | UnreadTensor:
    where = f"input '{tensor.name}' for model '{model.name}'"
    elements = flatten(value, where)
    shape = deduced_shape(tensor, element_count(elements), where)
    message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
    return raw_of(elements, tensor.datatype, where)


def generated(response: bytes) -> bytes:
    """Return a response as one JSON object. Raises RequestError if an output has no JSON."""
    header, request_id, raws = split_response(response)
    message = pb.ModelInferResponse.FromString(header)
    content: dict[str, Any] = {"id": request_id.decode()} if request_id else {}
    content |= {"model_name": message.model_name, "model_version": message.model_version}
    content |= parameters_of(message.parameters)
    return dump(content)[:-1] + b"".join(_member(output) for output in outputs_of(message, raws)) + b"}"


def _member(output: Output) -> bytes:
    tensor, raw = output
    elements = math.prod(tensor.shape)
    data = b"null" if raw is None else from_raw(raw, tensor.datatype, elements, f"output '{tensor.name}'")
    if elements == 1 and raw is not None:
        data = data[1:-1]  # without the brackets of the array
    return b"," + dump(tensor.name) + b":" + data


def event_of(response: bytes | RequestError) -> bytes:
    """Return the server-sent event of a response, or of an error in its place; none of an empty response.

    Raises RequestError if an output has no JSON.
    """
    if not response:
        return b""
    text = error_text(response.message) if isinstance(response, RequestError) else generated(response)
    return b"data: %b\n\n" % text


async def only_one(responses: CallResponses) -> bytes:
    """Return the response of a model that gives exactly one. Raises RequestError for another number, or its error."""
    first = await responses.next()
    is_one = not first.is_empty and (first.is_last or (await responses.next()).is_empty)
    if not is_one:
        invalid(NOT_ONE)
    if isinstance(first.response, RequestError):
        raise first.response.without_traceback()
    return first.response


class EventStreams:
    """Answers of events that are under way. For the loop's thread.

    Beyond `unsent_bytes` that their clients have not read, all together, the one that has most is ended.
    """

    def __init__(self, unsent_bytes: int) -> None:
        self._most_bytes = unsent_bytes
        self._transports: set[asyncio.Transport] = set()

    @contextmanager
    def opened(self, transport: asyncio.Transport) -> Iterator[asyncio.Transport]:
        """Count what goes there."""
        self._transports.add(transport)
        try:
            yield transport
        finally:
            self._transports.discard(transport)

    def bound(self, transport: asyncio.Transport) -> None:
        """End the one that has most, if there is too much; what has come last has gone to `transport`."""
        if transport.get_write_buffer_size() > WORTH_BYTES and sum(self._sizes()) > self._most_bytes:
            self.end_largest()

    def end_largest(self) -> bool:
        """End the one whose client has not read most; False if none is worth it."""
        if max(self._sizes(), default=0) < WORTH_BYTES:
            return False
        largest = max(self._transports, key=lambda each: each.get_write_buffer_size())
        _log.warning(
            "a stream of events is ended, because its client does not read: %d bytes wait to be sent",
            largest.get_write_buffer_size(),
        )
        largest.abort()
        return True

    def _sizes(self) -> Iterator[int]:
        return (transport.get_write_buffer_size() for transport in self._transports)
