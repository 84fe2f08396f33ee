"""A request without JSON: the body is the one input of the model, for one row."""

import math
import struct
from typing import Final

from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import invalid
from gangway.server.http.generate import deduced_shape
from gangway.server.http.infer_request import JsonRequest, Wishes
from gangway.server.models import ServedModel, item_bytes

_LENGTH: Final = struct.Struct("<I")


def read_raw(model: ServedModel, version: str, body: memoryview) -> JsonRequest:
    """Return the request that such a body means; every output is wanted in the same way.

    Raises RequestError (INVALID_ARGUMENT) if the model has not exactly one input, or none of this size.
    """
    if len(model.inputs) != 1:
        invalid(f"model '{model.name}' has {len(model.inputs)} inputs: a request without JSON is only possible for one")
    (tensor,) = model.inputs.values()
    where = f"input '{tensor.name}' for model '{model.name}'"
    size = item_bytes(tensor.datatype)
    elements = _count_strings(body, where) if tensor.datatype == "BYTES" else len(body) // size
    shape = deduced_shape(tensor, model, elements, where)
    if size and math.prod(shape) * size != len(body):
        invalid(f"{where}: {len(body)} bytes do not make a tensor of {list(tensor.shape)}")
    message = pb.ModelInferRequest(model_name=model.name, model_version=version)
    message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
    return JsonRequest(message.SerializeToString(), b"", (len(body),), Wishes(binary=True))


def _count_strings(body: memoryview, where: str) -> int:
    count = at = 0
    while at < len(body):
        if len(body) - at < _LENGTH.size:
            invalid(f"{where}: the body ends within a length")
        at += _LENGTH.size + _LENGTH.unpack_from(body, at)[0]
        count += 1
    return count
