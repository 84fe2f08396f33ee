"""Constants, shapes and functions mean what they mean in the operator set that the file imports."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from gangway.compiler.errors import ModelError, UnreadableModelError, UnsupportedModelError
from gangway.compiler.frontend.graph import Node
from gangway.compiler.frontend.importer import read_graph
from gangway.compiler.frontend.shape_inference import evaluate
from gangway.compiler.frontend.simplify import simplify
from tests.helpers.onnx_models import make_model

node = helper.make_node
NEWEST = 23
RANDOM = np.random.default_rng(0)


def numbers(*shape: int) -> Any:
    return RANDOM.standard_normal(shape).astype(np.float32)


def integers(*values: int) -> Any:
    return np.array(values, np.int64)


CUBE, IMAGE, MATRIX = numbers(2, 3, 4), numbers(1, 4, 4, 6), numbers(3, 4)
COMMON = {"cube": CUBE, "image": IMAGE, "matrix": MATRIX}
CHANNELS = {name: RANDOM.random(4).astype(np.float32) for name in ("scale", "shift", "mean", "variance")}


@dataclass(frozen=True)
class Folded:
    """A node of constants that is valid from opset `first` to `last`; its outputs are c and, if there are two, d."""

    first: int
    last: int
    operator: str
    inputs: Sequence[str]
    constants: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1


def _reductions(operator: str, last: int) -> list[Folded]:
    return [
        Folded(7, last, operator, ["cube"], {}, {"axes": [1], "keepdims": 0}),
        Folded(11, last, operator, ["cube"], {}, {"axes": [-1, 0]}),
        Folded(last + 1, NEWEST, operator, ["cube", "axes"], {"axes": integers(1)}),
        Folded(7, NEWEST, operator, ["cube"]),
    ]


FOLDED = [
    *(
        Folded(7, NEWEST, operator, ["cube"], {}, attributes)
        for operator in ("Softmax", "LogSoftmax", "Hardmax")
        for attributes in ({}, {"axis": 0}, {"axis": 1}, {"axis": 2})
    ),
    *(found for name in ("Max", "Mean", "L2", "LogSumExp", "Prod") for found in _reductions(f"Reduce{name}", 17)),
    *_reductions("ReduceSum", 12),
    Folded(7, 12, "Unsqueeze", ["cube"], {}, {"axes": [0, 2]}),
    Folded(11, 12, "Unsqueeze", ["cube"], {}, {"axes": [-1]}),
    Folded(13, NEWEST, "Unsqueeze", ["cube", "axes"], {"axes": integers(0, 2)}),
    Folded(7, 12, "Squeeze", ["image"], {}, {"axes": [0]}),
    Folded(13, NEWEST, "Squeeze", ["image", "axes"], {"axes": integers(0)}),
    Folded(7, 10, "Clip", ["cube"], {}, {"min": -0.5, "max": 0.4}),
    Folded(11, NEWEST, "Clip", ["cube", "min", "max"], {"min": np.float32(-0.5), "max": np.float32(0.4)}),
    Folded(7, 12, "Split", ["cube"], {}, {"axis": 1, "split": [1, 2]}, 2),
    Folded(13, NEWEST, "Split", ["cube", "split"], {"split": integers(1, 2)}, {"axis": 1}, 2),
    Folded(18, NEWEST, "Split", ["cube"], {}, {"axis": 1, "num_outputs": 2}, 2),
    Folded(7, 10, "Pad", ["cube"], {}, {"pads": [0, 1, 0, 1, 0, 2], "value": 3.0}),
    Folded(11, NEWEST, "Pad", ["cube", "pads", "value"], {"pads": integers(0, 1, 0, 1, 0, 2), "value": np.float32(3)}),
    Folded(7, 9, "Slice", ["cube"], {}, {"starts": [1, 0], "ends": [3, 2**31 - 1], "axes": [1, 2]}),
    Folded(10, NEWEST, "Slice", ["cube", "from", "to"], {"from": integers(0, 1), "to": integers(10**9, -1)}),
    Folded(7, 9, "TopK", ["cube"], {}, {"k": 2, "axis": 1}, 2),
    Folded(10, NEWEST, "TopK", ["cube", "k"], {"k": integers(2)}, {"axis": 1}, 2),
    Folded(7, 9, "Dropout", ["cube"], {}, {"ratio": 0.5}),
    Folded(10, 11, "Dropout", ["cube"], {}, {"ratio": 0.5}, 2),
    Folded(12, NEWEST, "Dropout", ["cube", "ratio"], {"ratio": np.float32(0.5)}),
    Folded(7, 8, "Upsample", ["image"], {}, {"scales": [1.0, 1.0, 2.0, 2.0]}),
    Folded(9, 9, "Upsample", ["image", "s"], {"s": np.array([1, 1, 2, 2], np.float32)}, {"mode": "linear"}),
    Folded(10, 10, "Resize", ["image", "s"], {"s": np.array([1, 1, 1.5, 1.5], np.float32)}, {"mode": "linear"}),
    Folded(13, NEWEST, "Resize", ["image", "", "s"], {"s": np.array([1, 1, 1.5, 1.5], np.float32)}, {"mode": "linear"}),
    Folded(7, 8, "BatchNormalization", ["image", *CHANNELS], CHANNELS, {"spatial": 1}),
    Folded(9, NEWEST, "BatchNormalization", ["image", *CHANNELS], CHANNELS),
    Folded(9, 10, "Scatter", ["matrix", "at", "new"], {"at": integers(0, 2)[None], "new": numbers(1, 2)}, {"axis": 1}),
    Folded(
        *(11, NEWEST, "ScatterElements", ["matrix", "at", "new"]),
        {"at": integers(0, -1)[None], "new": numbers(1, 2)},
        {"axis": 1},
    ),
    Folded(
        *(10, 21, "RoiAlign", ["image", "rois", "of"]),
        {"rois": np.array([[0, 0, 2, 2]], np.float32), "of": integers(0)},
        {"output_height": 2, "output_width": 2, "sampling_ratio": 2},
    ),
    Folded(10, NEWEST, "QuantizeLinear", ["cube", "s", "zero"], {"s": np.float32(0.1), "zero": np.uint8(3)}),
    Folded(10, NEWEST, "DequantizeLinear", ["q", "s"], {"q": np.arange(6, dtype=np.int8), "s": np.float32(0.1)}),
    Folded(7, 11, "Pow", ["cube", "e"], {"e": np.float32(2)}),
    Folded(12, NEWEST, "Pow", ["cube", "e"], {"e": integers(2)}),
    Folded(17, 19, "DFT", ["signal"], {"signal": CUBE[..., None]}, {"axis": 1}),
    Folded(20, NEWEST, "DFT", ["signal", "", "axis"], {"signal": CUBE[..., None], "axis": np.array(1)}),
    Folded(9, NEWEST, "Compress", ["cube", "which"], {"which": np.array([True, False, True])}, {"axis": 1}),
    Folded(9, NEWEST, "NonZero", ["cube"]),
    Folded(7, NEWEST, "LRN", ["image"], {}, {"size": 3}),
]


def model_of(opset: int) -> tuple[Any, dict[str, str]]:
    """Return a model that multiplies x with every constant subgraph that the opset has, and what each output is."""
    nodes, initial, outputs = [], {}, {}
    for index, case in enumerate(FOLDED):
        if not case.first <= opset <= case.last:
            continue
        constants = {**COMMON, **case.constants}
        names = [f"{index}/{name}" if name else "" for name in case.inputs]
        results = [f"{index}/c", f"{index}/d"][: case.outputs]
        nodes.append(node(case.operator, names, results, **case.attributes))
        initial |= {f"{index}/{name}": constants[name] for name in case.inputs if name}
        for name in results:
            nodes += [node("Cast", [name], [f"{name}f"], to=1), node("Mul", ["x", f"{name}f"], [f"{name}y"])]
            outputs[f"{name}y"] = f"{case.operator} {case.attributes}"
    return make_model(nodes, {"x": [1]}, dict.fromkeys(outputs), initial, opset), outputs


@pytest.mark.parametrize("opset", [7, 8, 9, 10, 11, 12, 13, 17, 18, 21])
def test_constants_are_what_onnxruntime_makes_of_them(tmp_path: Path, opset: int) -> None:
    model, outputs = model_of(opset)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    graph = simplify(read_graph(path))
    assert [item.operator for item in graph.nodes] == ["Mul"] * len(outputs)
    wanted = session_of(path).run(None, {"x": np.ones(1, np.float32)})
    for item, (name, what), expected in zip(graph.nodes, outputs.items(), wanted, strict=True):
        assert item.outputs == (name,)
        found = graph.constants[item.inputs[1]]
        assert expected.shape in (found.shape, (1,)), what
        np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=1e-5, atol=1e-6, err_msg=what)


def session_of(path: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(str(path), options)


def test_types_that_onnxruntime_has_no_kernels_for() -> None:
    halves = numpy_helper.to_array(helper.make_tensor("h", TensorProto.BFLOAT16, [2], [1.5, -2.0]))
    total = evaluate(Node("n", "Add", ("h", "h"), ("y",)), {"h": halves}, 13)["y"]
    assert evaluate(Node("n", "Cast", ("h",), ("y",), {"to": 1}), {"h": total}, 13)["y"].tolist() == [3.0, -4.0]


VIEW = [
    node("Shape", ["x"], ["shape"]),
    node("Gather", ["shape", "zero"], ["batch"]),
    node("Unsqueeze", ["batch"], ["batch1"], axes=[0]),
    node("Concat", ["batch1", "rest"], ["to"], axis=0),
    node("Reshape", ["x", "to"], ["flat"]),
]
CONSTANT = [
    node("Softmax", ["w"], ["s"], axis=1),
    node("Unsqueeze", ["s"], ["u"], axes=[0]),
    node("Squeeze", ["u"], ["c"], axes=[0]),
    node("Add", ["flat", "c"], ["y"]),
]
WEIGHTS = {"zero": np.array(0), "rest": integers(-1), "w": numbers(1, 6)}


@pytest.mark.parametrize("opset", [7, 8, 11])
def test_an_old_file_is_compiled(network: Any, check: Callable[..., list[str]], opset: int) -> None:
    """`x.view(x.size(0), -1)` as old exporters wrote it, and constants beside it."""
    assert check(network([*VIEW, *CONSTANT], {"x": ["N", 2, 3]}, {"y": None}, WEIGHTS, opset=opset))


PADDED = [  # `F.pad` as PyTorch writes it
    node("ConstantOfShape", ["four"], ["zeros"], value=helper.make_tensor("v", TensorProto.INT64, [1], [0])),
    node("Concat", ["last", "zeros"], ["all"], axis=0),
    node("Reshape", ["all", "pairs"], ["table"]),
    node("Slice", ["table", "minus", "first", "axis", "minus"], ["reversed"]),
    node("Transpose", ["reversed"], ["turned"], perm=[1, 0]),
    node("Reshape", ["turned", "minus"], ["flat"]),
    node("Cast", ["flat"], ["pads"], to=TensorProto.INT64),
    node("Pad", ["x", "pads"], ["y"], mode="reflect"),
]
PADS = {"four": integers(4), "last": integers(2, 1), "pairs": integers(-1, 2), "minus": integers(-1)}


def test_a_padding_that_is_computed(network: Any, check: Callable[..., list[str]]) -> None:
    constants = {**PADS, "first": integers(-(2**63) + 1), "axis": integers(0)}
    assert check(network(PADDED, {"x": ["N", 3, 4]}, {"y": None}, constants, opset=16))


def test_a_weight_need_not_be_an_input(network: Any, check: Callable[..., list[str]]) -> None:
    assert check(
        network([node("Mul", ["x", "w"], ["y"])], {"x": ["N", 6]}, {"y": None}, {"w": numbers(6)}, ir_version=3)
    )


def test_layers_by_tvm_are_checked_by_the_same_meaning(network: Any, check: Callable[..., list[str]]) -> None:
    """Hardmax flattened its input then; ONNX's evaluator would not believe a layer that does."""
    assert check(network([node("Hardmax", ["x"], ["y"], axis=1)], {"x": [2, 3, 4]}, {"y": [2, 3, 4]}, opset=11))


def function(name: str, nodes: list[Any], opset: int) -> Any:
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("own", 1)]
    return helper.make_function("own", name, ["x"], ["y"], nodes, imports)


def with_functions(path: Path, opset: int | None, functions: list[Any]) -> Path:
    """Write a model that calls the first function. An opset of None: the model imports none of ONNX's own."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 2, 3]) for name in "xy")
    graph = helper.make_graph([node(functions[0].name, ["x"], ["y"], domain="own")], "calls", [x], [y])
    imports = [helper.make_opsetid("own", 1), *([] if opset is None else [helper.make_opsetid("", opset)])]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8, functions=functions), path)
    return path


SOFTMAX = [
    node("Constant", [], ["w"], value=numpy_helper.from_array(numbers(1, 2, 3))),
    node("Softmax", ["w"], ["c"], axis=1),
    node("Add", ["x", "c"], ["y"]),
]


@pytest.mark.parametrize(("model", "own"), [(11, 11), (12, 9), (17, 17), (17, 13), (None, 17)])
def test_functions_of_a_model_are_compiled(
    compile_file: Any, load_artifact: Any, tmp_path: Path, model: int | None, own: int
) -> None:
    nested = function("Inner", SOFTMAX, own)
    path = with_functions(
        tmp_path / "f.onnx", model, [function("Outer", [node("Inner", ["x"], ["y"], domain="own")], own), nested]
    )
    compiled = compile_file(path)
    assert not compiled.manifest.fallback_reason
    x = {"x": numbers(1, 2, 3)}
    np.testing.assert_allclose(load_artifact(compiled.folder)(x)["y"], session_of(path).run(None, x)[0], rtol=1e-5)


@pytest.mark.parametrize("given", [{}, {"alpha": 0.5}])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_attributes_of_functions_have_defaults(
    compile_file: Any, load_artifact: Any, tmp_path: Path, given: dict[str, float], depth: int
) -> None:
    """Each function calls the next one; the last but `depth` is called with the attributes that are given."""
    slope = node("LeakyRelu", ["x"], ["y"])
    slope.attribute.add(name="alpha", type=onnx.AttributeProto.FLOAT, ref_attr_name="alpha")
    functions = [function(f"F{depth}", [slope], 17)]
    functions[0].attribute_proto.append(helper.make_attribute("alpha", 0.25))
    for n in reversed(range(depth)):
        inner = node(f"F{n + 1}", ["x"], ["y"], domain="own", **(given if n == depth - 1 else {}))
        functions.insert(0, function(f"F{n}", [inner], 17))
    path = with_functions(tmp_path / "f.onnx", 17, functions)
    if not depth:
        model = onnx.load(path)
        model.graph.node[0].attribute.extend(helper.make_attribute(*item) for item in given.items())
        onnx.save(model, path)
    compiled = compile_file(path)
    assert not compiled.manifest.fallback_reason
    x = {"x": numbers(1, 2, 3)}
    np.testing.assert_allclose(load_artifact(compiled.folder)(x)["y"], session_of(path).run(None, x)[0], rtol=1e-6)


def test_a_function_passes_on_an_attribute_that_is_left_out(tmp_path: Path) -> None:
    """The called function's default is its value then, which onnx's inliner does not know."""
    slope, inner = node("LeakyRelu", ["x"], ["y"]), node("Inner", ["x"], ["y"], domain="own")
    for each in (slope, inner):
        each.attribute.add(name="alpha", type=onnx.AttributeProto.FLOAT, ref_attr_name="alpha")
    functions = [function("Outer", [inner], 17), function("Inner", [slope], 17)]
    functions[0].attribute.append("alpha")
    functions[1].attribute_proto.append(helper.make_attribute("alpha", 0.25))
    with pytest.raises(UnsupportedModelError, match="'Outer' is called without 'alpha'"):
        read_graph(with_functions(tmp_path / "f.onnx", 17, functions))


@pytest.mark.parametrize("imported", ["", "ai.onnx"])
@pytest.mark.parametrize("named", ["", "ai.onnx"])
def test_the_domain_of_onnx_has_two_names(
    compile_file: Any, load_artifact: Any, tmp_path: Path, imported: str, named: str
) -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 4]) for name in "xy")
    nodes = [node("MatMul", ["x", "w"], ["h"], domain=named), node("Relu", ["h"], ["y"], domain=named)]
    graph = helper.make_graph(nodes, "names", [x], [y], [numpy_helper.from_array(numbers(4, 4), "w")])
    path = tmp_path / "named.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid(imported, 17)], ir_version=8), path)
    compiled = compile_file(path)
    assert not compiled.manifest.fallback_reason
    feeds = {"x": numbers(1, 4)}
    np.testing.assert_allclose(
        load_artifact(compiled.folder)(feeds)["y"], session_of(path).run(None, feeds)[0], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(("model", "own"), [(17, 11), (11, 17), (None, 11)])
def test_a_function_of_another_meaning_is_onnxruntimes(tmp_path: Path, model: int | None, own: int) -> None:
    """onnxruntime reads a function by the operator set of the model, ONNX by that of the function."""
    path = with_functions(tmp_path / "f.onnx", model, [function("F", SOFTMAX, own)])
    with pytest.raises(UnsupportedModelError, match=f"opset {own}, in which Softmax is another operator"):
        read_graph(path)


def test_functions_without_an_end(tmp_path: Path) -> None:
    twice = [
        function(
            f"F{n}", [node(f"F{n + 1}", ["x"], ["a"], domain="own"), node(f"F{n + 1}", ["a"], ["y"], domain="own")], 17
        )
        for n in range(40)
    ]
    for functions in (
        [function("F", [node("F", ["x"], ["y"], domain="own")], 17)],
        [*twice, function("F40", SOFTMAX, 17)],
    ):
        with pytest.raises(UnreadableModelError, match="without an end"):
            read_graph(with_functions(tmp_path / "f.onnx", 17, functions))


@pytest.mark.parametrize(
    ("operator", "dividend", "divisor", "told"),
    [
        ("Div", 7, 0, "integer division by zero"),
        ("Mod", 7, 0, "integer division by zero"),
        ("Div", -(2**63), -1, "least integer divided by -1"),
    ],
)
def test_constants_without_a_quotient_are_refused(operator: str, dividend: int, divisor: int, told: str) -> None:
    share = Node("share", operator, ("a", "b"), ("c",), {})
    values = {"a": np.array([dividend]), "b": np.array([divisor])}
    with pytest.raises(ModelError, match=told):
        evaluate(share, values, 17)
