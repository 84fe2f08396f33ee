"""Models whose operator sets are newer than onnxruntime's are served by it, too, where their nodes mean the same."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, defs, helper, numpy_helper

from gangway.artifact.format import Engine
from gangway.compiler.errors import ModelError, UnreadableModelError, UnsupportedModelError
from gangway.compiler.model_file import open_model, parse
from gangway.compiler.opsets import (
    LAST_KERNELS,
    NEWEST_IR_VERSION,
    NEWEST_OPSETS,
    REVIEWED_OPSETS,
    restamp,
)
from gangway.compiler.quantize_command import quantise
from tests.helpers.onnx_models import make_model

node = helper.make_node
RANDOM = np.random.default_rng(5)
FLOAT, LONG = TensorProto.FLOAT, TensorProto.INT64
model_of = partial(make_model, opset=28, ir_version=14)  # as the newest onnx stamps it


def answers(file: Path, feeds: Mapping[str, Any]) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(file, options).run(None, dict(feeds))


def test_a_node_for_onnxruntime_in_a_compiled_model(
    tmp_path: Path, compile_file: Callable[..., Any], load_artifact: Callable[[Path], Any]
) -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["a"]),
        node("ReverseSequence", ["a", "lengths"], ["b"], time_axis=1, batch_axis=0),
        node("MatMul", ["b", "w"], ["y"]),
    ]
    inputs = {"x": (FLOAT, [16, 32]), "lengths": (LONG, [16])}
    weights = {"w": RANDOM.standard_normal((32, 32)).astype(np.float32)}
    path = tmp_path / "model.onnx"
    onnx.save(model_of(nodes, inputs, {"y": (FLOAT, [16, 32])}, weights), path)
    runner = load_artifact(compile_file(path).folder)
    assert runner.manifest.engine is Engine.NATIVE and len(runner.manifest.islands) == 1
    older = tmp_path / "older.onnx"
    onnx.save(model_of(nodes, inputs, {"y": (FLOAT, [16, 32])}, weights, opset=20, ir_version=9), older)
    feeds = {"x": RANDOM.standard_normal((16, 32)).astype(np.float32), "lengths": RANDOM.integers(1, 32, 16)}
    np.testing.assert_allclose(runner(feeds)["y"], answers(older, feeds)[0], rtol=1e-4, atol=1e-3)


def branch_model() -> Any:
    """A model of one symbolic shape, with operators that opset 28 has given more types, inside a branch, too."""
    result = [helper.make_tensor_value_info("r", FLOAT, None)]
    bodies = {
        "then_branch": helper.make_graph([node("Celu", ["x"], ["r"])], "then", [], result),
        "else_branch": helper.make_graph([node("Einsum", ["x"], ["r"], equation="ij->ij")], "else", [], result),
    }
    nodes = [
        node("ReduceSum", ["x"], ["s"], keepdims=0),
        node("Greater", ["s", "zero"], ["c"]),
        node("If", ["c"], ["i"], **bodies),
        node("Unique", ["i"], ["y"]),
    ]
    return model_of(nodes, {"x": (FLOAT, ["N", "M"])}, {"y": (FLOAT, None)}, {"zero": np.float32(0)})


def function_model() -> Any:
    """A model that calls its own function, which imports a newer opset, too."""
    nodes = [
        *(
            node("Constant", [], [name], value=numpy_helper.from_array(np.float32(value)))
            for name, value in {"from": 0, "to": 3, "step": 1}.items()
        ),
        node("Range", ["from", "to", "step"], ["r"], stash_type=1),
        node("ReduceSum", ["r"], ["t"], keepdims=0),
        node("Mul", ["a", "t"], ["b"]),
    ]
    function = helper.make_function("own", "Twice", ["a"], ["b"], nodes, [helper.make_opsetid("", 28)])
    call = [node("Twice", ["x"], ["f"], domain="own"), node("NonZero", ["f"], ["y"])]
    return model_of(call, {"x": (FLOAT, [3])}, {"y": (LONG, None)}, functions=[function], domains={"own": 1})


def table_model() -> Any:
    """A model of two domains."""
    nodes = [
        node("LabelEncoder", ["x"], ["l"], domain="ai.onnx.ml", keys_strings=["a", "b"], values_int64s=[4, 5]),
        node("OneHot", ["l", "depth", "values"], ["y"]),
    ]
    constants = {"depth": np.int64(6), "values": np.array([0, 1], np.float32)}
    return model_of(
        nodes, {"x": (TensorProto.STRING, ["N"])}, {"y": (FLOAT, ["N", 6])}, constants, domains={"ai.onnx.ml": 5}
    )


@pytest.mark.parametrize(
    ("model", "feed", "expected"),
    [
        (branch_model(), np.array([[2, 2], [1, 3]], np.float32), [1, 2, 3]),
        (function_model(), np.array([1, 0, 2], np.float32), [[0, 2]]),
        (table_model(), np.array(["b", "a"], object), np.eye(6)[[5, 4]]),
    ],
)
def test_a_whole_model_for_onnxruntime(
    tmp_path: Path, compile_file: Callable[..., Any], model: Any, feed: Any, expected: Any
) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    compiled = compile_file(path)
    assert compiled.manifest.engine is Engine.ONNXRUNTIME
    np.testing.assert_array_equal(answers(compiled.folder / "onnx" / "model.onnx", {"x": feed})[0], expected)
    np.testing.assert_array_equal(open_model(path).run(None, {"x": feed})[0], expected)


def test_weights_in_other_files_stay_there(tmp_path: Path, compile_file: Callable[..., Any]) -> None:
    nodes = [node("Gather", ["w", "i"], ["g"]), node("NonZero", ["g"], ["y"])]
    weights = RANDOM.integers(0, 2, (64, 64)).astype(np.float32)
    model = model_of(nodes, {"i": (LONG, [1])}, {"y": (LONG, None)}, {"w": weights})
    (tmp_path / "m").mkdir()
    path = tmp_path / "m" / "net.onnx"
    onnx.save(model, path, save_as_external_data=True, location="data.bin", size_threshold=100)
    compiled = compile_file(path)
    assert set(compiled.manifest.files) == {"onnx/model.onnx", "onnx/data.bin"}
    expected = np.nonzero(weights[[9]])
    for found in (answers(compiled.folder / "onnx" / "model.onnx", {"i": [9]}), open_model(path).run(None, {"i": [9]})):
        np.testing.assert_array_equal(found[0], expected)


def test_large_weights_are_where_they_were(tmp_path: Path, compile_file: Callable[..., Any]) -> None:
    """A file is written anew around its initializers, however large, whether or not it is as onnx would write it."""
    weights = {f"w{index}": RANDOM.standard_normal((40, 40)).astype(np.float32) for index in range(3)}
    total = [node("Sum", list(weights), ["s"]), node("Mul", ["s", "x"], ["m"]), node("NonZero", ["m"], ["y"])]
    model = model_of(total, {"x": (FLOAT, [1])}, {"y": (LONG, None)}, {**weights, "unused": np.arange(3)})
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    written = onnx.load(compile_file(path).folder / "onnx" / "model.onnx")
    assert [tensor.name for tensor in written.graph.initializer] == [*weights, "unused"]
    for tensor in written.graph.initializer[:3]:
        np.testing.assert_array_equal(numpy_helper.to_array(tensor), weights[tensor.name])
    assert (written.ir_version, written.opset_import[0].version) == (NEWEST_IR_VERSION, NEWEST_OPSETS[""])


CHANCE = {"shape": [4], "dtype": FLOAT}
WITHOUT_KERNELS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "RoiAlign": ([("x", [1, 2, 8, 8]), ("rois", [3, 4]), "batch"], {"output_height": 2, "output_width": 2}),
    "MaxRoiPool": ([("x", [1, 2, 8, 8]), ("rois", [3, 5])], {"pooled_shape": [2, 2]}),
    "GlobalLpPool": ([("x", [1, 2, 8, 8])], {}),
    "Bernoulli": ([("x", [1, 4])], {}),
    "Multinomial": ([("x", [1, 4])], {"sample_size": 2}),
    "RandomNormalLike": ([("x", [1, 4])], {}),
    "RandomUniformLike": ([("x", [1, 4])], {}),
    "RandomNormal": ([], CHANCE),
    "RandomUniform": ([], CHANCE),
}


@pytest.mark.parametrize("opset", [22, 25, 28])
@pytest.mark.parametrize("operator", WITHOUT_KERNELS)
def test_operators_that_newer_opsets_have_no_kernel_for(
    tmp_path: Path, compile_file: Callable[..., Any], operator: str, opset: int
) -> None:
    inputs, attributes = WITHOUT_KERNELS[operator]
    tensors = {item[0]: (FLOAT, item[1]) for item in inputs if not isinstance(item, str)} or {"x": (FLOAT, [4])}
    read = ["batch" if isinstance(item, str) else item[0] for item in inputs]
    constants = {"batch": np.zeros(3, np.int64)} if "batch" in read else {}
    nodes = [node(operator, read, ["r"], **attributes), node("Identity", ["x"], ["same"])]
    kind = TensorProto.INT32 if operator == "Multinomial" else FLOAT
    model = model_of(nodes, tensors, {"r": (kind, None), "same": (FLOAT, None)}, constants, opset=opset, ir_version=10)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    assert compile_file(path).manifest.outputs
    assert open_model(path).get_outputs()[0].name == "r"
    restamp(model)
    assert model.opset_import[0].version == 21


def refused(path: Path, compile_file: Callable[..., Any], model: Any) -> str:
    onnx.save(model, path)
    with pytest.raises(ModelError) as caught:
        compile_file(path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("first", "constants", "words"),
    [
        (node("SwiGLU", ["x"], ["a"], name="gate"), {}, "'gate' (SwiGLU): opset 26 has no such operator"),
        (
            node("SpaceToDepth", ["x"], ["a"], name="deep", blocksize=2, mode="CRD"),
            {},
            "'deep' (SpaceToDepth): opset 26 does not know its attribute 'mode'",
        ),
        (node("RoiAlign", ["x", "rois", "b"], ["r"], output_height=2, output_width=2), {}, "RoiAlign in no newer one"),
    ],
)
def test_the_operator_in_the_way_is_named(
    tmp_path: Path, compile_file: Callable[..., Any], first: Any, constants: Any, words: str
) -> None:
    """Of a model that onnxruntime must serve whole: its sizes are not known."""
    nodes = [first, node("Unique", [first.output[0]], ["y"])]
    if first.op_type == "RoiAlign":
        nodes.insert(1, node("RMSNormalization", ["r", "scale"], ["n"], name="norm"))
        nodes[-1] = node("Unique", ["n"], ["y"])
        constants = {"rois": np.ones((1, 4), np.float32), "b": np.zeros(1, np.int64), "scale": np.ones(2, np.float32)}
    model = model_of(nodes, {"x": (FLOAT, ["N", 4, "H", "W"])}, {"y": (FLOAT, None)}, constants)
    assert words in refused(tmp_path / "model.onnx", compile_file, model)


def test_attributes_that_say_what_their_absence_says_are_left_out() -> None:
    nodes = [node("SpaceToDepth", ["x"], ["y"], blocksize=2, mode="DCR")]
    model = model_of(nodes, {"x": (FLOAT, [1, 4, 8, 8])}, {"y": (FLOAT, None)})
    assert restamp(model) and [item.name for item in model.graph.node[0].attribute] == ["blocksize"]
    assert not restamp(model)


@pytest.mark.parametrize(("opset", "ir_version", "others"), [(99, 8, {}), (28, 99, {}), (17, 8, {"ai.onnx.ml": 99})])
def test_stamps_that_onnx_does_not_know_are_told(
    tmp_path: Path, compile_file: Callable[..., Any], opset: int, ir_version: int, others: dict[str, int]
) -> None:
    """What such a set calls Relu nobody knows: the owner is told which sets are possible."""
    stamps = {"opset": opset, "ir_version": ir_version, "domains": others}
    model = model_of([node("Relu", ["x"], ["y"])], {"x": [2]}, {"y": [2]}, **stamps)
    reason = refused(tmp_path / "model.onnx", compile_file, model)
    assert f"99, newer than onnx {onnx.__version__} knows" in reason.replace(" of ai.onnx.ml", "").replace(
        " of ai.onnx", ""
    )
    with pytest.raises(UnsupportedModelError, match="newer than onnx"):
        restamp(model)
    with pytest.raises(UnreadableModelError):
        compile_file(tmp_path / "model.onnx")


def test_new_models_are_quantised(tmp_path: Path) -> None:
    weights = {"w": RANDOM.standard_normal((16, 8)).astype(np.float32)}
    model = model_of([node("MatMul", ["x", "w"], ["y"])], {"x": (FLOAT, [4, 16])}, {"y": (FLOAT, [4, 8])}, weights)
    path, made = tmp_path / "model.onnx", tmp_path / "made.onnx"
    onnx.save(model, path)
    examples = [{"x": RANDOM.standard_normal((4, 16)).astype(np.float32)} for _ in range(2)]
    quantise(path, made, examples, "MinMax", [], False)
    assert any(item.op_type == "DequantizeLinear" for item in parse(made)[0].graph.node)


def opens(opset: int, ir_version: int, domain: str = "") -> bool:
    others = {domain: opset} if domain else {}
    stamps = {"opset": 17 if domain else opset, "ir_version": ir_version, "domains": others}
    model = model_of([node("Relu", ["x"], ["y"])], {"x": [2]}, {"y": [2]}, **stamps)
    try:
        onnxruntime.InferenceSession(model.SerializeToString())
    except Exception:
        return False
    return True


def test_the_limits_are_those_of_the_oldest_onnxruntime() -> None:
    """Any that pyproject.toml admits opens what is written; the oldest one opens nothing newer."""
    oldest = re.search(r"onnxruntime>=([\d.]+),", (Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert oldest
    is_oldest = onnxruntime.__version__.startswith(f"{oldest[1]}.")
    assert opens(17, NEWEST_IR_VERSION) and not (is_oldest and opens(17, NEWEST_IR_VERSION + 1))
    for domain, version in NEWEST_OPSETS.items():
        assert opens(version, 10, domain) and not (is_oldest and opens(version + 1, 10, domain))


def test_the_review_covers_the_installed_onnx() -> None:
    """A newer onnx may give an operator another meaning: then it is to be read, and `_REDEFINED` to be completed."""
    assert {"": defs.onnx_opset_version(), "ai.onnx.ml": defs.onnx_ml_opset_version()} == REVIEWED_OPSETS


def test_operators_keep_what_they_have() -> None:
    """What `restamp` looks at is all that newer definitions add: defaults and the order of inputs stay."""
    schemas: dict[str, list[Any]] = {}
    for schema in defs.get_all_schemas_with_history():
        if schema.domain == "" and schema.since_version > min(LAST_KERNELS.values()):
            older = defs.get_schema(schema.name, schema.since_version - 1) if _is_older(schema) else None
            schemas.setdefault(schema.name, []).append((older, schema))
    for pairs in schemas.values():
        for older, newer in pairs:
            if older is None:
                continue
            for name, attribute in older.attributes.items():
                assert attribute.default_value == newer.attributes[name].default_value, (newer.name, name)
            for kind in ("inputs", "outputs"):
                before, after = getattr(older, kind), getattr(newer, kind)
                options = [(item.name, item.option) for item in after[: len(before)]]
                assert options == [(item.name, item.option) for item in before], newer.name


def _is_older(schema: Any) -> bool:
    return bool(defs.has(schema.name, schema.since_version - 1))


def test_the_kernels_that_are_missing_are_those_of_the_installed_onnxruntime() -> None:
    """Of every operator of the newest opset that onnxruntime reads: one lacks a kernel there, or none has one."""
    missing = {}
    for schema in {each.name: each for each in defs.get_all_schemas()}.values():
        if schema.domain or not defs.has(schema.name, NEWEST_OPSETS[""]):
            continue
        if not _has_kernel(schema.name, NEWEST_OPSETS[""]):
            last = [opset for opset in range(NEWEST_OPSETS[""] - 1, 12, -1) if defs.has(schema.name, opset)]
            missing[schema.name] = next((opset for opset in last if _has_kernel(schema.name, opset)), 0)
    assert {name: opset for name, opset in missing.items() if opset} == LAST_KERNELS


PLAIN = {name: number for number, name in enumerate(("float", "int64", "uint8", "bool", "string", "int32", "int8"))}


def _has_kernel(operator: str, opset: int) -> bool:
    """Whether onnxruntime does not say that it has none, for plain types and attributes."""
    schema: Any = defs.get_schema(operator, opset)
    chosen: dict[str, str] = {}
    inputs = {}
    for index, item in enumerate(schema.inputs):
        possible = [kind for kind in PLAIN if f"tensor({kind})" in item.types]
        if item.option.name != "Optional" and possible:
            kind = chosen.setdefault(item.type_str, possible[0])
            element = {"float": FLOAT, "int64": LONG}.get(kind) or getattr(TensorProto, kind.upper())
            inputs[f"i{index}"] = (element, None)
    outputs = {f"o{index}": None for index, item in enumerate(schema.outputs) if item.option.name != "Optional"}
    plain = {"INT": 1, "FLOAT": 1.0, "STRING": "a", "INTS": [1, 1], "FLOATS": [1.0, 1.0], "STRINGS": ["a"]}
    needed = {name: item.type.name for name, item in schema.attributes.items() if item.required}
    if not set(needed.values()) <= plain.keys():
        return True  # a graph: those of control flow
    made = node(operator, list(inputs), list(outputs), **{name: plain[kind] for name, kind in needed.items()})
    model = model_of([made], inputs, {}, None, opset=opset, ir_version=10)
    model.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in outputs)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), options)
    except Exception as error:
        return "NOT_IMPLEMENTED" not in str(error)
    return True
