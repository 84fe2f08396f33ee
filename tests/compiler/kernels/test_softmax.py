"""Softmax along any axis against numpy in double precision, for every target."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from gangway.compiler.kernels.codegen import aligned
from gangway.compiler.kernels.plain_specs import SoftmaxSpec
from gangway.compiler.kernels.specs import Array, KernelSpec

Compile = Callable[[Sequence[KernelSpec]], list[Callable[[Sequence[Array]], None]]]

SHAPES = [(1, 1, 1), (3, 1000, 1), (5, 7, 1), (2, 9, 5), (3, 21, 37), (300, 4, 16)]  # rows, columns, inner


def softmax(x: Array, logarithm: bool) -> Array:
    shifted = x.astype(np.float64) - x.max(axis=1, keepdims=True)
    total = np.exp(shifted).sum(axis=1, keepdims=True)
    return shifted - np.log(total) if logarithm else np.exp(shifted) / total


@pytest.mark.parametrize("logarithm", [False, True])
def test_softmax(logarithm: bool, compiled: Compile, rng: np.random.Generator) -> None:
    kernels = compiled([SoftmaxSpec(*shape, logarithm=logarithm) for shape in SHAPES])
    for kernel, shape in zip(kernels, SHAPES, strict=True):
        x = (rng.integers(-1200, 1200, shape) / 32).astype(np.float32)  # so that differences are exact
        y = aligned(np.full(x.size + 1, 9, np.float32), 4)
        kernel([aligned(x, 4), y])
        wanted = softmax(x, logarithm)
        np.testing.assert_allclose(y[:-1].reshape(shape), wanted, rtol=2e-6, atol=2e-6 if logarithm else 1e-37)
        assert y[-1] == 9
