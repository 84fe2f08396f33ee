"""Operators without a template: by ONNX's definition, by TVM's Relax, by tensor expressions of our own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from gangway.compiler.errors import UnsupportedModelError
from gangway.compiler.frontend.functions import expand, has_body
from gangway.compiler.frontend.graph import Graph, Node, TensorType
from gangway.compiler.frontend.importer import read_graph
from gangway.compiler.frontend.shapes.stated import state_shapes
from gangway.compiler.lower.layers import Program
from gangway.compiler.lower.relax import lower_by_relax
from tests.helpers.onnx_models import save_model
from tests.helpers.sampled import sampled

node = helper.make_node


def one_node(operator: str, inputs: dict[str, TensorType], output: TensorType, **attributes: Any) -> Graph:
    item = Node("odd", operator, tuple(inputs), ("y",), attributes)
    return Graph(tuple(inputs), ("y",), False, (item,), {}, {**inputs, "y": output}, opset=21)


def test_resize_is_computed_by_several_tasks(check: Any, network: Any, load_artifact: Any) -> None:
    scales = {"scales": np.array([1, 1, 2.5, 3], np.float32)}
    resized = node("Resize", ["x", "", "scales"], ["y"], mode="linear")
    assert check(network([resized], {"x": ["N", 3, 40, 50]}, {"y": None}, scales)) == ["Resize"]


def test_a_function_keeps_its_large_intermediate_tensors_in_the_arena(check: Any, network: Any) -> None:
    """Hardmax finds the largest number of each line first, which is another loop over the whole tensor."""
    check(network([node("Hardmax", ["x"], ["y"], axis=2)], {"x": [2, 30, 100, 90]}, {"y": None}))


def test_what_relax_imports_wrongly_is_refused() -> None:
    """Its importer forgets which of the two infinities is meant."""
    number, flag = TensorType((40,), "float32"), TensorType((40,), "bool")
    graph = one_node("IsInf", {"x": number}, flag, detect_positive=0)
    with pytest.raises(UnsupportedModelError, match="differs from the reference"):
        lower_by_relax(Program(graph), graph.nodes[0])


@pytest.mark.parametrize(
    ("operator", "inputs", "output", "word"),
    [
        ("NonZero", {"x": TensorType((4,), "float32")}, TensorType((1, 4), "int64"), "Relax"),
        ("Erf", {"x": TensorType((4,), "float16")}, TensorType((4,), "float16"), "element type float16"),
        ("Erf", {"x": TensorType((1 << 23,), "float32")}, TensorType((1 << 23,), "float32"), "cannot be checked"),
        ("Tan", {"x": TensorType((4,), "float32")}, TensorType((4,), "float32"), "calls"),
    ],
)
def test_what_relax_cannot_is_told(operator: str, inputs: dict[str, TensorType], output: TensorType, word: str) -> None:
    graph = one_node(operator, inputs, output)
    with pytest.raises(UnsupportedModelError, match=word):
        lower_by_relax(Program(graph), graph.nodes[0])


KINDS = ["float32", "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
EXPRESSIONS: list[tuple[str, dict[str, tuple[tuple[int, ...], str]], tuple[int, ...], dict[str, Any]]] = [
    *(("Resize", {"x": ((1, 2, 5, 4), ""), "roi": ((8,), "float32"), "scales": ((4,), "float32")}, (1, 2, 9, 6),
       {"mode": mode, "coordinate_transformation_mode": b"tf_crop_and_resize", "extrapolation_value": 1.0})
      for mode in (b"nearest", b"linear", b"cubic")),
    *((f"Reduce{name}", {"x": ((4, 4), ""), "axes": ((1,), "int64")}, (4,), {"keepdims": 0})
      for name in ("Sum", "Mean", "Max", "Min")),
    ("Range", {"start": ((), ""), "limit": ((), ""), "delta": ((), "")}, (7,), {}),
    ("Slice", {"x": ((6, 5), ""), "starts": ((1,), "int64"), "ends": ((1,), "int64")}, (3, 5), {}),
    ("Trilu", {"x": ((4, 4), ""), "k": ((), "int64")}, (4, 4), {}),
    ("Shrink", {"x": ((5, 3), "")}, (5, 3), {}),
    ("CumSum", {"x": ((5, 3), ""), "axis": ((), "int64")}, (5, 3), {}),
]  # fmt: skip


DECLARED = [(dtype, declared) for dtype in KINDS for declared in ("", "int8", "float32") if declared != dtype]
FEW = [("uint8", ""), ("int64", ""), ("float32", "int8"), ("bool", "float32")]


@pytest.mark.parametrize(("dtype", "declared"), sampled(DECLARED, FEW))
def test_no_function_writes_wider_numbers_than_its_tensor_has(dtype: str, declared: str) -> None:
    """Whatever type a tensor is said to have: layers are those of that type, or there are none."""
    for operator, inputs, shape, attributes in EXPRESSIONS:
        kinds = {name: TensorType(lengths, kind or dtype) for name, (lengths, kind) in inputs.items()}
        graph = one_node(operator, kinds, TensorType(shape, declared or dtype), **attributes)
        program = Program(graph)
        try:
            lower_by_relax(program, graph.nodes[0])
        except UnsupportedModelError:
            assert not program.layers
            continue
        assert declared in ("", dtype)


@pytest.mark.parametrize("mode", [b"linear", b"cubic"])
@pytest.mark.parametrize("dtype", ["uint8", "int8", "int32"])
def test_a_resize_of_integers_has_no_expression(dtype: str, mode: bytes) -> None:
    kinds = {"x": TensorType((1, 1, 4, 4), dtype), "": TensorType((0,), "float32"), "s": TensorType((4,), "float32")}
    graph = one_node("Resize", kinds, TensorType((1, 1, 7, 7), dtype), mode=mode)
    with pytest.raises(UnsupportedModelError, match="a function has"):
        lower_by_relax(Program(graph), graph.nodes[0])


def test_numbers_of_a_request_lead_nowhere_outside(compile_file: Any, load_artifact: Any, tmp_path: Path) -> None:
    """Scales as a request may have them: the guards around all memory stay whole, and nothing traps."""
    nodes = [node("Resize", ["x", "", "scales"], ["y"], mode="nearest")]
    kinds = {"x": [1, 1, 2, 2], "scales": [4]}, {"y": [1, 1, 4, 6]}
    path = save_model(tmp_path / "model.onnx", nodes, *kinds, opset=19)
    runner = load_artifact(compile_file(path).folder)
    x = np.arange(4, dtype=np.float32).reshape(1, 1, 2, 2)
    right = runner({"x": x, "scales": np.array([1, 1, 2, 3], np.float32)})["y"]
    np.testing.assert_array_equal(right, np.kron(x, np.ones((2, 3), np.float32)))
    for scale in (0, -1, np.nan, np.inf, 1e-30):
        odd = runner({"x": x, "scales": np.full(4, scale, np.float32)})["y"]
        assert np.isin(odd, x).all()


@pytest.mark.parametrize(
    ("operator", "attributes"),
    [("MeanVarianceNormalization", {"axes": [0, 2, 3]}), ("Celu", {"alpha": 2.0}), ("ThresholdedRelu", {"alpha": 0.5})],
)
def test_functions_of_simpler_operators(check: Any, network: Any, operator: str, attributes: dict[str, Any]) -> None:
    check(network([node(operator, ["x"], ["y"], **attributes)], {"x": [2, 3, 4, 5]}, {"y": None}))


def test_types_inside_of_a_function_are_known(network: Any, tmp_path: Path) -> None:
    item = node("LayerNormalization", ["x", "scale", "bias"], ["y"], axis=1)
    weights = {name: np.ones((4, 6), np.float32) for name in ("scale", "bias")}
    graph = read_graph(network([item], {"x": ["N", 4, 6]}, {"y": None}, weights).save(tmp_path / "model.onnx"))
    assert has_body(graph.nodes[0], graph)
    expanded = expand(graph, {"y"})
    made = {name for item in expanded.nodes for name in item.outputs}
    assert len(expanded.nodes) > 5
    assert made <= expanded.types.keys()
    assert {shape[0] for shape in expanded.wide_shapes.values() if shape} >= {7}


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_a_request_says_which_axis_is_reduced(compile_file: Any, load_artifact: Any, tmp_path: Path, axis: int) -> None:
    shapes = {"x": [3, 3, 3], "axes": [1]}
    runner = _steered("ReduceSum", shapes, [3, 3], compile_file, load_artifact, tmp_path, keepdims=0)
    x = np.arange(27, dtype=np.float32).reshape(3, 3, 3)
    np.testing.assert_array_equal(runner({"x": x, "axes": np.array([axis])})["y"], x.sum(axis))


def test_a_request_says_where_a_slice_begins(compile_file: Any, load_artifact: Any, tmp_path: Path) -> None:
    shapes = {"x": [6, 7], "starts": [1], "ends": [1], "axes": [1], "steps": [1]}
    runner = _steered("Slice", shapes, [6, 3], compile_file, load_artifact, tmp_path)
    x = np.arange(42, dtype=np.float32).reshape(6, 7)

    def sliced(start: int, end: int, axis: int, step: int) -> Any:
        values = {"starts": start, "ends": end, "axes": axis, "steps": step}
        return runner({"x": x, **{name: np.array([value]) for name, value in values.items()}})["y"]

    np.testing.assert_array_equal(sliced(2, 5, 1, 1), x[:, 2:5])
    np.testing.assert_array_equal(sliced(-3, 100, -1, 1), x[:, 4:])
    np.testing.assert_array_equal(sliced(6, 0, 1, -2), x[:, 6:0:-2])
    assert np.isin(sliced(1 << 60, 1 << 61, 1, 1 << 40), x).all()


def _steered(
    operator: str,
    shapes: dict[str, list[int]],
    result: list[int],
    compile_file: Any,
    load_artifact: Any,
    folder: Path,
    **attributes: Any,
) -> Any:
    """Return a runner of one node whose inputs but the first are integers of the request."""
    inputs = {name: dims if name == "x" else (TensorProto.INT64, dims) for name, dims in shapes.items()}
    nodes = [node(operator, [*shapes], ["y"], **attributes)]
    path = save_model(folder / "model.onnx", nodes, inputs, {"y": result}, opset=18)
    runner = load_artifact(compile_file(path).folder)
    assert runner.manifest.layers[0].versions[0].description.startswith("relax")
    return runner


def test_inputs_that_repeat_the_shape_become_constants() -> None:
    number, axes = TensorType((3, 2, 2), "float32"), TensorType((1,), "int64")
    kept = one_node("ReduceSum", {"x": number, "axes": axes}, TensorType((3, 1, 2), "float32"))
    unclear = one_node("ReduceSum", {"x": number, "axes": axes}, TensorType((3, 2), "float32"), keepdims=0)
    assert state_shapes(kept).constants["y:axes"].tolist() == [1]
    assert state_shapes(kept).nodes[0].inputs == ("x", "y:axes")
    assert state_shapes(unclear).nodes[0].inputs == ("x", "axes")
