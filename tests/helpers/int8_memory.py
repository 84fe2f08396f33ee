"""Tensors of bytes in the layouts of `compiler/kernels/specs.py`, convolutions of them, and kernels that are run."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.codegen import aligned
from gangway.compiler.kernels.int8_specs import Int8QuantiseSpec
from gangway.compiler.kernels.specs import Array, ConvSpec, KernelSpec, Layout, PackSpec
from gangway.compiler.kernels.templates import registry
from gangway.compiler.kernels.templates.int8 import instructions as int8
from tests.helpers.kernel_runs import build, numbered

ZERO = 37  # the zero point of tests
_numbers = count()


def convolution(
    *shape: Any, input_layout: Layout = "bytes", output_layout: Layout = "bytes", **fields: Any
) -> ConvSpec:
    """A convolution of 8-bit numbers: channels, height, width, outputs, kernel, stride, pads, dilation."""
    return ConvSpec(*shape, input_layout=input_layout, output_layout=output_layout, precision="int8", **fields)


def depthwise(channels: int, height: int, width: int, *window: Any, **fields: Any) -> ConvSpec:
    """A depthwise convolution of 8-bit numbers: kernel, stride, pads."""
    return convolution(channels, height, width, channels, *window, groups=channels, **fields)


def run_plans(
    spec: KernelSpec, raw: Mapping[str, Array], inputs: Sequence[Array], y: Array | None, target: TargetSpec, path: Path
) -> Iterator[str]:
    """Compute y by several plans, one after the other; yields their descriptions."""
    plans = registry.versions(spec, target, 4)
    own = path.with_stem(f"{path.stem}{next(_numbers)}")  # a library that is loaded must not change
    library = build(numbered(plans), target, own)
    packed = [aligned(array) for array in registry.pack(plans[0], target, raw)] if raw else []
    for index, plan in enumerate(plans):
        if y is not None and y.ndim == 4 and not isinstance(spec, PackSpec | Int8QuantiseSpec):
            inside(y, getattr(spec, "output_halo", 0))[...] = 1
        arguments = [inputs[0], *packed, *inputs[1:], *([] if y is None else [y])]
        library.call(f"k{index}", arguments, 0, plan.tasks)
        yield plan.description


def sums_of(
    x: Array, weights: Array, stride: tuple[int, int], pads: tuple[int, int, int, int], dilation: tuple[int, int]
) -> Array:
    """The convolution of (x - zero), whose padding is 0."""
    whole = np.pad(x.astype(np.int64) - ZERO, ((0, 0), pads[::2], pads[1::2]))
    reach = [(k - 1) * d + 1 for k, d in zip(weights.shape[2:], dilation, strict=True)]
    windows = np.lib.stride_tricks.sliding_window_view(whole, reach, (1, 2))
    windows = windows[:, :: stride[0], :: stride[1], :: dilation[0], :: dilation[1]]
    return np.asarray(np.einsum("chwij,ocij->ohw", windows, weights.astype(np.int64)))


def quantised(numbers: Array) -> Array:
    """The nearest bytes of numbers in steps."""
    return np.asarray(np.clip(np.rint(numbers) + ZERO, 0, 255).astype(np.uint8))


def check_halo(y: Array, channels: int, halo: int) -> None:
    """Assert that the halo is the zero point."""
    kept = y.copy()
    inside(kept, halo)[...] = ZERO
    assert (image(kept, channels, 0) == ZERO).all(), "the halo is not the zero point"


def inside(y: Array, halo: int) -> Array:
    """The memory without its halo."""
    return y[:, halo : y.shape[1] - halo, halo : y.shape[2] - halo]


def as_bytes(x: Array, halo: int, padding: int = ZERO) -> Array:
    """[C][H][W] -> [C/64][H + 2h][W + 2h][64], with 99 in surplus channels and room behind it."""
    return _laid(x, 64, halo, padding, 99)


def as_pixels(x: Array, halo: int, padding: int = ZERO) -> Array:
    """[C][H][W] -> [1][H + 2h][W + 2h][4]."""
    return _laid(x, 4, halo, padding, 99)


def as_blocked(x: Array, lanes: int, halo: int, surplus: int = 0) -> Array:
    """[C][H][W] -> [C/lanes][H + 2h][W + 2h][lanes]."""
    return _laid(x, lanes, halo, 0, surplus)


def _laid(x: Array, lanes: int, halo: int, padding: int, surplus: int) -> Array:
    whole = np.pad(x, ((0, 0), (halo, halo), (halo, halo)), constant_values=padding)
    whole = np.pad(whole, ((0, -len(x) % lanes), (0, 0), (0, 0)), constant_values=surplus)
    blocks = whole.reshape(-1, lanes, *whole.shape[1:]).transpose(0, 2, 3, 1)
    memory = aligned(np.zeros(blocks.nbytes + int8.READ_BEHIND_BYTES, np.uint8))
    result = memory[: blocks.nbytes].view(x.dtype).reshape(blocks.shape)
    result[...] = blocks
    return result


def image(y: Array, channels: int, halo: int) -> Array:
    """Memory of any of these layouts -> [C][H][W]."""
    return inside(y, halo).transpose(0, 3, 1, 2).reshape(-1, y.shape[1] - 2 * halo, y.shape[2] - 2 * halo)[:channels]
