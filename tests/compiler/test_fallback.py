"""What is left to onnxruntime, what is refused even so, and what is told about it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from gangway.artifact.format import Engine, Manifest
from gangway.artifact.reader import verify
from gangway.compiler.check.file_check import check_file
from gangway.compiler.command import main as compile_command
from gangway.compiler.errors import ModelError, UnsupportedModelError
from gangway.compiler.frontend.importer import dimension_name
from gangway.measure.plan_command import main as plan_command
from tests.helpers.onnx_models import save_model
from tests.helpers.onnx_networks import FOREIGN, Foreign

node = helper.make_node


@pytest.fixture
def refusal(tmp_path: Path, compile_file: Callable[[Path], Any]) -> Callable[[Foreign], str]:
    """Return the function that compiles what must be refused, and returns why; nothing may be left in the cache."""

    def refusal(network: Foreign) -> str:
        with pytest.raises(UnsupportedModelError) as caught:
            compile_file(network.save(tmp_path / "model.onnx"))
        assert [path for path in (tmp_path / "cache").iterdir() if path.name not in ("kernels", "locks")] == []
        return str(caught.value)

    return refusal


def test_the_artifact_says_what_it_is(tmp_path: Path, compile_file: Callable[[Path], Any]) -> None:
    path = FOREIGN["lstm"]().save(tmp_path / "model.onnx")
    first, second = compile_file(path), compile_file(path)
    assert (first.cached, second.cached) == (False, True)
    manifest: Manifest = verify(first.folder)
    assert manifest.engine is Engine.ONNXRUNTIME
    assert "RandomUniform" in manifest.fallback_reason and "chance" in manifest.fallback_reason
    assert [(layer.name, layer.max_ranks, layer.flops, layer.bytes) for layer in manifest.layers] == [
        ("onnxruntime", 1, 0, 0)
    ]
    assert [(tensor.name, tensor.shape, tensor.row_bytes) for tensor in manifest.outputs] == [
        ("y", (-1, 7, 5), 140),
        ("state", (-1, 1, 5), 20),
    ]
    assert manifest.parameters == 4 * 5 * 6 + 4 * 5 * 5 + 2 * 4 * 5 + 1  # and the axis
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


FLOAT_ROWS = ("float32", ["N", 2])


@dataclass(frozen=True)
class Case:
    """A network, and the shapes and symbols of its inputs and outputs as clients shall see them."""

    nodes: list[Any]
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    shapes: list[tuple[int, ...]]
    batched: bool
    symbols: tuple[str, ...] = ()  # of the first input


@pytest.mark.parametrize(
    "case",
    [
        Case([node("Identity", ["x"], ["y"])], {"x": ("object", ["N", 2])}, {"y": ("object", ["N", 2])},
             [(-1, 2), (-1, 2)], True, ("N", "")),
        Case([node("Erf", ["x"], ["y"])], {"x": ("float32", ["N", "M"])}, {"y": ("float32", ["N", "M"])},
             [(-1, -1), (-1, -1)], True, ("N", "M")),
        Case([node("Erf", ["x"], ["y"])], {"x": ("float32", ["N", "N"])}, {"y": ("float32", ["N", "N"])},
             [(-1, -1), (-1, -1)], False, ("N", "N")),
        Case([node("NonZero", ["x"], ["y"])], {"x": FLOAT_ROWS}, {"y": ("int64", [2, "M"])},
             [(-1, 2), (2, -1)], False, ("N", "")),
        Case([node("Unique", ["x"], ["y"])], {"x": ("float32", [4, 2])}, {"y": ("float32", None)},
             [(4, 2), (-1,)], False, ("", "")),
        Case([node("NonZero", ["x"], ["t"]), node("Transpose", ["t"], ["y"])], {"x": FLOAT_ROWS},
             {"y": ("int64", ["M", 2])}, [(-1, 2), (-1, 2)], False, ("N", "")),  # the trial shows: M is not N
        Case([node("Reshape", ["x", "row"], ["y"])], {"x": FLOAT_ROWS}, {"y": FLOAT_ROWS},
             [(-1, 2), (1, 2)], False, ("N", "")),
        Case([node("Add", ["x", "z"], ["y"])], {"x": FLOAT_ROWS, "z": ("float32", [2])}, {"y": FLOAT_ROWS},
             [(-1, 2), (2,), (-1, 2)], False, ("N", "")),
        Case([node("Reshape", ["x", "four"], ["y"])], {"x": ("float32", ["N", "M"])}, {"y": ("float32", ["N", 2, "M"])},
             [(-1, -1), (-1, 2, 2)], False, ("N", "M")),  # the trial shows that rows become twice as many
        Case([node("Erf", ["x"], ["y"])], {"x": ("float32", [None, None])}, {"y": ("float32", [None, None])},
             [(-1, -1), (-1, -1)], True, ("x.0", "x.1")),
    ],
)  # fmt: skip
def test_what_onnxruntime_can_do_is_left_to_it(tmp_path: Path, compile_file: Callable[[Path], Any], case: Case) -> None:
    constants = {"row": np.array([1, 2]), "four": np.array([-1, 2, 2])}
    used = {name: value for name, value in constants.items() if any(name in item.input for item in case.nodes)}
    manifest = compile_file(Foreign(case.nodes, case.inputs, case.outputs, used).save(tmp_path / "m.onnx")).manifest
    assert manifest.engine is Engine.ONNXRUNTIME
    assert [tensor.shape for tensor in (*manifest.inputs, *manifest.outputs)] == case.shapes
    assert (manifest.batched, manifest.inputs[0].symbols) == (case.batched, case.symbols)


@pytest.mark.parametrize(
    ("inputs", "outputs", "operators", "word"),
    [
        ({"x": ("float32", [2])}, {"y": ("float32", [2])}, [node("Odd", ["x"], ["y"], domain="o.d")], "onnxruntime"),
        (
            {"x": ("float32", [1 << 10, 1 << 19])},
            {"y": ("float32", [1 << 10, 1 << 19])},
            [node("Erf", ["x"], ["y"])],
            "MiB",
        ),
    ],
)
def test_what_nobody_can_serve_is_refused(
    refusal: Callable[[Foreign], str], inputs: Any, outputs: Any, operators: list[Any], word: str
) -> None:
    assert word in refusal(Foreign(operators, inputs, outputs, {}))


def test_dimensions_can_be_given(tmp_path: Path, compile_file: Callable[..., Any]) -> None:
    path = _symbolic(tmp_path)
    whole = compile_file(path)
    assert whole.manifest.engine is Engine.ONNXRUNTIME and "dynamic, 'S'" in whole.manifest.fallback_reason
    keys = {whole.manifest.key}
    for size in (3, 5):
        compiled = compile_file(path, dimensions={"S": size, "z.1": 2})
        manifest = compiled.manifest
        assert (manifest.engine, manifest.batched, compiled.cached) == (Engine.NATIVE, True, False)
        assert [tensor.shape for tensor in (*manifest.inputs, *manifest.outputs)] == [(-1, size), (-1, 2), (-1, size)]
        keys.add(manifest.key)
    assert len(keys) == 3
    assert compile_file(path, dimensions={"S": 5, "z.1": 2}).cached
    for dimensions, word in (({"S": 3}, "'z.1'"), ({"S": 3, "z.1": 2, "T": 1}, "'T'")):
        with pytest.raises(UnsupportedModelError, match=word):
            compile_file(path, dimensions=dimensions)


@pytest.mark.parametrize(
    ("operators", "batched", "mixes"),
    [
        ([node("ReduceMean", ["x"], ["m"], axes=[0]), node("Sub", ["x", "m"], ["y"])], True, True),
        ([node("Reshape", ["x", "pairs"], ["p"]), node("Reshape", ["p", "like_x"], ["y"])], True, False),
        ([node("NonZero", ["x"], ["t"]), node("Cast", ["t"], ["y"], to=1)], False, False),  # zeros have no places
    ],
)
def test_sizes_are_tried_until_one_is_possible(
    tmp_path: Path, compile_file: Callable[[Path], Any], operators: list[Any], batched: bool, mixes: bool
) -> None:
    """What 32 columns need is found out, and what rows do with these; a size that fails shows nothing."""
    constants = {"columns": np.zeros(32, np.float32), "pairs": np.array([-1, 2]), "like_x": np.array([-1, 32])}
    nodes = [node("Add", ["given", "columns"], ["x"]), *operators]
    used = {name: value for name, value in constants.items() if any(name in item.input for item in nodes)}
    path = save_model(tmp_path / "model.onnx", nodes, {"given": ["A", "S"]}, {"y": ["B", "T"]}, used)
    manifest = compile_file(path).manifest
    assert (manifest.trial_sizes, manifest.batched) == ({"A": 1, "S": 32}, batched)
    assert ("ReduceMean" in manifest.mixes_rows) == mixes


def _symbolic(tmp_path: Path) -> Path:
    kinds = {"x": ["N", "S"], "z": ["N", None]}, {"y": ["N", "S"]}
    return save_model(tmp_path / "s.onnx", [node("Relu", ["x"], ["y"])], *kinds)


@pytest.mark.parametrize("other", [[1, 4], [4], []])
def test_a_first_dimension_that_an_input_lacks_is_no_batch(
    network: Any, tmp_path: Path, compile_file: Callable[..., Any], other: list[int]
) -> None:
    graph = network([node("Add", ["x", "w"], ["y"])], {"x": ["S", 4], "w": other}, {"y": ["S", 4]})
    path = graph.save(tmp_path / "model.onnx")
    manifest = compile_file(path).manifest
    assert (manifest.engine, manifest.batched) == (Engine.ONNXRUNTIME, False)
    assert [tensor.shape for tensor in (*manifest.inputs, *manifest.outputs)] == [(-1, 4), tuple(other), (-1, 4)]
    assert "input 'x': dimension 0 is dynamic, 'S'; no batch" in manifest.fallback_reason
    sized = compile_file(path, dimensions={"S": 5}).manifest
    assert (sized.engine, sized.outputs[0].shape) == (Engine.NATIVE, (5, 4))


def test_a_wrongly_declared_output_does_not_matter(
    network: Any, tmp_path: Path, compile_file: Callable[..., Any]
) -> None:
    graph = network([node("Relu", ["x"], ["y"])], {"x": [2, "S", 4]}, {"y": [2, "S"]})
    path = graph.save(tmp_path / "model.onnx")
    assert compile_file(path).manifest.engine is Engine.ONNXRUNTIME
    assert compile_file(path, dimensions={"S": 5}).manifest.outputs[0].shape == (2, 5, 4)


@pytest.mark.parametrize("look", ["compile", "check"])
def test_an_input_of_unknown_rank_is_refused(tmp_path: Path, compile_file: Callable[..., Any], look: str) -> None:
    """onnxruntime names no dimensions then, as of a scalar, so the model would be ready and refuse all requests."""
    nodes = [node("Add", ["x", "scalar"], ["y"])]
    path = save_model(tmp_path / "model.onnx", nodes, {"x": (TensorProto.FLOAT, None), "scalar": []}, {"y": None})
    why = "input 'x' has no shape in the file"
    if look == "check":
        assert why in check_file(path).reason
        return
    with pytest.raises(UnsupportedModelError, match=why):
        compile_file(path)


def test_an_output_of_unknown_rank_is_no_fault(tmp_path: Path, compile_file: Callable[..., Any]) -> None:
    """Zeros in place of its input, as in a trial, are refused."""
    nodes = [node("Unsqueeze", ["x", "axes"], ["a"]), node("Neg", ["a"], ["y"])]
    inputs = {"x": [3, 1, 4], "axes": (TensorProto.INT64, [2])}
    path = save_model(tmp_path / "model.onnx", nodes, inputs, {"y": None})
    assert compile_file(path).manifest.engine is Engine.ONNXRUNTIME


@pytest.mark.parametrize("size", ["?", "-1", "", "None", "unknown", "DYNAMIC", "p2o.DynamicDimension.3", None, -1])
def test_a_dimension_without_a_name_is_called_by_its_place(
    network: Any, tmp_path: Path, compile_file: Callable[..., Any], size: str | int | None
) -> None:
    graph = network([node("Relu", ["x"], ["y"])], {"x": [size, 3, size, size]}, {"y": [size, 3, size, size]})
    path = graph.save(tmp_path / "model.onnx")
    manifest = compile_file(path).manifest
    assert (manifest.engine, manifest.batched) == (Engine.ONNXRUNTIME, True)
    assert manifest.inputs[0].symbols == ("x.0", "", "x.2", "x.3")
    assert not {*manifest.outputs[0].symbols} & {*manifest.inputs[0].symbols} - {""}
    with pytest.raises(UnsupportedModelError, match=r"'S'; there are: 'x.0', 'x.2', 'x.3'"):
        compile_file(path, dimensions={"S": 4})
    if size == "?":
        sized = compile_file(path, dimensions={"x.2": 4, "x.3": 6}).manifest
        assert (sized.engine, sized.outputs[0].shape) == (Engine.NATIVE, (-1, 3, 4, 6))


@pytest.mark.parametrize(
    ("size", "name"),
    [
        *(
            (size, "x.1")
            for size in ("*", "_", "none", "nan", "any", "unk", "Undefined", "unk__12", "x_dynamic_axes_2")
        ),
        *((size, size) for size in ("N", "None2", "s0", "dim_0", "unk_batch", "anything", "s0 + 1", "長さ", "H")),
        (0, ""),
        (7, ""),
    ],
)
def test_names_of_dimensions(size: str | int, name: str) -> None:
    assert dimension_name("x", 1, size) == name


def test_inputs_whose_batch_has_no_name_have_one_together(tmp_path: Path, compile_file: Callable[..., Any]) -> None:
    inputs = {"x": ("float32", ["unk__13", 2]), "z": ("float32", ["unk__14", 2])}
    network = Foreign([node("Add", ["x", "z"], ["y"])], inputs, {"y": ("float32", ["unk__15", 2])}, {})
    manifest = compile_file(network.save(tmp_path / "m.onnx")).manifest
    assert (manifest.engine, manifest.batched) == (Engine.ONNXRUNTIME, True)


def test_what_is_compiled_for_a_number_of_rows_only(tmp_path: Path, compile_file: Callable[..., Any]) -> None:
    operators = {"centre": ("ReduceMean", {"axes": [0]}), "rows": ("ReduceMean", {"axes": [1]})}
    for name, (operator, attributes) in operators.items():
        nodes = [node(operator, ["x"], ["m"], **attributes), node("Sub", ["x", "m"], ["y"])]
        path = save_model(tmp_path / name / "model.onnx", nodes, {"x": ["N", "S"]}, {"y": ["N", "S"]})
        manifest = compile_file(path).manifest
        assert (manifest.fixed_rows, bool(manifest.mixes_rows)) == (name == "centre", name == "centre")
        assert manifest.apart_rows == (name == "rows")
    assert not compile_file(path, dimensions={"N": 3, "S": 2}).manifest.fallback_reason
    assert not compile_file(FOREIGN["lstm"]().save(tmp_path / "model.onnx")).manifest.fixed_rows


def test_rows_with_lengths_that_add_up_are_tried(tmp_path: Path, compile_file: Callable[..., Any]) -> None:
    kinds = {"past": ["a", "P"], "new": ["a", "T"], "mask": ["b", "W"]}, {"y": ["a", "W"]}
    nodes = [node("Concat", ["past", "new"], ["keys"], axis=1), node("Mul", ["keys", "mask"], ["y"])]
    manifest = compile_file(save_model(tmp_path / "m.onnx", nodes, *kinds)).manifest
    sizes = manifest.trial_sizes
    assert (sizes["a"], sizes["b"]) == (1, 1) and sizes["P"] + sizes["T"] == sizes["W"]
    assert manifest.apart_rows


def test_both_reasons_are_told(refusal: Callable[[Foreign], str]) -> None:
    network = Foreign([node("Odd", ["x"], ["y"], domain="o.d")], {"x": ("float32", [2])}, {"y": ("float32", [2])}, {})
    reason = refusal(network)
    assert reason.startswith("onnxruntime refuses it: ") and '"o.d"' in reason and "onnx/model.onnx" not in reason
    assert reason.endswith("; nor can it be compiled: node 'y' (Odd): no such ONNX operator")


def test_contributed_operators_are_onnxruntimes(tmp_path: Path, compile_file: Callable[[Path], Any]) -> None:
    network = Foreign(
        [node("Inverse", ["x"], ["y"], domain="com.microsoft")],
        {"x": ("float32", [4, 4])},
        {"y": ("float32", [4, 4])},
        {},
    )
    assert "com.microsoft.Inverse" in compile_file(network.save(tmp_path / "model.onnx")).manifest.fallback_reason


def test_the_commands_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = FOREIGN["gru"]().save(tmp_path / "gru.onnx")
    arguments = [str(path), "--cache-dir", str(tmp_path / "cache")]
    assert compile_command(arguments) == 0
    text = capsys.readouterr().out
    for words in ("served whole by onnxruntime", "not compiled: ", "chance", "left to onnxruntime in "):
        assert words in text
    assert compile_command(arguments) == 0
    assert "found in the cache" in (text := capsys.readouterr().out) and "not compiled: " in text


@pytest.mark.parametrize("command", [compile_command, plan_command])
def test_commands_say_how_to_give_open_sizes(
    network: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: Callable[[Sequence[str]], int]
) -> None:
    graph = network([node("Relu", ["x"], ["y"])], {"x": ["N", "length", 4, "x.3"]}, {"y": ["N", "length", 4, "x.3"]})
    path, cache = graph.save(tmp_path / "model.onnx"), f"--cache-dir={tmp_path / 'cache'}"
    command([str(path), cache])
    said = capsys.readouterr()
    assert "of one size: --dimension length=SIZE --dimension x.3=SIZE" in said.out + said.err
    assert command([str(path), cache, "--dimension", "length=3", "--dimension", "x.3=5"]) == (command is plan_command)
    said = capsys.readouterr()
    assert "of one size" not in said.out + said.err
    with pytest.raises(SystemExit) as ended:
        command([str(path), cache, "--dimension", "length"])
    assert (ended.value.code, "expected NAME=SIZE, as length=128, got 'length'" in capsys.readouterr().err) == (2, True)


def test_a_truncated_file_is_no_model(tmp_path: Path, compile_file: Callable[[Path], Any]) -> None:
    path = FOREIGN["attention"]().save(tmp_path / "model.onnx")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ModelError, match="truncated") as caught:
        compile_file(path)
    assert not isinstance(caught.value, UnsupportedModelError)
