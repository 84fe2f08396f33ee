"""Functions of each element that depend on its side of a limit."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import helper

ODD = np.array([-np.inf, -3e38, -7.5, -1.0, -0.25, -0.0, 0.0, 0.25, 1.0, 7.5, 3e38, np.inf, np.nan], np.float32)


@pytest.mark.parametrize("alpha", [0.25, 1.0, 3.0, -0.5])
def test_celu_at_any_alpha(same: Callable[..., list[str]], alpha: float) -> None:
    same([helper.make_node("Celu", ["x"], ["y"], alpha=alpha)], {"x": ODD})


@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.int16, np.int32, np.uint8])
@pytest.mark.parametrize("bias", [0.0, 0.5, -1.75])
def test_shrink_of_numbers_and_integers(same: Callable[..., list[str]], dtype: Any, bias: float) -> None:
    x = ODD if dtype is np.float32 else np.arange(-9 if np.iinfo(dtype).min else 0, 10).astype(dtype)
    same([helper.make_node("Shrink", ["x"], ["y"], bias=bias, lambd=1.5)], {"x": x}, opset=19)


@pytest.mark.parametrize("factors", [{}, {"alpha": 0.0}, {"gamma": 0.0}, {"alpha": 2.0, "gamma": 0.5}])
@pytest.mark.parametrize("opset", [13, 22])
def test_selu_by_any_factors(same: Callable[..., list[str]], factors: dict[str, float], opset: int) -> None:
    finite = ODD[np.isfinite(ODD)]
    same([helper.make_node("Selu", ["x"], ["y"], **factors)], {"x": finite}, opset=opset)


def test_softplus_of_large_halves(same: Callable[..., list[str]]) -> None:
    same([helper.make_node("Softplus", ["x"], ["y"])], {"x": np.array([-60000, -20, 0, 20, 95, 60000], np.float16)})
