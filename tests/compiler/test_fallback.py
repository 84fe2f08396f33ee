"""What is left to onnxruntime, what is refused even so, and what is told about it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from gangway.artifact.format import Engine, Manifest
from gangway.artifact.reader import verify
from gangway.compiler.command import main as compile_command
from gangway.compiler.errors import ModelError, UnsupportedModelError
from onnx import helper

from tests.onnx_networks import FOREIGN, Foreign

node = helper.make_node


@pytest.fixture
def refusal(tmp_path: Path, compile_file: Callable[[Path], Any]) -> Callable[[Foreign], str]:
    """Return the function that compiles what must be refused, and returns why; nothing may be left in the cache."""

    def refusal(network: Foreign) -> str:
        with pytest.raises(UnsupportedModelError) as caught:
            compile_file(network.save(tmp_path / "model.onnx"))
        assert [path for path in (tmp_path / "cache").iterdir() if path.name != "locks"] == []
        return str(caught.value)

    return refusal


def test_the_artifact_says_what_it_is(tmp_path: Path, compile_file: Callable[[Path], Any]) -> None:
    path = FOREIGN["lstm"]().save(tmp_path / "model.onnx")
    first, second = compile_file(path), compile_file(path)
    assert (first.cached, second.cached) == (False, True)
    manifest: Manifest = verify(first.folder)
    assert manifest.engine is Engine.ONNXRUNTIME
    assert "If" in manifest.fallback_reason and "branch" in manifest.fallback_reason
    assert [(layer.name, layer.max_ranks, layer.flops, layer.bytes) for layer in manifest.layers] == [
        ("onnxruntime", 1, 0, 0)
    ]
    assert [(tensor.name, tensor.shape, tensor.row_bytes) for tensor in manifest.outputs] == [
        ("y", (-1, 7, 5), 140),
        ("state", (-1, 1, 5), 20),
    ]
    assert manifest.parameters == 4 * 5 * 6 + 4 * 5 * 5 + 2 * 4 * 5 + 2  # and the axis, and the branch's condition
    assert (first.folder / "onnx" / "model.onnx").read_bytes() == path.read_bytes()
    assert "onnxruntime" in manifest.phase_us


def test_weights_beside_the_model_are_copied(tmp_path: Path, compile_file: Callable[[Path], Any]) -> None:
    network = FOREIGN["gather"]()
    folder = tmp_path / "model"
    path = network.save(folder / "net.onnx", save_as_external_data=True, location="data.bin", size_threshold=100)
    compiled = compile_file(path)
    assert set(compiled.manifest.files) == {"onnx/model.onnx", "onnx/data.bin"}
    (folder / "data.bin").write_bytes(bytes((folder / "data.bin").stat().st_size))
    assert compile_file(path).manifest.key != compiled.manifest.key
    (compiled.folder / "onnx" / "data.bin").write_bytes(b"damaged")
    network.save(path, save_as_external_data=True, location="data.bin", size_threshold=100)
    assert compile_file(path).cached is False


def test_weights_elsewhere_are_refused(tmp_path: Path, compile_file: Callable[[Path], Any]) -> None:
    path = FOREIGN["gather"]().save(
        tmp_path / "a" / "model.onnx", save_as_external_data=True, location="data.bin", size_threshold=100
    )
    (tmp_path / "a" / "data.bin").rename(tmp_path / "data.bin")
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = "../data.bin" if entry.key == "location" else entry.value
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError):
        compile_file(path)


@pytest.mark.parametrize(
    ("inputs", "outputs", "operators", "word"),
    [
        ({"x": ("object", ["N", 2])}, {"y": ("object", ["N", 2])}, [node("Identity", ["x"], ["y"])], "string"),
        ({"x": ("float32", ["N", "M"])}, {"y": ("float32", ["N", "M"])}, [node("Erf", ["x"], ["y"])], "dimension 1"),
        ({"x": ("float32", ["N", 2])}, {"y": ("int64", [2, "M"])}, [node("NonZero", ["x"], ["y"])], "dimension 1"),
        ({"x": ("float32", [4, 2])}, {"y": ("float32", None)}, [node("Unique", ["x"], ["y"])], "first dimension"),
        ({"x": ("float32", [2])}, {"y": ("float32", [2])}, [node("Odd", ["x"], ["y"], domain="o.d")], "onnxruntime"),
        (
            {"x": ("float32", ["N", 2])},
            {"y": ("int64", ["M", 2])},
            [node("NonZero", ["x"], ["t"]), node("Transpose", ["t"], ["y"])],
            "output 'y' of 1 rows has the shape [0, 2] instead of [1, 2]",
        ),
        (
            {"x": ("float32", ["N", 2])},
            {"y": ("float32", ["N", 2])},
            [node("Reshape", ["x", "row"], ["y"])],
            "first dimension",
        ),
        (
            {"x": ("float32", ["N", 2]), "z": ("float32", [2])},
            {"y": ("float32", ["N", 2])},
            [node("Add", ["x", "z"], ["y"])],
            "first dimension",
        ),
        (
            {"x": ("float32", [1 << 10, 1 << 19])},
            {"y": ("float32", [1 << 10, 1 << 19])},
            [node("Erf", ["x"], ["y"])],
            "MiB",
        ),
    ],
)
def test_what_a_request_cannot_hold_is_refused(
    refusal: Callable[[Foreign], str], inputs: Any, outputs: Any, operators: list[Any], word: str
) -> None:
    constants = {"row": np.array([1, 2])}
    assert word in refusal(Foreign(operators, inputs, outputs, constants))


def test_both_reasons_are_told(refusal: Callable[[Foreign], str]) -> None:
    network = Foreign([node("Odd", ["x"], ["y"], domain="o.d")], {"x": ("float32", [2])}, {"y": ("float32", [2])}, {})
    reason = refusal(network)
    assert "node 'y' (Odd): no such ONNX operator; and onnxruntime refuses it: " in reason


def test_contributed_operators_are_onnxruntimes(tmp_path: Path, compile_file: Callable[[Path], Any]) -> None:
    network = Foreign(
        [node("BiasGelu", ["x", "bias"], ["y"], domain="com.microsoft")],
        {"x": ("float32", ["N", 4])},
        {"y": ("float32", ["N", 4])},
        {"bias": np.ones(4, np.float32)},
    )
    assert "BiasGelu" in compile_file(network.save(tmp_path / "model.onnx")).manifest.fallback_reason


def test_the_commands_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = FOREIGN["gru"]().save(tmp_path / "gru.onnx")
    arguments = [str(path), "--cache-dir", str(tmp_path / "cache")]
    assert compile_command(arguments) == 0
    text = capsys.readouterr().out
    for words in ("served whole by onnxruntime on one core", "not compiled: ", "If", "left to onnxruntime in "):
        assert words in text
    assert compile_command(arguments) == 0
    assert "found in the cache" in (text := capsys.readouterr().out) and "not compiled: " in text


def test_a_truncated_file_is_no_model(tmp_path: Path, compile_file: Callable[[Path], Any]) -> None:
    path = FOREIGN["attention"]().save(tmp_path / "model.onnx")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ModelError, match="truncated") as caught:
        compile_file(path)
    assert not isinstance(caught.value, UnsupportedModelError)
