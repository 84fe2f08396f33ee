"""`gangway quantize`: the model that it writes, as onnxruntime answers it, and what it says of wrong data."""

import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from gangway.clients.inputs import Array
from gangway.compiler.quantize_command import main
from tests.helpers.onnx_models import save_model

FEATURES, HIDDEN, CLASSES = 32, 64, 8


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two dense layers in a model directory."""
    random = np.random.default_rng(0)
    shapes = {"w": (FEATURES, HIDDEN), "v": (HIDDEN, CLASSES)}
    weights = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], "first"),
        helper.make_node("Relu", ["a"], ["b"], "relu"),
        helper.make_node("MatMul", ["b", "v"], ["y"], "second"),
    ]
    path = tmp_path / "models" / "dense" / "1" / "model.onnx"
    return save_model(path, nodes, {"x": ["N", FEATURES]}, {"y": ["N", CLASSES]}, weights).parents[1]


def write_examples(folder: Path, count: int, suffix: str) -> None:
    folder.mkdir()
    for number in range(count):
        x = np.random.default_rng(number).standard_normal((4, FEATURES)).astype(np.float32)
        path = folder / f"{number:03}{suffix}"
        np.save(path, x) if suffix == ".npy" else np.savez(path, x=x)


@pytest.mark.parametrize("suffix", [".npz", ".npy"])
def test_the_model_that_is_written(
    model: Path, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_examples(tmp_path / "data", 10, suffix)
    assert main([str(model), "--data", str(tmp_path / "data")]) == 0
    said = capsys.readouterr().out
    made = model.parent / "dense_int8" / "1" / "model.onnx"
    assert "8 examples for ranges, 2 others compared" in said and str(made) in said
    found = re.search(r"cosine (0\.\d+)", said)
    assert found and float(found[1]) > 0.99
    graph = onnx.load(made).graph
    kinds = {each.data_type for each in graph.initializer if each.name.endswith("_quantized")}
    assert kinds == {TensorProto.INT8}, "weights"
    x = np.random.default_rng(99).standard_normal((3, FEATURES)).astype(np.float32)
    wanted, got = (
        onnxruntime.InferenceSession(str(path)).run(None, {"x": x})[0] for path in (model / "1" / "model.onnx", made)
    )
    assert np.abs(got - wanted).max() < 0.1 * np.abs(wanted).max()
    assert (got != wanted).any()


@pytest.mark.parametrize("opset", [7, 11, 12])
def test_a_model_from_before_scales_per_channel(
    model: Path, tmp_path: Path, opset: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = model / "1" / "model.onnx"
    older = onnx.load(path)
    older.opset_import[0].version = opset
    onnx.save(older, path)
    write_examples(tmp_path / "data", 10, ".npz")
    assert main([str(path), "--data", str(tmp_path / "data"), f"--output={tmp_path / 'int8.onnx'}"]) == 0
    assert float(re.findall(r"cosine (0\.\d+)", capsys.readouterr().out)[0]) > 0.99
    scales = [each for each in onnx.load(tmp_path / "int8.onnx").graph.initializer if each.name == "w_scale"]
    assert scales[0].dims == [HIDDEN], "one for each column"


def test_what_stays_float32(model: Path, tmp_path: Path) -> None:
    write_examples(tmp_path / "data", 2, ".npz")
    made = tmp_path / "made.onnx"
    assert main([str(model), "--data", str(tmp_path / "data"), "--keep", "second", "-o", str(made)]) == 0
    names = {each.name for each in onnx.load(made).graph.initializer}
    assert "v" in names and "w" not in names and "w_quantized" in names


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (None, [], "is no folder of"),
        ("empty", [], "has no .npz or .npy file"),
        ("other", [], "an example has no array 'x'; it has z"),
        ("good", ["--keep", "Softmax"], "neither operators nor nodes called Softmax"),
        ("wrong", [], "cannot quantise"),
    ],
)
def test_wrong_data(
    model: Path,
    tmp_path: Path,
    make: str | None,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = tmp_path / "data"
    arrays: dict[str | None, dict[str, Array]] = {
        "other": {"z": np.zeros(3)},
        "good": {"x": np.zeros((1, FEATURES), np.float32)},
        "wrong": {"x": np.zeros((1, FEATURES + 1), np.float32)},
    }
    if make is not None:
        data.mkdir()
    if make in arrays:
        np.savez(data / "a.npz", **arrays[make])
    assert main([str(model), "--data", str(data), *arguments]) == 1
    said = capsys.readouterr()
    assert message in said.err and not said.out
    assert not (model.parent / "dense_int8" / "1" / "model.onnx").exists()
