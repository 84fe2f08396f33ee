"""Where ONNX leaves an answer open, kernels answer what onnxruntime answers, or refuse as it does, in its words."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from gangway.artifact.format import Engine
from gangway.executor.onnxruntime_program import failure_of

node = helper.make_node

Array = np.ndarray[Any, Any]
EDGES = [
    *(np.nan, np.inf, -np.inf, 0.0, -0.0, 3.7, -3.7, -1.0, 127.9, 128.0, 255.9, 256.0, 300.0, -128.9, -129.0, 32768.0),
    *(65535.0, 65536.0, -32769.0, 2147483520.0, 2.0**31, -(2.0**31), -2147483904.0, 4294967040.0, 2.0**32, 5e9, -5e9),
    *(9.2233715e18, 2.0**63, -(2.0**63), -9.3e18, 1.8446743e19, 2.0**64, 1e20, -1e20, 1e30, -1e30),
]
COUNT = 2 * len(EDGES) + 5  # no multiple of a vector


def save(path: Path, nodes: list[Any], feeds: Mapping[str, Array], constants: Mapping[str, Array]) -> Any:
    """Write the model of these nodes, each with one output, and return its session in onnxruntime."""
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in feeds.items()
    ]
    outputs = [helper.make_value_info(item.output[0], onnx.TypeProto()) for item in nodes]
    tensors = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "undefined", inputs, outputs, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    onnx.save(inferred, path)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(str(path), options)


def casts() -> tuple[list[Any], dict[str, Array], dict[str, Array]]:
    kinds = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
    nodes, feeds = [], {}
    for source in ("float16", "float32", "float64"):
        with np.errstate(all="ignore"):
            feeds[source] = np.resize(np.array(EDGES), COUNT).astype(source)
        for kind in kinds:
            if kind != "uint32" or source == "float16":
                to = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
                nodes.append(node("Cast", [source], [f"{source}_{kind}"], to=to))
    return nodes, feeds, {}


def integers() -> tuple[list[Any], dict[str, Array], dict[str, Array]]:
    base = np.array([0, 1, -1, 2, -2, 3, 10, -10, 7, 2**31 - 1, -(2**31), 46341, 1290, 5, 0, 2, 2], np.int32)
    exponents = np.array([-1, -5, -5, -1, 31, -2, -3, 9, 0, 1, 1, 2, 3, 100, 0, 30, 31], np.int32)
    nodes = [
        node("Pow", ["base", "exponents"], ["powers"]),
        *(node("Pow", ["base", name], [f"power_{name}"]) for name in ("minus", "two", "three", "five", "half")),
    ]
    feeds, constants = {"base": base, "exponents": exponents}, {}
    for name, value in (("minus", -1), ("two", 2), ("three", 3), ("five", 5)):
        constants[name] = np.array(value, np.int64)
    constants["half"] = np.array(4.0, np.float32)
    for kind in ("int8", "int16", "int32", "int64"):
        limits = np.iinfo(kind)
        feeds[kind] = np.array([limits.min, limits.max, -7, 7, 0, 1, -1, limits.min + 1, 100], kind)
        nodes += [node(name, [kind], [f"{name}_{kind}"]) for name in ("Neg", "Abs", "Sign")]
        nodes += [node(name, [kind, kind], [f"{name}_{kind}"]) for name in ("Add", "Mul")]
    return nodes, feeds, constants


def others() -> tuple[list[Any], dict[str, Array], dict[str, Array]]:
    nodes, feeds, constants = [], {}, {"one": np.array(1, np.float32), "scale": np.array(0.5, np.float32)}
    for kind in ("uint8", "uint32", "uint64"):
        bits = 8 * np.dtype(kind).itemsize
        feeds[kind] = np.full(9, 213, kind)
        feeds[f"{kind}_by"] = np.array([0, 1, bits - 1, bits, bits + 1, 2 * bits, 3 * bits, 200, 255], kind)
        for direction in ("LEFT", "RIGHT"):
            names = [kind, f"{kind}_by"]
            nodes.append(node("BitShift", names, [f"{direction}_{kind}"], direction=direction))
    for kind in ("int8", "int16"):
        least = np.iinfo(kind).min
        feeds[kind], feeds[f"{kind}_by"] = np.array([least, -7, 7, -7], kind), np.array([-1, 2, -2, -2], kind)
        for name, fmod in (("Div", None), ("Mod", 0), ("Mod", 1)):
            attributes = {} if fmod is None else {"fmod": fmod}
            nodes.append(node(name, [kind, f"{kind}_by"], [f"{name}{fmod}_{kind}"], **attributes))
    feeds["x"] = np.resize(np.array(EDGES, np.float32), COUNT)
    for kind in ("int8", "uint8", "int16", "uint16"):
        constants[f"zero_{kind}"] = np.array(3, kind)
        nodes.append(node("QuantizeLinear", ["x", "one", f"zero_{kind}"], [f"quantised_{kind}"]))
    for kind in ("int8", "uint8"):  # both together are one activation
        parameters = ["scale", f"zero_{kind}"]
        nodes.append(node("QuantizeLinear", ["x", *parameters], [f"between_{kind}"]))
        nodes.append(node("DequantizeLinear", [f"between_{kind}", *parameters], [f"back_{kind}"]))
    feeds["place"] = np.array([0, -1, -4, 3, 4, -5, 100, 2**40])
    feeds["fraction"] = np.array([0.5, -0.5, 3.9, 1, -1, np.nan, np.inf, 1e20], np.float32)
    constants |= {"depth": np.array([4]), "deep": np.array([4], np.float32), "values": np.array([7, 9], np.float32)}
    nodes.append(node("OneHot", ["place", "depth", "values"], ["hot"]))
    nodes.append(node("OneHot", ["fraction", "deep", "values"], ["hot_fraction"]))
    return nodes, feeds, constants


def reductions() -> tuple[list[Any], dict[str, Array], dict[str, Array]]:
    nodes, feeds, constants = [], {}, {"first": np.array([0]), "last": np.array([1])}
    for kind in ("int32", "int64"):
        most = np.iinfo(kind).max
        rows = [[most, 1, 5, 0, 3], [-most, -most, 2, 1, 7], [2, 1 << 30, -3, 5, 1 << 30], [1, 2, 3, 4, -5]]
        feeds[kind] = np.array(rows, kind)
        for axis in ("first", "last"):
            for name in ("ReduceSum", "ReduceProd", "ReduceMean", "ReduceL1", "ReduceSumSquare", "ReduceMax"):
                nodes.append(node(name, [kind, axis], [f"{name}_{kind}_{axis}"]))
        nodes.append(node("CumSum", [kind, "last"], [f"CumSum_{kind}"]))
    numbers = np.random.default_rng(3).standard_normal((40, 21)).astype(np.float32)
    numbers[::2, 0], numbers[1::3, 7], numbers[5, :] = np.nan, np.nan, np.nan
    feeds |= {"rows": numbers, "columns": numbers.T.copy()}
    for name, axis in (("rows", 1), ("columns", 0)):
        nodes.append(node("ArgMax", [name], [f"most_{name}"], axis=axis))
        nodes.append(node("ArgMin", [name], [f"least_{name}"], axis=axis, select_last_index=1))
    return nodes, feeds, constants


@pytest.mark.parametrize("table", [casts, integers, reductions, others], ids=lambda table: table.__name__)
def test_answers_are_those_of_onnxruntime(table: Any, tmp_path: Path, compile_file: Any, load_artifact: Any) -> None:
    nodes, feeds, constants = table()
    session = save(tmp_path / "model.onnx", nodes, feeds, constants)
    compiled = compile_file(tmp_path / "model.onnx")
    assert compiled.manifest.fallback_reason == ""
    runner = load_artifact(compiled.folder)
    answers = runner(feeds)
    assert not runner.refusals
    for output, expected in zip(session.get_outputs(), session.run(None, feeds), strict=True):
        np.testing.assert_array_equal(answers[output.name], expected, err_msg=output.name)


DATA = np.arange(12, dtype=np.float32).reshape(4, 3)
SOUND: dict[str, Array] = {
    "gather": np.array([0, -1, -4]),
    "gather_last": np.array([2, -3], np.int32),
    "elements": np.array([[0, -4, 1], [3, 2, -1]]),
    "nd": np.array([[0, -1], [-4, 2]]),
    "slices": np.array([[3], [-4]]),
    "scatter": np.array([[0, -4, 1], [3, 2, -1]], np.int32),
    "scatter_nd": np.array([[0, -1], [-4, 2]]),
    "dividend": np.array([9, -9, 7]),
    "divisor": np.array([2, 2, -3]),
    "modulus": np.array([2, -2, 3], np.int32),
}
REFUSED = [
    ("gather", np.array([0, 4, 1]), "Gather node 'named': indices element out of data bounds, idx=4 must be within"),
    ("gather", np.array([0, -5, 1]), "idx=-5"),
    ("gather", np.array([0, 1, 2**40]), "idx=1099511627776"),
    ("gather", np.array([-(2**63), 1, 1]), "idx=-9223372036854775808"),
    ("gather_last", np.array([2, 3], np.int32), "Gather: indices element out of data bounds, idx=3"),
    ("elements", np.array([[0, 4, 1], [3, 2, -1]]), "Out of range value in index tensor"),
    ("elements", np.array([[0, 0, 1], [3, 2, -5]]), "Out of range value in index tensor"),
    ("nd", np.array([[0, 3], [0, 0]]), "GatherND: invalid index found, index = 3"),
    ("nd", np.array([[0, 0], [-5, 0]]), "index = -5"),
    ("slices", np.array([[4], [0]]), "index = 4"),
    ("scatter", np.array([[0, 0, 1], [3, 2, -5]], np.int32), "ScatterElements: indices element out of data bounds"),
    ("scatter_nd", np.array([[0, 3], [0, 0]]), "ScatterND: invalid indice found, indice = 3"),
    ("divisor", np.array([2, 0, 1]), "Div node 'division': Integer division by zero"),
    ("modulus", np.array([2, 2, 0], np.int32), "Mod: Integer modulo by zero"),
]


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory, load_artifact: Any) -> tuple[Any, Any]:
    """A model of all operators that refuse numbers: its session in onnxruntime, and its kernels."""
    from tests.compiler.conftest import compile_into

    nodes = [
        node("Gather", ["data", "gather"], ["y0"], name="named"),
        node("Gather", ["data", "gather_last"], ["y1"], axis=1),
        node("GatherElements", ["data", "elements"], ["y2"]),
        node("GatherND", ["data", "nd"], ["y3"]),
        node("GatherND", ["data", "slices"], ["y4"]),
        node("ScatterElements", ["data", "scatter", "updates"], ["y5"]),
        node("ScatterND", ["data", "scatter_nd", "pair"], ["y6"]),
        node("Div", ["dividend", "divisor"], ["y7"], name="division"),
        node("Mod", ["three", "modulus"], ["y8"]),
        node("Add", ["y8", "one"], ["y9"]),
    ]
    constants = {
        "updates": np.full((2, 3), 50, np.float32),
        "pair": np.array([50, 60], np.float32),
        "three": np.array([9, -9, 7], np.int32),
        "one": np.array([1], np.int32),
    }
    folder = tmp_path_factory.mktemp("checked")
    session = save(folder / "model.onnx", nodes, {"data": DATA, **SOUND}, constants)
    return session, load_artifact(compile_into(folder, folder / "model.onnx").folder)


def test_sound_numbers_are_not_refused(checked: tuple[Any, Any]) -> None:
    session, runner = checked
    answers = runner({"data": DATA, **SOUND})
    assert not runner.refusals
    for output, expected in zip(session.get_outputs(), session.run(None, {"data": DATA, **SOUND}), strict=True):
        np.testing.assert_array_equal(answers[output.name], expected, err_msg=output.name)


@pytest.mark.parametrize(
    ("name", "value", "text"), REFUSED, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(REFUSED)]
)
def test_refusals_are_those_of_onnxruntime(checked: tuple[Any, Any], name: str, value: Array, text: str) -> None:
    session, runner = checked
    feeds = {"data": DATA, **SOUND, name: value}
    with pytest.raises(Exception, match=r"ONNXRuntimeError") as failed:
        session.run(None, feeds)
    runner(feeds)
    assert [(True, refusal) for refusal in runner.refusals] == [failure_of(failed.value)]
    assert text in runner.refusals[0]


def test_what_kills_onnxruntime_is_refused(checked: tuple[Any, Any]) -> None:
    _, runner = checked
    feeds = {"data": DATA, **SOUND, "dividend": np.array([1, -(2**63), 1]), "divisor": np.array([-1, -1, -1])}
    runner(feeds)
    assert runner.refusals == ["Div node 'division': the least integer divided by -1 is no integer of its type"]


@pytest.mark.parametrize(
    ("item", "kinds", "why"),
    [
        (node("Cast", ["a"], ["y"], to=onnx.TensorProto.UINT32), ["float32"], "uint32's range"),
        (node("Mod", ["a", "b"], ["y"], fmod=1), ["int64", "int64"], "float64 for fmod"),
        (node("Pow", ["a", "b"], ["y"]), ["int64", "int64"], "powers of int64"),
        (node("Pow", ["a", "b"], ["y"]), ["int32", "float32"], "powers of int32"),
    ],
    ids=["Cast", "Mod", "Pow", "Pow of float"],
)
def test_what_no_kernel_can_repeat_stays_with_onnxruntime(
    item: Any, kinds: list[str], why: str, tmp_path: Path, compile_file: Any
) -> None:
    save(tmp_path / "model.onnx", [item], {name: np.ones(5, kind) for name, kind in zip("ab", kinds, strict=False)}, {})
    manifest = compile_file(tmp_path / "model.onnx").manifest
    assert manifest.engine is Engine.ONNXRUNTIME
    assert why in manifest.fallback_reason
