"""Activation functions against numpy in double precision, over the whole range of float32."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels import codegen
from gangway.compiler.kernels.codegen import Library, aligned
from gangway.compiler.kernels.plain_specs import Instruction, Operand, PointwiseSpec
from gangway.compiler.kernels.specs import RELU, RELU6, Activation, Array
from gangway.compiler.kernels.templates import registry
from gangway.compiler.kernels.templates.builder import Argument, kernel, lanes_at, store
from gangway.compiler.kernels.templates.float32_math import clip, erf, exp, expm1, log
from tests.helpers.kernel_runs import build

SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3.4e38, -3.4e38, 88.72, 88.73, -87.4, -103.9, -104.1]


def everything(lanes: int) -> Array:
    """Every 8191st float32 there is, a dense grid where things happen, and the odd ones; some multiple of lanes + 1."""
    bits = np.arange(0, 1 << 32, 8191, dtype=np.uint64).astype(np.uint32)
    x = np.concatenate([bits.view(np.float32), np.linspace(-110, 110, 100_000, dtype=np.float32), np.float32(SPECIAL)])
    return x[: (len(x) - 1) // lanes * lanes + 1] if lanes > 1 else x


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


erf64, erfc64 = (np.vectorize(function, otypes=[np.float64]) for function in (math.erf, math.erfc))


def gelu_tanh(x: Array) -> Array:
    return x * sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


FUNCTIONS: list[tuple[Activation, Callable[[Array], Array], float]] = [
    (RELU, lambda x: np.maximum(x, 0), 0),
    (RELU6, lambda x: np.clip(x, 0, 6), 0),
    (Activation("clip", -1.5, 2.25), lambda x: np.clip(x, -1.5, 2.25), 0),
    (Activation("leaky_relu", 0.125), lambda x: np.where(x < 0, 0.125 * x, x), 1e-45),
    (Activation("bounded_leaky_relu", 0.125, -1.5), lambda x: np.maximum(np.where(x < 0, 0.125 * x, x), -1.5), 1e-45),
    (Activation("sigmoid"), sigmoid, 2e-7),
    (Activation("swish"), lambda x: x * sigmoid(x), 2e-7),
    (Activation("hard_sigmoid", 0.25, 0.5), lambda x: np.clip(0.25 * x + 0.5, 0, 1), 1e-7),
    (Activation("hard_swish", 1 / 6, 0.5), lambda x: x * np.clip(x / 6 + 0.5, 0, 1), 3e-7),
    (Activation("tanh"), np.tanh, 2e-7),
    (Activation("erf"), erf64, 2e-7),
    (Activation("gelu"), lambda x: x / 2 * erfc64(-x / math.sqrt(2)), 2e-7),
    (Activation("gelu_tanh"), gelu_tanh, 3e-7),
    (Activation("elu", 1.5), lambda x: np.where(x > 0, x, 1.5 * np.expm1(x)), 2e-7),
    (Activation("mish"), lambda x: x * np.tanh(np.logaddexp(0, x)), 3e-7),
    (Activation("softplus"), lambda x: np.logaddexp(0, x), 2e-7),
]


@pytest.mark.parametrize(("activation", "function", "error"), FUNCTIONS, ids=lambda value: getattr(value, "name", ""))
def test_activation(
    activation: Activation, function: Callable[[Array], Array], error: float, target: TargetSpec, library_path: Path
) -> None:
    x = everything(target.lanes)
    program = (Instruction(activation.name, (0,), "float32", (activation.alpha, activation.beta)),)
    plan = registry.plan(PointwiseSpec((len(x),), (Operand("float32", (1,)),), program), target)
    y = aligned(np.zeros_like(x))
    build({"k": plan}, target, library_path).call("k", [aligned(x), y], 0, plan.tasks)
    with np.errstate(all="ignore"):
        wanted = function(x.astype(np.float64))
    # What has no limit, like -infinity x sigmoid(-infinity), is up to the kernel.
    known = ~np.isinf(x) | ~np.isnan(wanted)
    assert (np.isnan(y) == np.isnan(wanted))[known].all()
    finite = known & np.isfinite(wanted) & (np.abs(wanted) < 3e38)
    scale = np.maximum(1, np.abs(wanted[finite]))
    assert (np.abs(y[finite] - wanted[finite]) / scale).max() <= error
    same = known & np.isinf(wanted)
    assert (y[same] == wanted[same]).all()


UNITS: list[tuple[Callable[[Any, int], Any], Callable[[Array], Array], float]] = [
    (exp, np.exp, 2),
    (lambda x, lanes: expm1(clip(x, -math.inf, 0.0, lanes), lanes), lambda x: np.expm1(np.minimum(x, 0)), 3),
    (log, np.log, 2),
    (erf, erf64, 4),
]


@pytest.mark.parametrize(("function", "wanted", "units"), UNITS, ids=["exp", "expm1", "log", "erf"])
def test_functions_in_units_of_the_last_place(
    function: Callable[[Any, int], Any],
    wanted: Callable[[Array], Array],
    units: float,
    target: TargetSpec,
    library_path: Path,
) -> None:
    lanes, x = target.lanes, everything(1)
    x = x[: len(x) // lanes * lanes]

    def task(number: Any, buffers: tuple[Any, ...]) -> None:
        store(buffers[1], number * lanes, function(buffers[0][lanes_at(number * lanes, lanes)], lanes), lanes)

    built = kernel("k", [Argument("x", len(x)), Argument("y", len(x))], task)
    codegen.build_library({"k": built}, target, library_path)
    y = aligned(np.zeros_like(x))
    Library(library_path).call("k", [aligned(x), y], 0, len(x) // lanes)
    with np.errstate(all="ignore"):
        exact = wanted(x.astype(np.float64))
        rounded = exact.astype(np.float32)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(rounded))
    np.testing.assert_array_equal(np.where(np.isinf(y), y, 0), np.where(np.isinf(rounded), rounded, 0))
    finite = np.isfinite(rounded)
    error = np.abs(y[finite] - exact[finite]) / np.spacing(np.abs(rounded[finite]))
    assert error.max() <= units
