"""A request that shows how a model is asked: sizes of open dimensions, and plausible values.

`gangway client` and `perf`, the page of a model and the OpenAPI description choose alike. Imports numpy.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from gangway.artifact.datatypes import DTYPES

IMAGE_SIZE, OTHER_SIZE = 224, 16  # of open dimensions of which nobody says a size
PICTURES: Final = ("FP32", "FP16", "UINT8")

Array = npt.NDArray[Any]


class Declared(Protocol):
    """An input as a server or its metadata declares it; -1 in `shape` is any size."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def datatype(self) -> str:
        """Its datatype, as Triton names it."""
        ...

    @property
    def shape(self) -> Sequence[int]:
        """The sizes of its dimensions."""
        ...


class ExampleTensor(NamedTuple):
    """An input of one request: all its sizes are known."""

    name: str
    datatype: str
    shape: tuple[int, ...]


def is_open(tensor: Declared) -> bool:
    """Whether a dimension but the first one has any size."""
    return any(size < 0 for size in tensor.shape[1:])


def chosen_size(tensor: Declared, declared_size: int | None) -> int:
    """Return the size of an input's open dimensions but the first.

    `declared_size`: of the model's configuration; None: 224 for pictures, [N, 1 or 3, H, W] or [N, H, W, 1 or 3] of
    floats or UINT8, else 16.
    """
    is_picture = len(tensor.shape) == 4 and {1, 3} & {tensor.shape[1], tensor.shape[3]}
    if declared_size is None and is_picture and tensor.datatype in PICTURES:
        return IMAGE_SIZE
    return declared_size or OTHER_SIZE


def example_of(tensor: Declared, declared_size: int | None) -> ExampleTensor:
    """Return an input of one row with the chosen sizes."""
    size = chosen_size(tensor, declared_size)
    shape = tuple([each if each >= 0 else size if axis else 1 for axis, each in enumerate(tensor.shape)])
    return ExampleTensor(tensor.name, tensor.datatype, shape)


def plausible_values(tensor: ExampleTensor, generator: np.random.Generator) -> Array:
    """Return standard normal floats, or coin flips, in the tensor's shape; of BF16 float32.

    Integers are 0 and 1: they may be indices, which are refused beyond the end of a table. Integers of a mask, as its
    name says it, are 1: nothing is masked. BYTES are digits, which most models can read.
    """
    if tensor.datatype == "BYTES":
        return generator.integers(0, 2, tensor.shape).astype(np.bytes_).astype(object)
    dtype = DTYPES.get(tensor.datatype, np.dtype(np.float32))
    if dtype.kind == "f":
        return generator.standard_normal(tensor.shape, dtype=np.float32).astype(dtype)
    if dtype.kind in "iu" and "mask" in tensor.name.lower():
        return np.ones(tensor.shape, dtype)
    return generator.integers(0, 2, tensor.shape).astype(dtype)
