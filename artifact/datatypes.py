"""Triton's names of datatypes, as numpy's. Imports numpy: not for workers that run compiled models only."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# BYTES and BF16 have no counterpart.
DTYPES: Mapping[str, np.dtype[np.generic]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
}

# What numpy holds of a tensor: of BF16 the bits, as whole numbers. They are passed on, never computed with.
STORAGE: Mapping[str, np.dtype[np.generic]] = {**DTYPES, "BF16": np.dtype(np.uint16)}

RAW_ONLY = ("FP16", "BF16")  # which have no JSON, as Triton has none for them
MOST_EXAMPLE_VALUES = 1024  # larger tensors have no example that people would read


def numbers_of(raw: bytes | memoryview, datatype: str) -> "np.ndarray[Any, np.dtype[Any]]":
    """Return the elements of a tensor's bytes in one dimension, of BF16 as float32. BYTES have none."""
    values = np.frombuffer(raw, STORAGE[datatype])
    return (values.astype(np.uint32) << 16).view(np.float32) if datatype == "BF16" else values


def example_input(name: str, datatype: str, shape: Sequence[int]) -> dict[str, object] | None:
    """Return an input of an inference as JSON, its values being ones.

    None if there are more than MOST_EXAMPLE_VALUES, or JSON has none of its type.
    """
    count = math.prod(shape)
    if count > MOST_EXAMPLE_VALUES or datatype in RAW_ONLY:
        return None
    value: object = {"BYTES": "0", "BOOL": True}.get(datatype, 1)
    return {"name": name, "datatype": datatype, "shape": list(shape), "data": [value] * count}
