"""Fourier transforms as products: against onnxruntime, for rows of a batch, and what is left to onnxruntime."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from tests.helpers.onnx_text import model_of

ROWS = 3
STEP, LENGTH, OTHER = (np.array(value, np.int64) for value in (5, 16, 12))
WINDOW = np.hanning(16).astype(np.float32)
REAL, PAIRS = "float[N,20,6,1] x", "float[N,20,6,2] x"


def dft(axis: int, attributes: str = "", length: str = "") -> str:
    """A node whose axis is the attribute of the operator sets 17 to 19."""
    return f"DFT<axis = {axis}{attributes}>(x{length})"


@pytest.mark.parametrize(
    ("x", "y", "expression"),
    [
        (REAL, "float[N,20,6,2] y", dft(1)),
        (REAL, "float[N,20,6,2] y", dft(2)),
        (REAL, "float[N,11,6,2] y", dft(1, ", onesided = 1")),
        (REAL, "float[N,20,4,2] y", dft(2, ", onesided = 1")),
        (REAL, "float[N,9,6,2] y", dft(1, ", onesided = 1", ", length")),  # cut
        (REAL, "float[N,20,12,2] y", dft(2, "", ", other")),  # with zeros behind
        (REAL, "float[N,20,6,2] y", dft(2, ", inverse = 1")),
        (PAIRS, "float[N,20,6,2] y", dft(1)),
        (PAIRS, "float[N,20,6,2] y", dft(2, ", inverse = 1")),
        ("float[N,100,1] x", "float[N,17,9,2] y", "STFT<onesided = 1>(x, step, window)"),
        ("float[N,100,1] x", "float[N,17,9,2] y", "STFT<onesided = 1>(x, step, , length)"),
        ("float[N,100,1] x", "float[N,17,16,2] y", "STFT<onesided = 0>(x, step, window, length)"),
    ],
)
def test_kernels_transform_each_row(
    tmp_path: Path, compile_file: Callable[..., Any], load_artifact: Any, x: str, y: str, expression: str
) -> None:
    constants = {"step": STEP, "length": LENGTH, "other": OTHER, "window": WINDOW}
    model = model_of(
        f"({x}) => ({y}) {{ y = {expression} }}", **{n: v for n, v in constants.items() if n in expression}
    )
    _same(model, tmp_path / "model.onnx", compile_file, load_artifact)


@pytest.mark.parametrize(("axis", "half", "count"), [(1, 11, 20), (1, 11, 21), (-2, 4, 6)])
def test_kernels_make_real_numbers_of_half_a_transform(
    tmp_path: Path, compile_file: Callable[..., Any], load_artifact: Any, axis: int, half: int, count: int
) -> None:
    """torch.fft.irfft is such a node."""
    sizes = ([half, 6], [count, 6]) if axis == 1 else ([20, half], [20, count])
    shapes = [",".join(["N", *map(str, each)]) for each in sizes]
    node = "y = DFT<inverse = 1, onesided = 1>(x, count, axis)"
    model = model_of(f"(float[{shapes[0]},2] x) => (float[{shapes[1]},1] y) {{ {node} }}", 20,
                     count=np.array(count), axis=np.array(axis))  # fmt: skip
    _same(model, tmp_path / "model.onnx", compile_file, load_artifact)


def _same(model: onnx.ModelProto, path: Path, compile_file: Callable[..., Any], load_artifact: Any) -> None:
    onnx.save(model, path)
    shape = [dim.dim_value or ROWS for dim in model.graph.input[0].type.tensor_type.shape.dim]
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    (wanted,) = onnxruntime.InferenceSession(path).run(None, {"x": x})
    compiled = compile_file(path)
    assert (compiled.manifest.fallback_reason, compiled.manifest.batched, compiled.manifest.islands) == ("", True, ())
    run = load_artifact(compiled.folder)
    answers = np.concatenate([run({"x": row[None]})["y"] for row in x])
    assert np.abs(answers - wanted).max() < 2e-5 * np.abs(wanted).max()  # onnxruntime errs by 5e-6
