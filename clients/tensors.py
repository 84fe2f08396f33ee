"""Tensors on the wire: Triton's datatype names, raw little-endian bytes."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from gangway.artifact.datatypes import DTYPES
from gangway.clients.errors import InputError, RefusedError
from gangway.protos import grpc_service_pb2 as pb

Array = npt.NDArray[np.generic]


def dtype_of(datatype: str) -> np.dtype[np.generic]:
    """Return numpy's dtype for a Triton datatype. Raises InputError for those that have none (BYTES, BF16)."""
    if datatype not in DTYPES:
        raise InputError(f"datatype {datatype} is not supported by this client; it knows {', '.join(DTYPES)}")
    return DTYPES[datatype]


def infer_request(model: str, version: str, tensors: Mapping[str, tuple[str, Array]]) -> pb.ModelInferRequest:
    """Build a ModelInfer request from name -> (datatype, values); the values travel as raw bytes."""
    request = pb.ModelInferRequest(model_name=model, model_version=version)
    for name, (datatype, values) in tensors.items():
        request.inputs.add(name=name, datatype=datatype, shape=values.shape)
        request.raw_input_contents.append(np.ascontiguousarray(values).tobytes())
    return request


def outputs_of(response: pb.ModelInferResponse) -> dict[str, Array]:
    """Return the output tensors of a response by name, without a copy. Only raw contents are understood."""
    if len(response.raw_output_contents) != len(response.outputs):
        contents = len(response.raw_output_contents)
        raise RefusedError(f"the server sent {len(response.outputs)} outputs, but the contents of {contents}")
    return {
        output.name: np.frombuffer(raw, dtype=dtype_of(output.datatype)).reshape(tuple(output.shape))
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }
