"""Files whose nodes are in another order, or contradict each other, and what is told of them first."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from gangway.artifact.format import Engine
from gangway.artifact.onnx_session import reason_of
from gangway.compiler.errors import ModelError, UnreadableModelError
from gangway.compiler.model_file import parse, put_in_order
from tests.helpers.onnx_models import save_model

node = helper.make_node
RANDOM = np.random.default_rng(8)
FLOAT, HALF, BOOL = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BOOL
saved = partial(save_model, opset=18)


def test_casts_at_the_end_of_the_file(
    tmp_path: Path, compile_file: Callable[..., Any], load_artifact: Callable[[Path], Any]
) -> None:
    """As tools write that make a model one of float16: it is compiled all the same."""
    nodes = [
        node("MatMul", ["h", "w"], ["m"]),
        node("Relu", ["m"], ["r"]),
        node("Cast", ["r"], ["y"], to=FLOAT),
        node("Cast", ["x"], ["h"], to=HALF),
    ]
    weights = {"w": RANDOM.standard_normal((24, 8)).astype(np.float16)}
    kinds = {"x": (FLOAT, [3, 24])}, {"y": (FLOAT, [3, 8])}
    path = saved(tmp_path / "model.onnx", nodes, *kinds, weights)
    runner = load_artifact(compile_file(path).folder)
    assert runner.manifest.engine is Engine.NATIVE and not runner.manifest.islands
    feeds = {"x": RANDOM.standard_normal((3, 24)).astype(np.float32)}
    expected = onnxruntime.InferenceSession(path).run(None, feeds)[0]
    np.testing.assert_allclose(runner(feeds)["y"], expected, rtol=2e-3, atol=1e-2)


def test_graphs_inside_and_functions_are_sorted(
    tmp_path: Path, compile_file: Callable[..., Any], load_artifact: Callable[[Path], Any]
) -> None:
    """A node also comes after what graphs inside of it read."""
    result = [helper.make_tensor_value_info("r", FLOAT, [4])]
    inner = [node("Add", ["a", "late"], ["r"]), node("Mul", ["x", "x"], ["a"])]
    bodies = {
        "then_branch": helper.make_graph(inner, "then", [], result),
        "else_branch": helper.make_graph([node("Neg", ["late"], ["r"])], "else", [], result),
    }
    own = helper.make_function(
        "own", "Twice", ["a"], ["b"],
        [node("Add", ["c", "a"], ["b"]), node("Identity", ["a"], ["c"])], [helper.make_opsetid("", 18)],
    )  # fmt: skip
    nodes = [
        node("Twice", ["i"], ["y"], domain="own"),
        node("If", ["go"], ["i"], **bodies),
        node("Exp", ["x"], ["late"]),
    ]
    path = tmp_path / "model.onnx"
    saved(path, nodes, {"x": (FLOAT, [4]), "go": (BOOL, [])}, {"y": (FLOAT, [4])}, functions=[own], domains={"own": 1})
    model = parse(path)[0]
    assert put_in_order(model) and not put_in_order(model)
    assert [each.op_type for each in model.graph.node] == ["Exp", "If", "Twice"]
    branch = next(item.g for item in model.graph.node[1].attribute if item.name == "then_branch")
    assert [each.op_type for each in branch.node] == ["Mul", "Add"]
    assert [each.op_type for each in model.functions[0].node] == ["Identity", "Add"]
    folder = compile_file(path).folder
    feeds = {"x": np.arange(4, dtype=np.float32), "go": np.array(True)}
    session = onnxruntime.InferenceSession(folder / "onnx" / "model.onnx")
    np.testing.assert_allclose(session.run(None, feeds)[0], 2 * (feeds["x"] ** 2 + np.exp(feeds["x"])), rtol=1e-6)


def test_nodes_in_order_stay_where_they_are(tmp_path: Path) -> None:
    nodes = [node("Neg", ["x"], [name], name=name) for name in "cab"] + [node("Sum", ["a", "b", "c"], ["y"])]
    path = saved(tmp_path / "model.onnx", nodes, {"x": (FLOAT, [2])}, {"y": (FLOAT, [2])})
    model = parse(path)[0]
    assert not put_in_order(model) and [each.name for each in model.graph.node] == ["c", "a", "b", ""]


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        (
            [node("Add", ["x", "b"], ["a"], name="first"), node("Neg", ["a"], ["b"]), node("Neg", ["b"], ["y"])],
            "in a circle: node 'first' (Add), node 'b' (Neg)",
        ),
        ([node("Mul", ["x", "gone"], ["y"])], "node 'y' (Mul) reads 'gone', which no input, weight or node makes"),
        (
            [node("Split", ["x"], ["y", "b", "c", "d"], name="cut", num_outputs=3)],
            "node 'cut' (Split): num_outputs is 3, but it has 4 outputs",
        ),
    ],
)
def test_what_no_engine_can_read(tmp_path: Path, compile_file: Callable[..., Any], nodes: Any, words: str) -> None:
    path = saved(tmp_path / "model.onnx", nodes, {"x": (FLOAT, ["N", "M"])}, {"y": (FLOAT, None)})
    with pytest.raises(UnreadableModelError) as caught:
        compile_file(path)
    assert words in str(caught.value)


def reason(path: Path, compile_file: Callable[..., Any]) -> str:
    with pytest.raises(ModelError) as caught:
        compile_file(path)
    return str(caught.value)


@pytest.mark.parametrize(("length", "parts", "each"), [(2, 4, 1), (9, 7, 2), (4, 3, 2), (0, 2, 1)])
def test_more_parts_than_there_are(
    tmp_path: Path, compile_file: Callable[..., Any], length: int, parts: int, each: int
) -> None:
    """onnxruntime opens such a model, and answers no request: it is refused when it is loaded."""
    names = [f"part{index}" for index in range(parts)]
    nodes = [node("Split", ["x"], names, name="cut", axis=1, num_outputs=parts)]
    kinds = {"x": (FLOAT, [3, length])}, dict.fromkeys(names, (FLOAT, None))
    text = reason(saved(tmp_path / "model.onnx", nodes, *kinds), compile_file)
    assert text.startswith(f"node 'cut' (Split): {length} along axis 1 cannot be {parts} parts of {each}, ")
    assert "; and onnxruntime refuses it: Split node 'cut': " in text


@pytest.mark.parametrize(("length", "parts"), [(7, 4), (5, 3), (5, 5), (6, 1)])
def test_parts_of_which_the_last_is_smaller(
    tmp_path: Path, compile_file: Callable[..., Any], load_artifact: Callable[[Path], Any], length: int, parts: int
) -> None:
    names = [f"part{index}" for index in range(parts)]
    nodes = [node("Exp", ["x"], ["e"]), node("Split", ["e"], names, axis=1, num_outputs=parts)]
    path = saved(tmp_path / "model.onnx", nodes, {"x": (FLOAT, [3, length])}, dict.fromkeys(names, (FLOAT, None)))
    feeds = {"x": RANDOM.standard_normal((3, length)).astype(np.float32)}
    session = onnxruntime.InferenceSession(path)
    compiled = compile_file(path)
    if compiled.manifest.engine is Engine.NATIVE:
        answers = load_artifact(compiled.folder)(feeds)
        for name, expected in zip(names, session.run(None, feeds), strict=True):
            np.testing.assert_allclose(answers[name], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("nodes", "theirs", "ours"),
    [
        (
            [node("NonZero", ["x"], ["t"]), node("Cast", ["t"], ["f"], to=FLOAT),
             node("FastGelu", ["f"], ["y"], domain="com.microsoft", odd=1)],
            "Unrecognized attribute: odd for operator FastGelu", "depends on data",
        ),
        (
            [node("NonZero", ["x"], ["t"]), node("Cast", ["t"], ["d"], to=TensorProto.DOUBLE),
             node("Celu", ["d"], ["y"])],
            "Type 'tensor(double)' of input parameter (d) of operator (Celu)", "",
        ),
        (
            [node("NonZero", ["x"], ["t"]), node("Strange", ["t"], ["y"], domain="my.own")],
            "my.own:Strange", "no such ONNX operator",
        ),
    ],
)  # fmt: skip
def test_the_cause_comes_before_what_follows_from_it(
    tmp_path: Path, compile_file: Callable[..., Any], nodes: Any, theirs: str, ours: str
) -> None:
    """What the compiler cannot see is no cause where onnxruntime refuses the model, too."""
    path = saved(tmp_path / "model.onnx", nodes, {"x": (FLOAT, [2, 2])}, {"y": (TensorProto.UNDEFINED, None)})
    model = onnx.load(path)
    model.graph.output[0].ClearField("type")
    model.opset_import.extend([helper.make_opsetid(each.domain, 1) for each in model.graph.node if each.domain])
    onnx.save(model, path)
    text = reason(path, compile_file)
    first, _, second = text.partition("; nor can it be compiled: ") if "nor can" in text else (text, "", text)
    assert theirs in first and ours in second
    assert str(tmp_path) not in text and "onnxruntime_src" not in text


def test_a_reason_has_no_places_in_it(tmp_path: Path) -> None:
    nodes = [node("Gather", ["x", "i"], ["y"], name="pick")]
    path = saved(tmp_path / "model.onnx", nodes, {"x": (FLOAT, [2]), "i": (7, [1])}, {"y": (FLOAT, [1])})
    session = onnxruntime.InferenceSession(path)
    with pytest.raises(Exception, match="indices") as caught:
        session.run(None, {"x": np.zeros(2, np.float32), "i": np.array([5])})
    assert reason_of(caught.value).startswith("Gather node 'pick': ") and ".cc" not in reason_of(caught.value)
    model = onnx.load(path)
    model.ir_version = 99
    with pytest.raises(Exception, match="IR version") as caught:
        onnxruntime.InferenceSession(model.SerializeToString())
    assert reason_of(caught.value).startswith("Unsupported model IR version: 99")
