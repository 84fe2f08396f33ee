"""Integers, scales and zero points of weights, as a file has them, and as kernels want them."""

from dataclasses import dataclass

import numpy as np

from gangway.compiler.kernels.packed_specs import ZERO_POINTS, Bits, is_possible
from gangway.compiler.kernels.specs import Array

_SHIFTS: dict[str, tuple[Bits, int]] = {"int8": (8, 0), "uint8": (8, -128), "int4": (4, 8), "uint4": (4, 0)}
"""Bits of an element type, and what is added to its numbers to be those that kernels want."""


@dataclass(frozen=True)
class PackedWeights:
    """Raw weights of a `PackedDenseSpec`, without its bias. `zeros` is None where all are those of ZERO_POINTS."""

    bits: Bits
    block: int
    integers: Array
    scales: Array
    zeros: Array | None


def make_weights(kind: str, integers: Array, scales: Array, zeros: Array | None, block: int) -> PackedWeights | None:
    """Return weights of [outputs][inputs] integers, [outputs][blocks] scales and zero points (None: all 0).

    `kind`: the element type of integers and zero points. The result is None if there is no kernel for them.
    """
    outputs, inputs = integers.shape
    blocks = -(-inputs // block)
    if kind not in _SHIFTS or scales.dtype.name != "float32" or not is_possible(inputs, block):
        return None
    if scales.shape != (outputs, blocks) or (zeros is not None and zeros.shape != scales.shape):
        return None
    bits, shift = _SHIFTS[kind]
    moved = (integers.astype(np.int16) + shift).astype(np.int8)
    places = (
        np.full(scales.shape, shift, np.int8) if zeros is None else (zeros.astype(np.int16) + shift).astype(np.int8)
    )
    odd = (places != ZERO_POINTS[bits]).any()
    return PackedWeights(bits, block, in_halves(moved) if bits == 4 else moved, scales, places if odd else None)


def in_halves(integers: Array) -> Array:
    """Return integers from 0 to 15, two in a byte along the last axis, the lower half first."""
    even = np.pad(integers.astype(np.uint8), ((0, 0), (0, integers.shape[1] % 2)))
    return np.asarray(even[:, ::2] | even[:, 1::2] << 4)
