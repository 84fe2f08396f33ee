"""Where ONNX leaves an answer open, kernels answer what onnxruntime answers, or refuse as it does, in its words."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from gangway.artifact.format import Engine
from gangway.executor.onnxruntime_program import failure_of
from tests.helpers.onnx_models import make_model

pytestmark = pytest.mark.long

node = helper.make_node

Array = np.ndarray[Any, Any]
EDGES = [
    *(np.nan, np.inf, -np.inf, 0.0, -0.0, 3.7, -3.7, -1.0, 127.9, 128.0, 255.9, 256.0, 300.0, -128.9, -129.0, 32768.0),
    *(65535.0, 65536.0, -32769.0, 2147483520.0, 2.0**31, -(2.0**31), -2147483904.0, 4294967040.0, 2.0**32, 5e9, -5e9),
    *(9.2233715e18, 2.0**63, -(2.0**63), -9.3e18, 1.8446743e19, 2.0**64, 1e20, -1e20, 1e30, -1e30),
]
COUNT = 2 * len(EDGES) + 5  # no multiple of a vector


def save(
    path: Path, nodes: list[Any], feeds: Mapping[str, Array], constants: Mapping[str, Array], opset: int = 21
) -> Any:
    """Write the model of these nodes, all of whose results are outputs, and return its session in onnxruntime."""
    outputs = dict.fromkeys((name for item in nodes for name in item.output), ...)
    model = make_model(nodes, feeds, outputs, constants, opset, ir_version=10)
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
            for name in (
                "ReduceSum",
                "ReduceProd",
                "ReduceMean",
                "ReduceL1",
                "ReduceL2",
                "ReduceSumSquare",
                "ReduceMax",
            ):
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


FAR = np.array(
    [
        *(np.nan, np.inf, -np.inf, 0, -0.0, 1, -1, 2.5, -2.5, 3.4e38, -3.4e38, 1e-40, 1e9, -1e9, -3e9, 1e12, -1e12),
        *(1e15, -1e15, 2.5e20, 7e30, 1048577, -1048577, 3e5, 100, -100, 16367173 * 2.0**72, 0.5, -0.5),
    ],
    np.float32,
)
LOWEST = np.finfo(np.float32).min
ROWS = np.array(
    [
        *([np.nan, 1, 2, 3], [np.inf, 1, 2, 3], [-np.inf, 1, 2, 3], [-np.inf] * 4, [np.inf] * 4, [0, -0.0, 0, 0]),
        *(
            [np.inf, -np.inf, 1, 0],
            [1, np.inf, np.inf, 1],
            [LOWEST] * 4,
            [-LOWEST] * 4,
            [1, 2, np.nan, 3],
            [np.nan] * 4,
        ),
    ],
    np.float32,
)
Table = tuple[list[Any], dict[str, Array], dict[str, Array]]


def far() -> Table:
    """Angles and other numbers whose size or sign formulas are not made for; also in vectors with common ones."""
    names = ("Sin", "Cos", "Tan", "Acosh", "Asinh", "Sinh", "Tanh", "Erf", "Gelu", "Mish", "Softplus", "Elu", "Sigmoid")
    nodes = [node(name, [kind], [f"{name}_{kind}"]) for name in names for kind in ("far", "mixed")]
    nodes += [node("Gelu", ["far"], ["gelu_tanh"], approximate="tanh"), node("Sin", ["far64"], ["Sin_far64"])]
    nodes += [node("Mul", ["mixed", "mixed"], ["square"]), node("Cos", ["square"], ["fused"])]
    nodes += [node("Mod", [f"a{kind}", f"b{kind}"], [f"mod{kind}"], fmod=1) for kind in ("32", "64")]
    mixed = np.linspace(-9, 9, 900).astype(np.float32)
    mixed[::31] = 3e17
    a, b = np.meshgrid(
        np.array([5.5, -5.5, 3e38, 1e-40, 0, -0.0, np.inf, np.nan]), np.array([3, -3, 0.7, 1e-30, np.inf, 0])
    )
    far64 = np.concatenate([FAR, [1e100, -1e300, 6381956970095103 * 2.0**797]])
    feeds = {"far": FAR, "mixed": mixed, "far64": far64.astype(np.float64)}
    feeds |= {f"a{kind}": a.astype(f"float{kind}") for kind in ("32", "64")}
    return nodes, feeds | {f"b{kind}": b.astype(f"float{kind}") for kind in ("32", "64")}, {}


def infinite_rows() -> Table:
    nodes, constants = [], {"last": np.array([1]), "first": np.array([0])}
    for name in ("ReduceLogSumExp", "ReduceSum", "ReduceMean", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceProd"):
        nodes.append(node(name, ["rows", "last"], [f"{name}_rows"]))
        nodes.append(node(name, ["columns", "first"], [f"{name}_columns"], keepdims=0))
    nodes += [node(name, ["rows"], [name]) for name in ("Hardmax", "Softmax", "LogSoftmax")]
    nodes += [node("GlobalMaxPool", [name], [f"largest_{name}"]) for name in ("image", "line", "volume")]
    nodes += [node("Max", ["rows", "numbers"], ["max"]), node("Min", ["rows", "numbers"], ["min"])]
    none = np.full(24, -np.inf, np.float32)
    images = {"image": none.reshape(1, 2, 3, 4), "line": none.reshape(1, 2, 12), "volume": none.reshape(1, 2, 3, 2, 2)}
    feeds = images | {"rows": ROWS, "columns": ROWS.T.copy(), "numbers": np.array([0, np.nan, -1, np.inf], np.float32)}
    return nodes, feeds, constants


def limits() -> Table:
    """Limits that are NaN limit nothing, and a C of no weight counts nowhere."""
    nodes: list[Any] = []
    constants: dict[str, Array] = {"w": np.eye(4, 3, dtype=np.float32), "c": np.array([1, np.nan, np.inf], np.float32)}
    feeds: dict[str, Array] = {"x": FAR, "image": np.resize(FAR, (1, 2, 4, 8)), "four": np.ones((5, 4), np.float32)}
    feeds |= {"run_w": constants["w"], "run_c": constants["c"]}
    for index, pair in enumerate(((np.nan, 1), (0, np.nan), (np.nan, np.nan), (-1, 1), (1, -1), (-np.inf, 0))):
        for name, value in zip(("least", "largest"), pair, strict=True):
            constants[f"{name}{index}"] = feeds[f"run_{name}{index}"] = np.array(value, np.float32)
        for source in ("x", "image"):
            for origin in ("", "run_"):
                names = [source, f"{origin}least{index}", f"{origin}largest{index}"]
                nodes.append(node("Clip", names, [f"clip_{source}{origin}{index}"]))
    nodes += [node("Gemm", ["four", "w", "c"], [f"gemm{beta}"], beta=beta) for beta in (0.0, 0.5)]
    nodes += [node("Gemm", ["four", "run_w", "run_c"], [f"run_gemm{beta}"], beta=beta) for beta in (0.0, 0.5)]
    return nodes, feeds, constants


def quantised() -> Table:
    values = {
        "zeros": [0, -0.0, 0],
        "above": [1, 2, 5],
        "below": [-3, -1, -2],
        "around": [-1, 0.5, 3],
        "tiny": [1e-40] * 3,
    }
    feeds = {name: np.array(value, np.float32) for name, value in values.items()}
    nodes = [node("DynamicQuantizeLinear", [name], [f"{name}_y", f"{name}_s", f"{name}_z"]) for name in feeds]
    return nodes, feeds, {}


@pytest.mark.parametrize("table", [far, infinite_rows, limits, quantised], ids=lambda table: table.__name__)
def test_floats_are_those_of_onnxruntime(table: Any, tmp_path: Path, compile_file: Any, load_artifact: Any) -> None:
    nodes, feeds, constants = table()
    session = save(tmp_path / "model.onnx", nodes, feeds, constants)
    compiled = compile_file(tmp_path / "model.onnx")
    assert compiled.manifest.fallback_reason == ""
    answers = load_artifact(compiled.folder)(feeds)
    for output, expected in zip(session.get_outputs(), session.run(None, feeds), strict=True):
        np.testing.assert_allclose(answers[output.name], expected, rtol=2e-6, atol=2e-6, err_msg=output.name)


@pytest.mark.parametrize("opset", [23, 24])
@pytest.mark.parametrize("is_constant", [True, False])
@pytest.mark.parametrize("causal", [0, 1])
def test_a_mask_that_leaves_no_key_gives_zeros(
    opset: int, is_constant: bool, causal: int, tmp_path: Path, compile_file: Any, load_artifact: Any
) -> None:
    """By the lowest number, by minus infinity, or by both; a number next to the lowest hides none."""
    random = np.random.default_rng(5)
    feeds = {name: random.standard_normal((1, 2, 7, 16)).astype(np.float32) for name in "qkv"}
    mask = np.zeros((7, 7), np.float32)
    mask[1], mask[2], mask[3, ::2], mask[4, 1:], mask[5] = LOWEST, -np.inf, -np.inf, LOWEST, np.nextafter(LOWEST, 0)
    mask[3, 1::2], mask[6, 3] = LOWEST, -np.inf
    given = {"mask": mask}
    item = node("Attention", ["q", "k", "v", "mask"], ["y"], is_causal=causal)
    constants, inputs = (given, feeds) if is_constant else ({}, feeds | given)
    session = save(tmp_path / "model.onnx", [item], inputs, constants, opset)
    compiled = compile_file(tmp_path / "model.onnx")
    assert compiled.manifest.fallback_reason == ""
    (expected,) = session.run(None, inputs)
    assert not expected[0, :, 1:4].any()
    np.testing.assert_allclose(load_artifact(compiled.folder)(inputs)["y"], expected, rtol=1e-5, atol=1e-5)


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
