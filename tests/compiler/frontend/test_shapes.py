"""Shapes are those that onnxruntime computes, also where onnx's inference says otherwise, in files as well."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, shape_inference

from gangway.artifact.format import Engine
from gangway.compiler.frontend.importer import read_graph
from tests.helpers.onnx_models import make_model, value_info

Array = np.ndarray[Any, Any]
node = helper.make_node
LIMITS = [2**63 - 1, 2**31 - 1, -(2**63), 4, 0, -1, -7, 9]


def model_of(item: Any, feeds: dict[str, Array], constants: dict[str, Array], opset: int) -> Any:
    return make_model([item], feeds, dict.fromkeys(item.output, ...), constants, opset, ir_version=10)


def answers_of(model: Any, feeds: dict[str, Array]) -> list[Array] | None:
    """What onnxruntime answers; None if it refuses."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    try:
        return list(session.run(None, feeds))
    except Exception:  # onnxruntime's own exceptions have no common base
        return None


def pools(random: np.random.Generator) -> tuple[Any, dict[str, Array], dict[str, Array], int]:
    rank = int(random.integers(1, 4))
    kernel, strides = random.integers(1, 5, rank), random.integers(1, 6, rank)
    attributes: dict[str, Any] = {"kernel_shape": kernel.tolist(), "strides": strides.tolist()}
    operator = str(random.choice(["MaxPool", "AveragePool", "LpPool"]))
    opset = int(random.choice({"MaxPool": [10, 12, 21, 22], "AveragePool": [10, 19, 22], "LpPool": [18, 22]}[operator]))
    mode = str(random.choice(["NOTSET", "NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"]))
    attributes |= {"auto_pad": mode, "ceil_mode": int(random.integers(0, 2))}
    if mode == "NOTSET":
        attributes["pads"] = [int(random.integers(0, kernel[n % rank])) for n in range(2 * rank)]
    if operator != "AveragePool" or opset >= 19:
        attributes["dilations"] = random.integers(1, 3, rank).tolist()
    x = np.zeros((2, 3, *random.integers(2, 10, rank)), np.float32)
    return node(operator, ["x"], ["y"], **attributes), {"x": x}, {}, opset


def slices(random: np.random.Generator) -> tuple[Any, dict[str, Array], dict[str, Array], int]:
    rank = int(random.integers(1, 4))
    axes = random.permutation(rank)
    ends = [[int(random.choice([*LIMITS, int(random.integers(-9, 9))])) for _ in axes] for _ in range(2)]
    values = (*ends, axes, random.choice([1, 2, -1, -2, -9, 50], rank))
    constants = {name: np.array(value, np.int64) for name, value in zip("abcd", values, strict=True)}
    x = np.zeros(random.integers(1, 8, rank), np.float32)
    return node("Slice", ["x", *"abcd"], ["y"]), {"x": x}, constants, 13


def transposed(random: np.random.Generator) -> tuple[Any, dict[str, Array], dict[str, Array], int]:
    rank = int(random.integers(1, 4))
    strides = random.integers(1, 5, rank)
    kernel, size = random.integers(1, 5, rank), random.integers(1, 7, rank)
    mode = str(random.choice(["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"]))
    attributes: dict[str, Any] = {"strides": strides.tolist(), "auto_pad": mode}
    attributes["output_padding"] = [int(random.integers(0, step)) for step in strides]
    attributes["dilations"] = random.integers(1, 3, rank).tolist()
    if random.integers(0, 4) == 0:
        attributes["output_shape"] = (size * strides + random.integers(0, 3, rank)).tolist()
    elif mode == "NOTSET":
        attributes["pads"] = random.integers(0, 2, 2 * rank).tolist()
    feeds, constants = {"x": np.zeros((1, 2, *size), np.float32)}, {"w": np.zeros((2, 3, *kernel), np.float32)}
    return node("ConvTranspose", ["x", "w"], ["y"], **attributes), feeds, constants, 11


@pytest.mark.parametrize("make", [pools, slices, transposed], ids=lambda make: make.__name__)
def test_every_shape_is_that_of_onnxruntime(make: Any, tmp_path: Path) -> None:
    """One that is not known leaves the node to onnxruntime; of what that refuses, nothing is claimed."""
    random, path = np.random.default_rng(7), tmp_path / "model.onnx"
    known = wrong_by_onnx = 0
    for _ in range(150):
        item, feeds, constants, opset = make(random)
        model = model_of(item, feeds, constants, opset)
        answers = answers_of(model, feeds)
        if answers is None:
            continue
        onnx.save(model, path)
        kind = read_graph(path).types.get("y")
        if kind is not None:
            known += 1
            assert kind.shape == answers[0].shape, (item, feeds["x"].shape, constants)
        (inferred,) = shape_inference.infer_shapes(model, data_prop=True).graph.output
        dims = [dim.dim_value for dim in inferred.type.tensor_type.shape.dim]
        wrong_by_onnx += dims != list(answers[0].shape)
    assert known > 60
    assert wrong_by_onnx > 0


POOL = node("MaxPool", ["x"], ["p"], kernel_shape=[2, 3], strides=[3, 4], ceil_mode=1)
X = np.random.default_rng(2).standard_normal((1, 3, 9, 12)).astype(np.float32)
NETWORKS: dict[str, list[Any]] = {
    "alone": [POOL],
    "before what keeps the shape": [POOL, node("Relu", ["p"], ["y"])],
    "twice": [POOL, node("MaxPool", ["p"], ["y"], kernel_shape=[1, 2], strides=[2, 2], ceil_mode=1)],
    "between convolutions": [
        node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        node("AveragePool", ["c"], ["p"], kernel_shape=[2, 2], strides=[4, 5], ceil_mode=1, count_include_pad=1),
        node("Conv", ["p", "w"], ["y"], pads=[1, 1, 1, 1]),
    ],
    "beside an island": [
        node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        node("MaxPool", ["c"], ["y", "places"], kernel_shape=[2, 2], strides=[4, 5], ceil_mode=1),
    ],
    "reversed": [node("Slice", ["x", "begin", "end", "axis", "step"], ["y"])],
}
CONSTANTS: dict[str, Array] = {
    "w": np.random.default_rng(3).standard_normal((3, 3, 3, 3)).astype(np.float32),
    "begin": np.array([100, -1]),
    "end": np.array([2**63 - 1, 2**31 - 1]),
    "axis": np.array([2, 3]),
    "step": np.array([-2, -3]),
}


@pytest.mark.parametrize("declared", ["by onnx", "right", "not"])
@pytest.mark.parametrize("name", NETWORKS)
def test_answers_are_whole(name: str, declared: str, tmp_path: Path, compile_file: Any, load_artifact: Any) -> None:
    """Also where the file declares what exporters infer, or what onnxruntime answers."""
    nodes = NETWORKS[name]
    read = {source for item in nodes for source in item.input}
    outputs = [output for item in nodes for output in item.output if output not in read]
    constants = {key: value for key, value in CONSTANTS.items() if key in read}
    model = make_model(nodes, {"x": X}, dict.fromkeys(outputs, ...), constants)
    expected = answers_of(model, {"x": X})
    assert expected
    if declared == "by onnx":
        model = shape_inference.infer_shapes(model, data_prop=True)
    elif declared == "right":
        for value, answer in zip(model.graph.output, expected, strict=True):
            value.CopyFrom(value_info(value.name, answer))
    onnx.save(model, tmp_path / "model.onnx")
    compiled = compile_file(tmp_path / "model.onnx")
    if name == "beside an island":
        assert compiled.manifest.engine is Engine.ONNXRUNTIME or compiled.manifest.islands
        assert all(tensor.shape in ((1, 3, -1, -1), (1, 3, 3, 3)) for tensor in compiled.manifest.outputs)
        return
    assert not compiled.manifest.fallback_reason
    answers = load_artifact(compiled.folder)({"x": X})
    for output, answer in zip(outputs, expected, strict=True):
        assert answers[output].shape == answer.shape
        np.testing.assert_allclose(answers[output], answer, rtol=1e-5, atol=1e-5)
