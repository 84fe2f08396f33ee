"""Tensors of requests and responses as numpy arrays, and their contents as bytes in Triton's layout."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

# By Triton's datatype: number of TRITONSERVER_DataType, and numpy's type.
DATATYPES: dict[str, tuple[int, Any]] = {
    "BOOL": (1, np.bool_),
    "UINT8": (2, np.uint8),
    "UINT16": (3, np.uint16),
    "UINT32": (4, np.uint32),
    "UINT64": (5, np.uint64),
    "INT8": (6, np.int8),
    "INT16": (7, np.int16),
    "INT32": (8, np.int32),
    "INT64": (9, np.int64),
    "FP16": (10, np.float16),
    "FP32": (11, np.float32),
    "FP64": (12, np.float64),
    "BYTES": (13, np.object_),
}
_LENGTH = struct.Struct("<I")


def datatype_of(array: Any) -> str:
    """Return Triton's datatype of an array. Raises ValueError if it has none."""
    if array.dtype.kind in "OSU":
        return "BYTES"
    for name, (_, numpy_type) in DATATYPES.items():
        if array.dtype == numpy_type:
            return name
    raise ValueError(f"an array of type {array.dtype} cannot be a tensor")


def converted(array: Any, datatype: str) -> Any:
    """Return an array as this type, if it is of the same kind: integers that fit, or floats. Others stay."""
    wanted = np.dtype(DATATYPES[datatype][1])
    if (
        array.dtype == wanted
        or wanted.kind not in "iuf"
        or array.dtype.kind not in ("iu" if wanted.kind in "iu" else "f")
    ):
        return array
    other = array.astype(wanted)
    return other if wanted.kind == "f" or np.array_equal(other, array) else array


def array_of(datatype: str, shape: Sequence[int], content: memoryview) -> Any:
    """Return a copy of contents as an array. Raises ValueError if they do not fit together."""
    if datatype == "BYTES":
        return _strings(content, math.prod(shape)).reshape(shape)
    return np.frombuffer(content, DATATYPES[datatype][1]).reshape(shape).copy()


def content_of(array: Any) -> Any:
    """Return the contents of an array, without a copy where that is possible."""
    if array.dtype.kind in "OSU":
        return _joined(array)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.size else b""


def _strings(content: memoryview, count: int) -> Any:
    array = np.empty(count, np.object_)
    at, end = 0, len(content)
    for index in range(count):
        if end - at < _LENGTH.size:
            raise ValueError(f"the contents end before element {index} of {count}")
        begin = at + _LENGTH.size
        at = begin + _LENGTH.unpack_from(content, at)[0]
        if at > end:
            raise ValueError(f"element {index} is cut off")
        array[index] = bytes(content[begin:at])
    if at != end:
        raise ValueError(f"{end - at} bytes follow after the last element")
    return array


def _joined(array: Any) -> bytes:
    pieces: list[bytes] = []
    for element in array.ravel(order="C").tolist():
        piece = element if isinstance(element, bytes) else str(element).encode()
        pieces += (_LENGTH.pack(len(piece)), piece)
    return b"".join(pieces)
