"""Models that cannot be compiled: the reason is told, and nothing is left behind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from gangway.artifact.cache import Cache
from gangway.artifact.format import MAX_TENSORS, Engine
from gangway.compiler.errors import ModelError, UnsupportedModelError
from gangway.compiler.pipeline import compile_model
from gangway.compiler.target import detect

node = helper.make_node
ONES = np.ones((4, 4, 3, 3), np.float32)
IMAGE: dict[str, list[int | str]] = {"x": ["N", 4, 8, 8]}


@pytest.fixture
def refused(tmp_path: Path, compile_file: Callable[[Path], Any]) -> Callable[[Path], ModelError]:
    """Return the function that compiles what must be refused, and returns the error."""

    def refused(path: Path) -> ModelError:
        with pytest.raises(ModelError) as caught:
            compile_file(path)
        left = [p for p in (tmp_path / "cache").rglob("*") if p.is_file() and p.parent.name != "locks"]
        assert left == []
        return caught.value

    return refused


@pytest.fixture
def reason(compile_file: Callable[[Path], Any]) -> Callable[[Path], str]:
    """Return the function that says why a model is not compiled, whether or not onnxruntime serves it then."""

    def reason(path: Path) -> str:
        try:
            return str(compile_file(path).manifest.fallback_reason)
        except UnsupportedModelError as error:
            return str(error)

    return reason


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([node("Einsum", ["x", "w"], ["y"], name="odd", equation="nchw,oihw->nc")], ["odd", "Einsum"]),
        ([node("Frobnicate", ["x"], ["y"], name="odd")], ["odd", "Frobnicate", "no such ONNX operator"]),
        ([node("Own", ["x"], ["y"], name="odd", domain="my.domain")], ["odd", "Own"]),
        ([node("Conv", ["x", "x"], ["y"], name="odd")], ["odd", "an input other than the first depends on the batch"]),
        ([node("Slice", ["x", "none", "none", "axis"], ["y"])], ["'y' is empty"]),
        ([node("Conv", ["x", "w5"], ["y"], name="odd")], ["odd", "4 channels"]),
        ([node("Reshape", ["x", "two"], ["y"], name="odd")], ["odd", "mixes rows of the batch"]),
    ],
)
def test_unsupported_operators_are_named(
    reason: Callable[[Path], str], network: Any, tmp_path: Path, nodes: list[Any], words: list[str]
) -> None:
    constants = {
        "w": ONES,
        "none": np.array([0]),
        "axis": np.array([1]),
        "w5": np.ones((4, 5, 3, 3), np.float32),
        "two": np.array([2, -1], np.int64),
    }
    used = {name: constants[name] for item in nodes for name in item.input if name in constants}
    told = reason(network(nodes, IMAGE, {"y": None}, used).save(tmp_path / "model.onnx"))
    for word in words:
        assert word in told


@pytest.mark.parametrize(
    ("nodes", "word"),
    [
        ([node("Conv", ["x", "w"], ["y"], name="bad", strides=[1, 1, 1])], "stride"),
        ([node("Add", ["x", "w"], ["y"], name="bad")], "Incompatible dimensions"),
        ([node("Relu", ["nobody"], ["y"], name="bad")], "node 'bad' (Relu) reads 'nobody'"),
        ([node("Relu", ["x"], ["y"], name="bad", colour="red")], "colour"),
    ],
)
def test_contradictory_models_are_explained(
    refused: Callable[[Path], ModelError], network: Any, tmp_path: Path, nodes: list[Any], word: str
) -> None:
    used = {"w": ONES} if "w" in nodes[0].input else {}
    assert word in str(refused(network(nodes, IMAGE, {"y": None}, used).save(tmp_path / "model.onnx")))


@pytest.mark.parametrize(
    ("declared", "inferred"),
    [(["N", 4, 8, 9], (-1, 4, 8, 8)), (["N", 4], (-1, 4, 8, 8)), ([3, 4, 8, 8], (-1, 4, 8, 8))],
)
def test_kernels_compute_a_file_whose_output_is_wrongly_declared(
    compile_file: Any, network: Any, tmp_path: Path, declared: list[Any], inferred: tuple[int, ...]
) -> None:
    """skl2onnx declares as many columns as the input has for a PLSRegression and a RidgeClassifier."""
    graph = network([node("Relu", ["x"], ["y"])], IMAGE, {"y": declared})
    manifest = compile_file(graph.save(tmp_path / "model.onnx")).manifest
    assert (manifest.engine, manifest.batched) == (Engine.NATIVE, True)
    assert [tensor.shape for tensor in manifest.outputs] == [inferred]


def test_inputs_of_other_types_are_not_compiled_even_if_unused(reason: Any, network: Any, tmp_path: Path) -> None:
    graph = network([node("Shape", ["x"], ["s"]), node("Identity", ["x"], ["y"])], IMAGE, {"y": None}, {}, 8)
    assert "string" in reason(graph.save(tmp_path / "model.onnx"))


def test_tensors_too_large_for_a_kernel_are_refused(refused: Any, network: Any, tmp_path: Path) -> None:
    graph = network([node("Relu", ["x"], ["y"])], {"x": ["N", 1 << 10, 1 << 10, 1 << 10]}, {"y": None})
    assert "MiB" in str(refused(graph.save(tmp_path / "model.onnx")))


def test_limits_of_the_artifact_are_told_before_compiling(refused: Any, network: Any, tmp_path: Path) -> None:
    outputs = {f"y{n}": None for n in range(MAX_TENSORS + 1)}
    graph = network([node("Relu", ["x"], [name]) for name in outputs], IMAGE, outputs)
    assert f"{len(outputs)} outputs" in str(refused(graph.save(tmp_path / "model.onnx")))
    constant = network([node("Relu", ["w"], ["y"])], {}, {"y": None}, {"w": ONES})
    assert "0 inputs" in str(refused(constant.save(tmp_path / "model.onnx")))


def test_old_operator_sets_are_not_compiled(reason: Any, network: Any, tmp_path: Path) -> None:
    path = network([node("Relu", ["x"], ["y"])], IMAGE, {"y": None}).save(tmp_path / "model.onnx")
    model = onnx.load(path)
    model.opset_import[0].version = 6
    path.write_bytes(model.SerializeToString())
    assert "older than 7" in reason(path)


def test_files_that_are_no_models(refused: Any, network: Any, tmp_path: Path) -> None:
    graph = network([node("Conv", ["x", "w"], ["y"])], IMAGE, {"y": None}, {"w": ONES})
    content = graph.save(tmp_path / "whole.onnx").read_bytes()
    path = tmp_path / "model.onnx"
    for broken in (b"", b"\x00", b"not a model", content[: len(content) // 2], content[:-1], content[100:]):
        path.write_bytes(broken)
        assert "model.onnx" in str(refused(path)) or "ONNX" in str(refused(path))


def test_no_cut_or_damaged_byte_crashes(compile_file: Any, network: Any, tmp_path: Path) -> None:
    """Whatever a damaged file does, it is reported as a ModelError, or compiles (where the damage has no meaning)."""
    graph = network(
        [node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]), node("Relu", ["a"], ["y"])],
        {"x": ["N", 1, 4, 4]},
        {"y": ["N", 1, 4, 4]},
        {"w": np.ones((1, 1, 3, 3), np.float32)},
    )
    content = graph.save(tmp_path / "whole.onnx").read_bytes()
    random = np.random.default_rng(5)
    path = tmp_path / "model.onnx"
    refusals = 0
    for _ in range(60):
        damaged = bytearray(content)
        damaged[random.integers(len(damaged))] = random.integers(256)
        path.write_bytes(damaged[: random.integers(len(damaged) // 2, 2 * len(damaged))])
        try:
            compile_file(path)
        except ModelError:
            refusals += 1
    assert refusals > 20


def test_weights_beside_the_model(compile_file: Any, refused: Any, network: Any, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    graph = network([node("Conv", ["x", "w"], ["y"])], IMAGE, {"y": None}, {"w": ONES})
    path = graph.save(tmp_path / "model.onnx", save_as_external_data=True, location="data.bin", size_threshold=0)
    first = compile_file(path).manifest.key
    data = tmp_path / "data.bin"
    data.write_bytes(random.standard_normal(data.stat().st_size // 4, np.float32).tobytes())
    data.rename(tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")  # as caches of models do it
    again = compile_file(path).manifest
    assert again.key != first and again.engine is Engine.NATIVE
    data.unlink()
    with pytest.raises((ModelError, OSError)):
        compile_file(path)


def test_weights_outside_of_the_model_s_folder_are_refused(refused: Any, network: Any, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(4096))
    graph = network([node("Conv", ["x", "w"], ["y"])], IMAGE, {"y": None}, {"w": ONES})
    path = graph.save(tmp_path / "folder" / "model.onnx", save_as_external_data=True, location="d", size_threshold=0)
    model = onnx.load(path, load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = "../secret"
    path.write_bytes(model.SerializeToString())
    assert "external data: '../secret' leaves the model's folder" in str(refused(path))


def test_a_file_that_changes_meanwhile_poisons_no_cache(network: Any, tmp_path: Path) -> None:
    path = network([node("Relu", ["x"], ["y"])], IMAGE, {"y": None}).save(tmp_path / "model.onnx")
    other = network([node("Identity", ["x"], ["y"])], IMAGE, {"y": None})

    def progress(phase: str, done: int, total: int) -> None:
        if phase == "read":
            other.save(path)

    with pytest.raises(ModelError, match="changed"):
        compile_model(path, "test", Cache(tmp_path / "cache"), detect(), progress)
