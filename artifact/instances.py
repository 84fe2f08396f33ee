"""One program for several sizes of symbolic dimensions: what differs from size to size, as numbers.

The layers of all sizes are the same. An *instance* is one set of sizes: where arguments lie, which kernels compute how
many tasks, and how large rows of tensors are. The numbers of an instance go into the places of `SizeInstances.places`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import msgspec

SHIFT = 32  # of an instance's number in the `join_key` of a slot: requests of different sizes are never joined
MOST = 4096  # of one program


@dataclass(frozen=True)
class SizeSpan:
    """Sizes of a symbol for which one artifact is made: `first` to `last`.

    `along`: other symbols that grow with it, and by how much each is larger, as a mask is than the past that it covers.
    `ahead`: it is not known whether requests want them all, so each size must be cheap.
    """

    symbol: str
    first: int
    last: int
    along: tuple[tuple[str, int], ...] = ()
    ahead: bool = False

    def sizes(self, value: int, dimensions: Mapping[str, int]) -> dict[str, int]:
        """Return the sizes of all dimensions where the symbol has this one; `dimensions` has those that stay."""
        return {**dimensions, self.symbol: value, **{name: value + more for name, more in self.along}}

    def marked(self, dimensions: Mapping[str, int]) -> dict[str, int]:
        """Return the sizes of all dimensions as an artifact's key has them."""
        marks = {f"{name} along ": 1 for name, _ in self.along}
        return {**self.sizes(self.last, dimensions), f"{self.symbol} from ": self.first, **marks}


class Varying(IntEnum):
    """What a number of an instance is. Kernels are places in `SizeInstances.kernels`."""

    ARGUMENTS = 0  # how many a layer has
    OFFSET = 1  # of a layer's argument, in bytes
    KERNEL = 2  # of a layer, for one row
    TASKS = 3
    BATCH_KERNEL = 4  # the same, for several rows
    BATCH_TASKS = 5
    MAX_RANKS = 6
    ROW_NS = 7
    INPUT_BYTES = 8  # of a row
    OUTPUT_BYTES = 9


class NumberPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where a number goes: `layer` of a manifest (0 for tensors), `index` of an argument, input or output."""

    kind: Varying
    layer: int
    index: int = 0


class SizeInstance(msgspec.Struct, frozen=True):
    """The sizes of the symbols, the shapes of inputs and outputs as in `TensorSpec`, and the numbers."""

    sizes: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    numbers: tuple[int, ...]


class SizeInstances(msgspec.Struct, frozen=True):
    """The instances of a program. The first one is what the manifest itself says, and no tensor is larger in others."""

    symbols: tuple[str, ...]
    kernels: tuple[str, ...]
    places: tuple[NumberPlace, ...]
    each: tuple[SizeInstance, ...]


def row_bytes(shape: Sequence[int], batched: bool, item_bytes: int) -> int:
    """Return the bytes of a row of a tensor of this shape, whose first size counts rows if `batched`."""
    return math.prod(shape[batched:]) * item_bytes
