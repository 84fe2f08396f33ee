"""Images sampled at points, on every target, against onnxruntime."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnxruntime
from onnx import helper

from gangway.compiler.kernels.codegen import aligned
from gangway.compiler.kernels.plain_specs import GridSampleSpec
from gangway.compiler.kernels.specs import Array, KernelSpec
from tests.helpers.onnx_models import make_model

GUARD = 16
SPECS = [
    GridSampleSpec(1, 3, 7, 11, 300),
    GridSampleSpec(4, 16, 8, 8, 120, align_corners=True),
    GridSampleSpec(2, 1, 1, 5, 9),
]


def points(spec: GridSampleSpec, random: np.random.Generator) -> Array:
    """Within the image, on its pixels and edges, and far beyond: also what is no number."""
    grid = random.uniform(-1.6, 1.6, (spec.images, spec.points, 2)).astype("f")
    grid[:, ::7] = random.integers(-2, 3, grid[:, ::7].shape)
    for place, number in enumerate((np.inf, -np.inf, np.nan, 1e30, -1e12, 1e17, -4e18, 9e18, 1e20)):
        grid[:, place, place % 2] = number
    return grid


def expected(spec: GridSampleSpec, x: Array, grid: Array) -> Array:
    nodes = [helper.make_node("GridSample", ["x", "grid"], ["y"], align_corners=int(spec.align_corners))]
    given = {"x": x, "grid": grid.reshape(spec.images, 1, spec.points, 2)}
    model = make_model(nodes, given, {"y": None}, opset=16, ir_version=9)
    (found,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, given)
    return np.asarray(found)


def test_grid_sample(compiled: Callable[[Sequence[KernelSpec]], list[Any]]) -> None:
    random = np.random.default_rng(4)
    for spec, kernel in zip(SPECS, compiled(SPECS), strict=True):
        x = random.standard_normal((spec.images, spec.channels, spec.height, spec.width)).astype("f")
        x[0, 0, 0, :2] = np.inf, np.nan
        grid, results = points(spec, random), spec.images * spec.channels * spec.points
        y = aligned(np.full(results + GUARD, 77, "f"), 8)
        kernel([aligned(x, 8), aligned(grid, 8), y])
        assert (y[results:] == 77).all()
        wanted = expected(spec, x, grid).reshape(-1)
        np.testing.assert_allclose(y[:results], wanted, rtol=1e-5, atol=1e-5, err_msg=str(spec))
