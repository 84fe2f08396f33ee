"""The best numbers of rows on every target, against onnxruntime."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

from gangway.compiler.kernels.codegen import aligned
from gangway.compiler.kernels.plain_specs import TopSpec
from gangway.compiler.kernels.specs import Array, KernelSpec
from tests.helpers.onnx_models import make_model

GUARD = 16
TYPES = {"float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE, "int64": TensorProto.INT64, "int32": 6}
SPECS = [
    TopSpec("float32", 1, 1003, 1),
    TopSpec("float32", 7, 1003, 64),
    TopSpec("float32", 130, 8, 2),
    TopSpec("float32", 3, 50, 5, largest=False),
    TopSpec("float32", 2, 3, 3),
    TopSpec("float64", 2, 300, 40, largest=False),
    TopSpec("int64", 5, 77, 3),
    TopSpec("int32", 5, 77, 7, largest=False),
]


def numbers(spec: TopSpec, random: np.random.Generator) -> Array:
    """Many equal ones; of floats some rows have zeros of both signs, infinities or NaN."""
    x = random.integers(-9, 9, (spec.rows, spec.columns)).astype(spec.dtype)
    if x.dtype.kind == "f":
        x *= np.where(random.random(x.shape) < 0.5, 1, random.random(x.shape)).astype(x.dtype)
        x[1::3][random.random(x[1::3].shape) < 0.1] = np.nan
        x[2::3, ::5] = np.inf
        x[2::3, 1::5] = -0.0
    return x


def expected(spec: TopSpec, x: Array) -> list[Array]:
    nodes = [helper.make_node("TopK", ["x", "k"], ["y", "places"], largest=int(spec.largest))]
    outputs = {"y": (TYPES[spec.dtype], None), "places": (TensorProto.INT64, None)}
    model = make_model(nodes, {"x": x}, outputs, {"k": np.array([spec.count])}, ir_version=9)
    found: list[Array] = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    return found


def test_top(compiled: Callable[[Sequence[KernelSpec]], list[Any]]) -> None:
    random = np.random.default_rng(3)
    for spec, kernel in zip(SPECS, compiled(SPECS), strict=True):
        x, results = numbers(spec, random), spec.rows * spec.count
        places = aligned(np.full(results + GUARD, 77, np.int64), 8)
        y = aligned(np.full(results + GUARD, 77, spec.dtype), 8)
        kernel([aligned(x, 8), places, y])
        for got, wanted in zip((y, places), expected(spec, x), strict=True):
            assert (got[results:] == 77).all()
            np.testing.assert_array_equal(got[:results].reshape(wanted.shape), wanted, err_msg=str(spec))
