"""Requests to a model for onnxruntime as one: their rows, one after the other, along the first axis. Imports numpy.

Only models that are batched: the first axis of every input and output is the batch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def rows_of(feeds: Mapping[str, Any]) -> int:
    """Return how many rows a request has. Raises ValueError if its inputs do not agree."""
    counts = {len(array) if array.ndim else 0 for array in feeds.values()}
    if len(counts) != 1:
        raise ValueError(f"inputs of a request have {sorted(counts)} rows")
    return counts.pop()


def join_rows(feeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the inputs of all requests together. Raises ValueError unless they are alike but for their rows."""
    first = feeds[0]
    if any(each.keys() != first.keys() for each in feeds):
        raise ValueError("some requests leave an input out that others have")
    return {name: np.concatenate([each[name] for each in feeds]) for name in first}


def split_rows(arrays: Sequence[Any], rows: Sequence[int]) -> list[list[Any]]:
    """Return each request's outputs. Raises ValueError if an output has other rows than the requests together."""
    total = sum(rows)
    for array in arrays:
        if array.ndim == 0 or len(array) != total:
            raise ValueError(f"an output of shape {array.shape} for {total} rows")
    ends = np.cumsum(rows)
    return [[array[end - count : end] for array in arrays] for count, end in zip(rows, ends, strict=True)]
