"""Elements that came as protobuf numbers (`InferInputTensor.contents`) to the bytes the kernels read."""

from typing import Final

from gangway.executor.frames import join_strings
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import invalid

# element type -> (field of InferTensorContents, numpy's name)
FIELDS: Final = {
    "BOOL": ("bool_contents", "bool"),
    "INT8": ("int_contents", "int8"),
    "INT16": ("int_contents", "int16"),
    "INT32": ("int_contents", "int32"),
    "INT64": ("int64_contents", "int64"),
    "UINT8": ("uint_contents", "uint8"),
    "UINT16": ("uint_contents", "uint16"),
    "UINT32": ("uint_contents", "uint32"),
    "UINT64": ("uint64_contents", "uint64"),
    "FP32": ("fp32_contents", "float32"),
    "FP64": ("fp64_contents", "float64"),
    "BYTES": ("bytes_contents", "object"),
}


def to_bytes(contents: pb.InferTensorContents, name: str, datatype: str, elements: int, model: str) -> bytes:
    """Return the elements as raw bytes. Raises RequestError (INVALID_ARGUMENT)."""
    if datatype not in FIELDS:
        invalid(f"input '{name}' for model '{model}': {datatype} is only possible in raw_input_contents")
    expected, dtype = FIELDS[datatype]
    others = [field.name for field, _ in contents.ListFields() if field.name != expected]
    if others:
        invalid(f"input '{name}' for model '{model}': expected {expected} for {datatype}, got {others[0]}")
    values = getattr(contents, expected)
    if len(values) != elements:
        invalid(f"input '{name}' for model '{model}': expected {elements} elements in {expected}, got {len(values)}")
    if datatype == "BYTES":
        return join_strings(values)
    import numpy as np  # noqa: PLC0415 - a front end need not wait for it: see front_ends/doors.py

    try:
        return np.array(values, dtype=dtype).tobytes()
    except OverflowError as error:
        invalid(f"input '{name}' for model '{model}': an element does not fit into {datatype}: {error}")
