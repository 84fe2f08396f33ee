"""Tensors of requests and responses as numpy arrays, and their contents as bytes in Triton's layout.

numpy has no BF16: its arrays are of type uint16, and hold the bits.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gangway.python_backend.elements import LENGTH, count_elements, join_elements, split_elements

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
STRINGS = "OSUT"  # kinds of arrays whose elements are bytes or texts
BF16, BF16_NUMBER = "BF16", 14
COPIED_BYTES = 4096  # take less time to copy than to have a view of
_NAMES: dict[Any, str] = {np.dtype(numpy_type): name for name, (_, numpy_type) in DATATYPES.items()}
_NUMERIC_TYPES = {name: own for own, name in _NAMES.items() if name != "BYTES"} | {BF16: np.dtype(np.uint16)}
_DLPACK_UINT, _DLPACK_BFLOAT = 1, 4  # codes of types
_DLPACK_CODE_AT = 20  # in a DLManagedTensor, behind address, device and number of dimensions
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def datatype_of(array: Any) -> str:
    """Return Triton's datatype of an array. Raises ValueError if it has none."""
    name = _NAMES.get(array.dtype)
    if name is not None:
        return name
    if array.dtype.kind in STRINGS:
        return "BYTES"
    raise ValueError(f"an array of type {array.dtype} cannot be a tensor")


def numeric_type(datatype: str) -> Any:
    """Return numpy's type for the contents of a datatype, of one size each; None for BYTES."""
    return _NUMERIC_TYPES.get(datatype)


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
    return np.frombuffer(content, _NUMERIC_TYPES[datatype]).reshape(shape).copy()


def size_of(array: Any, enough_bytes: int) -> int:
    """Return how many bytes the contents of an array have. Strings are counted until there are enough.

    Texts count a byte a character: their contents may have more.
    """
    if array.dtype.kind not in STRINGS:
        return int(array.nbytes)
    size_bytes = LENGTH.size * int(array.size)
    for element in array.flat:
        size_bytes += len(element) if isinstance(element, (bytes, str)) else len(str(element))
        if size_bytes > enough_bytes:
            break
    return size_bytes


def content_of(array: Any) -> Any:
    """Return the contents of an array; of one that is not short, without a copy where that is possible."""
    if array.dtype.kind in STRINGS:
        return _joined(array)
    return array.tobytes() if array.nbytes <= COPIED_BYTES else array.ravel().view(np.uint8).data


class Capsule:
    """An object that gives a DLPack capsule, of which numpy sees itself whether it is in the processor's memory."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **wanted: Any) -> Any:
        """Return the capsule."""
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the processor."""
        return (1, 0)


def from_capsule(capsule: Any) -> tuple[Any, bool]:
    """Return an array with the memory of a DLPack capsule, and whether it holds the bits of BF16.

    Raises ValueError, BufferError, RuntimeError or TypeError for what numpy cannot have.
    """
    is_bfloat16 = _replace_code(capsule, _DLPACK_BFLOAT, _DLPACK_UINT)
    return np.from_dlpack(Capsule(capsule)), is_bfloat16


def capsule_of(array: Any, is_bfloat16: bool) -> Any:
    """Return a DLPack capsule of an array: of a copy, if it is read-only."""
    capsule = (array if array.flags.writeable else array.copy()).__dlpack__()
    if is_bfloat16:
        _replace_code(capsule, _DLPACK_UINT, _DLPACK_BFLOAT)
    return capsule


def _replace_code(capsule: Any, old: int, new: int) -> bool:
    """Replace the code of the type in a capsule, if it is the old one; say whether it was."""
    code = ctypes.c_uint8.from_address(_pointer_of(capsule, b"dltensor") + _DLPACK_CODE_AT)
    is_old = code.value == old
    if is_old:
        code.value = new
    return is_old


def strings_of(content: memoryview) -> Any:
    """Return all elements that are in these contents, as an array of one dimension. Raises ValueError."""
    return _strings(content, count_elements(content))


def _strings(content: memoryview, count: int) -> Any:
    array = np.empty(count, np.object_)
    array[:] = split_elements(content, count)
    return array


def _joined(array: Any) -> bytes:
    elements = array.ravel(order="C").tolist()
    return join_elements([each if isinstance(each, bytes) else str(each).encode() for each in elements])
