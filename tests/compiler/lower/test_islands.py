"""Nodes that onnxruntime computes as layers of a compiled model, compared with onnxruntime on the whole model."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from gangway.artifact.format import Engine
from gangway.compiler.frontend.graph import Graph, Node, TensorType
from gangway.compiler.lower.islands import form_islands
from tests.helpers.tail_networks import detector, extracted, image, labels

node = helper.make_node
floats = np.random.default_rng(5).standard_normal
FILTERS = floats((16, 3, 3, 3)).astype("f")
MORE_FILTERS = floats((8, 16, 3, 3)).astype("f")


def test_islands_first_in_the_middle_and_last(check: Any, network: Any) -> None:
    """The second has two results of different types; the third has one of unknown shape inside of it."""
    nodes = [
        node("TopK", ["x", "ten"], ["largest", "rest"], axis=3, sorted=0),
        node("Conv", ["largest", "w"], ["c"], pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["r"]),
        node("TopK", ["r", "five"], ["values", "places"], axis=3, sorted=0),
        node("Cast", ["places"], ["numbers"], to=TensorProto.FLOAT),
        node("Greater", ["values", "one"], ["high"]),
        node("Add", ["values", "numbers"], ["sum"]),
        node("Reshape", ["high", "line"], ["flags"]),
        node("Reshape", ["sum", "line"], ["all"]),
        node("Compress", ["all", "flags"], ["some"]),  # as many as there are
        node("Exp", ["some"], ["e"]),
        node("ReduceMean", ["e"], ["mean"], keepdims=0),
        node("Conv", ["values", "v"], ["d"], pads=[1, 1, 1, 1]),
        node("Add", ["d", "mean"], ["f"]),
        node("TopK", ["f", "two"], ["y", "z"], axis=1, sorted=0),
        node("Cast", ["z"], ["u"], to=TensorProto.FLOAT),
    ]
    constants = {
        "w": FILTERS,
        "v": MORE_FILTERS,
        "one": np.array(1, np.float32),
        "line": np.array([-1]),
        **{name: np.array([count]) for name, count in {"two": 2, "five": 5, "ten": 10}.items()},
    }
    operators = check(network(nodes, {"x": [1, 3, 12, 20]}, {"y": None, "u": None}, constants))
    assert [name for name in operators if "TopK" in name or "Compress" in name] == [
        "TopK",
        "TopK",
        "Compress, Exp, ReduceMean",
        "TopK",
    ]
    assert operators[0] == "TopK"


def test_islands_with_a_path_between_them_stay_two(check: Any, network: Any) -> None:
    """One island of all three nodes would read what is made of its own results."""
    nodes = [
        node("TopK", ["x", "five"], ["a", "_a"], sorted=0),
        node("MatMul", ["a", "m"], ["b"]),
        node("TopK", ["b", "five"], ["c", "_c"], sorted=0),
        node("TopK", ["a", "two"], ["d", "_d"], sorted=0),
        node("ReduceMax", ["d"], ["e"], axes=[1]),
        node("Mul", ["c", "e"], ["y"]),
    ]
    constants = {"m": floats((5, 9)).astype("f"), "two": np.array([2]), "five": np.array([5])}
    operators = check(network(nodes, {"x": ["N", 20]}, {"y": None}, constants))
    assert operators.count("TopK") == 2  # the third is with the first


def test_what_lies_between_nodes_that_must_be_together_is_with_them() -> None:
    """A tensor of unknown shape cannot be between two layers, so a native node on another path joins the island."""
    nodes = (
        Node("first", "Odd", ("x",), ("unknown", "known")),
        Node("native", "Relu", ("known",), ("r",)),
        Node("beside", "Relu", ("known",), ("s",)),
        Node("second", "Odd", ("unknown", "r"), ("t",)),
        Node("third", "Odd", ("t", "s"), ("y",)),
    )
    types = dict.fromkeys(("x", "known", "r", "s", "t", "y"), TensorType((1, 4), "float32"))
    graph = Graph(("x",), ("y",), False, nodes, {}, types)
    islands = form_islands(graph, {"unknown", "t"})
    assert [[item.name for item in island] for island in islands] == [["first", "native", "second"]]
    islands = form_islands(graph, {"unknown", "t", "y"})  # the last cannot be with them: `beside` is between
    assert [[item.name for item in island] for island in islands] == [["first", "native", "second"], ["third"]]


@pytest.fixture(scope="module")
def branches() -> dict[str, Any]:
    """Graphs that read tensors from outside, one of them a constant."""
    outputs = [helper.make_tensor_value_info("same", TensorProto.FLOAT, None)]
    inner = [helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)]
    nested = {
        "then_branch": helper.make_graph([node("Sub", ["c", "r"], ["inner"])], "nested", [], inner),
        "else_branch": helper.make_graph([node("Neg", ["r"], ["inner"])], "nested", [], inner),
    }
    return {
        "then_branch": helper.make_graph([node("Mul", ["c", "two"], ["same"])], "then", [], outputs),
        "else_branch": helper.make_graph([node("If", ["large"], ["same"], **nested)], "else", [], outputs),
    }


def test_a_branch_that_a_request_takes(
    compile_file: Any, load_artifact: Any, network: Any, tmp_path: Path, branches: dict[str, Any]
) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["r"]),
        node("ReduceSum", ["x"], ["s"], keepdims=0),
        node("Greater", ["s", "zero"], ["positive"]),
        node("Less", ["s", "small"], ["large"]),
        node("If", ["positive"], ["f"], **branches),
        node("GlobalAveragePool", ["f"], ["y"]),
    ]
    constants = {
        "w": FILTERS,
        **{name: np.array(value, "f") for name, value in {"two": 2, "zero": 0, "small": -99}.items()},
    }
    path = network(nodes, {"x": [1, 3, 6, 6]}, {"y": None}, constants).save(tmp_path / "model.onnx")
    runner = load_artifact(compile_file(path).folder)
    assert [layer.operator for layer in runner.manifest.islands] == ["If"]
    session = onnxruntime.InferenceSession(str(path))
    for shift in (-5, -1, 1):
        x = (floats((1, 3, 6, 6)) + shift).astype("f")
        np.testing.assert_allclose(runner({"x": x})["y"], session.run(None, {"x": x})[0], rtol=1e-5, atol=1e-5)


def test_operators_that_only_onnxruntime_knows(check: Any, network: Any) -> None:
    """Their shapes are those that onnxruntime infers. ONNX has an operator of the same name, which is another one."""
    nodes = [
        node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        node("MatMul", ["grid", "m"], ["g"]),
        node("GridSample", ["c", "g"], ["s"], domain="com.microsoft"),
        node("Relu", ["s"], ["r"]),
        node("MatMul", ["r", "square"], ["p"]),
        node("Add", ["p", "large"], ["q"]),
        node("Inverse", ["q"], ["y"], domain="com.microsoft"),
    ]
    constants = {
        "w": FILTERS,
        "m": np.eye(2, dtype="f") / 9,
        "square": floats((4, 2)).astype("f"),
        "large": np.eye(2, dtype="f") * 99,
    }
    shapes = {"x": [1, 3, 6, 6], "grid": [1, 2, 4, 2]}
    operators = check(network(nodes, shapes, {"y": None}, constants))
    assert [name for name in operators if "." in name] == ["com.microsoft.GridSample", "com.microsoft.Inverse"]


def test_what_relax_computes_slower_is_an_island(check: Any, network: Any) -> None:
    """Products of three matrices as one loop over numbers; small ones are not worth an island."""
    nodes = [
        node("MatMul", ["x", "m"], ["a"]),
        node("Einsum", ["a", "w", "w"], ["b"], equation="ij,jk,kl->il"),
        node("Slice", ["b", "begin", "end"], ["c"]),
        node("Einsum", ["c", "v", "v"], ["y"], equation="ij,jk,kl->il"),
    ]
    constants = {
        **{name: floats(shape).astype("f") for name, shape in {"m": (64, 64), "w": (64, 64), "v": (2, 2)}.items()},
        **{"begin": np.array([0, 0]), "end": np.array([2, 2])},
    }
    network = network(nodes, {"x": [64, 64]}, {"y": None}, constants)
    operators = check(network)
    assert operators.count("Einsum") == 2


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ([node("TopK", ["x", "k"], ["y", "_y"], sorted=0)], "no other layer is a matrix product"),
        (
            [node("Conv", ["x", "w"], ["c"]), node("RandomNormalLike", ["c"], ["r"]), node("Add", ["c", "r"], ["y"])],
            "left to chance",
        ),
        (
            [node("Conv", ["x", "w"], ["c"]), node("RandomNormalLike", ["c"], ["r"]), node("NonZero", ["r"], ["y"])],
            "left to chance",
        ),
        ([node("Relu", ["x"], ["r"]), node("NonZero", ["r"], ["y"])], "no other layer is a matrix product"),
    ],
)
def test_what_onnxruntime_serves_whole(
    compile_file: Any, network: Any, tmp_path: Path, nodes: list[Any], reason: str
) -> None:
    kind = TensorProto.INT64 if nodes[-1].op_type == "NonZero" else TensorProto.FLOAT
    constants = {"w": FILTERS, "k": np.array([2])}
    model = network(nodes, {"x": [1, 3, 6, 6]}, {"y": None}, constants, output_datatype=kind)
    manifest = compile_file(model.save(tmp_path / "model.onnx")).manifest
    assert manifest.engine is Engine.ONNXRUNTIME
    assert reason in manifest.fallback_reason


def test_a_tail_makes_all_outputs(compile_file: Any, load_artifact: Any, tmp_path: Path) -> None:
    """Those of other layers are passed through it; what it makes of constants, and what only it reads, is in it."""
    path = detector(tmp_path)
    runner = load_artifact(compile_file(path).folder)
    manifest = runner.manifest
    assert [layer.operator for layer in manifest.islands] == ["NonMaxSuppression, Gather, GatherND, Squeeze"]
    assert [(spec.name, spec.datatype, spec.shape) for spec in manifest.outputs] == [
        ("boxes", "FP32", (-1, 4)),
        ("scores", "FP32", (-1,)),
        ("classes", "INT64", (-1, 1)),
        ("all_scores", "FP32", (1, 2, 64)),
    ]
    session = onnxruntime.InferenceSession(str(path))
    counts = set()
    for seed in range(4):
        x = image(seed)
        answers, expected = runner({"image": x}, seed), session.run(None, {"image": x})
        counts.add(len(expected[0]))
        for spec, value in zip(manifest.outputs, expected, strict=True):
            assert (answers[spec.name].shape, answers[spec.name].dtype) == (value.shape, value.dtype)
            np.testing.assert_allclose(answers[spec.name], value, rtol=1e-4, atol=1e-5)
    assert 0 in counts and len(counts) > 2


def test_an_island_stays_apart_from_the_tail_if_an_output_reads_it(check: Any, network: Any) -> None:
    """Both are onnxruntime's, but what a convolution makes of the first one is the tail's to pass through."""
    nodes = [
        node("TopK", ["x", "ten"], ["largest", "_"], axis=3, sorted=0),
        node("Conv", ["largest", "w"], ["y"]),
        node("NonZero", ["largest"], ["places"]),
        node("Cast", ["places"], ["z"], to=TensorProto.FLOAT),
    ]
    constants = {"w": FILTERS, "ten": np.array([10])}
    operators = check(network(nodes, {"x": [1, 3, 6, 12]}, {"y": None, "z": None}, constants))
    assert [name for name in operators if "Conv" not in name and "ack" not in name] == ["TopK", "NonZero, Cast"]


@pytest.mark.parametrize("make", [labels, extracted])
def test_labels_of_rows(compile_file: Any, load_artifact: Any, tmp_path: Path, make: Any) -> None:
    """What makes strings of numbers is no reason to leave the network before it to onnxruntime."""
    runner = load_artifact(compile_file(make(tmp_path)).folder)
    assert runner.manifest.batched and runner.manifest.tail
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    for seed in range(5):
        x = floats([1, *runner.manifest.inputs[0].shape[1:]]).astype("f")
        answers = runner({"x": x}, seed)
        for output, expected in zip(session.get_outputs(), session.run(None, {"x": x}), strict=True):
            if expected.dtype == object:
                assert answers[output.name].tolist() == expected.tolist()


def test_a_request_that_an_island_refuses(compile_file: Any, load_artifact: Any, network: Any, tmp_path: Path) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Cast", ["x"], ["i"], to=TensorProto.INT64),
        node("Reshape", ["i", "line"], ["l"]),
        node("Slice", ["l", "begin", "end"], ["lengths"]),
        node("Reshape", ["c", "shape"], ["d"]),
        node("ReverseSequence", ["d", "lengths"], ["y"], time_axis=1, batch_axis=0),
    ]
    values = {"line": [-1], "begin": [0], "end": [16], "shape": [16, 4, 4]}
    constants = {"w": FILTERS, **{name: np.array(value) for name, value in values.items()}}
    path = network(nodes, {"x": [1, 3, 6, 6]}, {"y": None}, constants).save(tmp_path / "model.onnx")
    runner = load_artifact(compile_file(path).folder)
    x = np.full((1, 3, 6, 6), 2, "f")
    runner({"x": -x})
    assert runner.refusals == ["ReverseSequence: Invalid sequence length: -2. Value must be in range [0,4]"]
    runner({"x": x})
    assert not runner.refusals
