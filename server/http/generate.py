"""Triton's generate extension: one JSON object whose members are inputs or parameters, by their names.

Made for models whose inputs are a text and a few numbers. A value is a tensor of as many elements as it has.
"""

import math
from typing import Any, Final

from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import invalid
from gangway.server.http.infer_request import JsonRequest, Wishes
from gangway.server.http.infer_response import Output, outputs_of, split_response
from gangway.server.http.json_text import dump, kind_of, parse_object
from gangway.server.http.messages import parameters_of, set_parameter, string_of
from gangway.server.http.replies import EVENTS, JSON, Reply
from gangway.server.http.tensors import LateTensor, count_of, flatten, from_raw, raw_of
from gangway.server.models import ServedModel
from gangway.server.tensor import Tensor
from gangway.server.wire import MAX_ID_BYTES

PARAMETERS: Final = "parameters"  # its members count as members of the whole


def read_generate(model: ServedModel, version: str, text: bytes | memoryview) -> JsonRequest:
    """Understand the body of a generate request. Raises RequestError (INVALID_ARGUMENT)."""
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
    message = pb.ModelInferRequest(model_name=model.name, model_version=version)
    contents = []
    for name, value in members.items():
        tensor = model.inputs.get(name)
        if tensor is None:
            set_parameter(message.parameters[name], value, f"{where}: parameter '{name}'")
        else:
            contents.append(_add_input(message, tensor, value, model))
    return JsonRequest(message.SerializeToString(deterministic=True), request_id, tuple(contents), Wishes())


def _add_input(message: pb.ModelInferRequest, tensor: Tensor, value: Any, model: ServedModel) -> bytes | LateTensor:
    where = f"input '{tensor.name}' for model '{model.name}'"
    elements = flatten(value, where)
    shape = deduced_shape(tensor, model, count_of(elements), where)
    message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
    return raw_of(elements, tensor.datatype, where)


def deduced_shape(tensor: Tensor, model: ServedModel, elements: int, where: str) -> list[int]:
    """Return the shape of one row with so many elements: of the sizes that are not known the last one follows.

    Raises RequestError (INVALID_ARGUMENT) if there is none.
    """
    shape = list(tensor.shape)
    if shape and shape[0] == -1 and model.max_batch_size:
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


def generate_reply(response: bytes, streamed: bool) -> Reply:
    """Return the one answer of a model, as JSON or as an event. Raises RequestError if it has no JSON."""
    header, request_id, raws = split_response(response)
    message = pb.ModelInferResponse.FromString(header)
    content: dict[str, Any] = {"id": request_id.decode()} if request_id else {}
    content |= {"model_name": message.model_name, "model_version": message.model_version}
    content |= parameters_of(message.parameters)
    text = dump(content)[:-1] + b"".join(_member(output) for output in outputs_of(message, raws)) + b"}"
    return Reply(200, (b"data: " + text + b"\n\n",), EVENTS) if streamed else Reply(200, (text,), JSON)


def _member(output: Output) -> bytes:
    tensor, raw = output
    elements = math.prod(tensor.shape)
    data = b"null" if raw is None else from_raw(raw, tensor.datatype, elements, f"output '{tensor.name}'")
    if elements == 1 and raw is not None:
        data = data[1:-1]  # without the brackets of the array
    return b"," + dump(tensor.name) + b":" + data
