"""Small ONNX networks that are compiled up to outputs whose sizes depend on data."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.helpers.island_networks import loop
from tests.helpers.onnx_networks import Array

node = helper.make_node
NAMES = np.array(["cat", "dog", "Überhund", "", "bird"], object)
ML = "ai.onnx.ml"
FLOAT, WHOLE, STRING = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING
Tensors = dict[str, tuple[int, list[int | str] | None]]


def _floats(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def _save(folder: Path, nodes: list[Any], inputs: Tensors, outputs: Tensors, constants: dict[str, Array]) -> Path:
    graph = helper.make_graph(
        nodes,
        "tail",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in outputs.items()],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.onnx"
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(ML, 2)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


def detector(folder: Path, rows: int | str = 1) -> Path:
    """Boxes and scores of two classes at 64 places; those that are left of them, and all scores."""
    nodes = [
        node("Conv", ["image", "first"], ["c"], pads=[1] * 4, strides=[2, 2]),
        node("Relu", ["c"], ["r"]),
        node("Conv", ["r", "second"], ["d"], pads=[1] * 4, strides=[2, 2]),
        node("Relu", ["d"], ["features"]),
        node("Conv", ["features", "corners"], ["e"]),
        node("Reshape", ["e", "four"], ["f"]),
        node("Transpose", ["f"], ["g"], perm=[0, 2, 1]),
        node("Sigmoid", ["g"], ["places"]),
        node("Conv", ["features", "kinds"], ["h"]),
        node("Reshape", ["h", "two"], ["i"]),
        node("Sigmoid", ["i"], ["all_scores"]),
        node("NonMaxSuppression", ["places", "all_scores", "most", "overlap", "least"], ["kept"]),
        node("Gather", ["kept", "place"], ["which"], axis=1),
        node("GatherND", ["all_scores", "kept"], ["scores"]),
        node("Gather", ["kept", "kind"], ["classes"], axis=1),
        node("Squeeze", ["which", "kind"], ["index"]),
        node("Gather", ["places", "index"], ["picked"], axis=1),
        node("Squeeze", ["picked", "zero"], ["boxes"]),
    ]
    weights = {
        "first": _floats(16, 3, 3, 3) / 2,
        "second": _floats(32, 16, 3, 3) / 6,
        "corners": _floats(4, 32, 1, 1) / 3,
        "kinds": _floats(2, 32, 1, 1) / 4,
    }
    numbers = {"four": [0, 4, -1], "two": [0, 2, -1], "most": [20], "place": [2], "kind": [1], "zero": [0]}
    limits = {"overlap": np.array([0.5], np.float32), "least": np.array([0.7], np.float32)}
    constants = {**weights, **{name: np.array(value) for name, value in numbers.items()}, **limits}
    outputs: Tensors = {
        "boxes": (FLOAT, ["n", 4]),
        "scores": (FLOAT, ["n"]),
        "classes": (WHOLE, ["n", 1]),
        "all_scores": (FLOAT, [rows, 2, 64]),
    }
    return _save(folder, nodes, {"image": (FLOAT, [rows, 3, 32, 32])}, outputs, constants)


def numbered(folder: Path) -> Path:
    """Boxes of several images, each with the number of its image; an image of zeros has one."""
    nodes = [
        node("Conv", ["image", "corners", "wide"], ["e"], strides=[4, 4]),
        node("Reshape", ["e", "four"], ["f"]),
        node("Transpose", ["f"], ["g"], perm=[0, 2, 1]),
        node("Sigmoid", ["g"], ["places"]),
        node("Conv", ["image", "kinds"], ["h"], strides=[4, 4]),
        node("Reshape", ["h", "one"], ["i"]),
        node("Sigmoid", ["i"], ["scores"]),
        node("NonMaxSuppression", ["places", "scores", "most", "overlap", "least"], ["kept"]),
    ]
    constants = {
        "corners": _floats(4, 3, 4, 4) / 2,
        "kinds": _floats(1, 3, 4, 4) / 2,
        "wide": np.array([0, 0, 2, 2], np.float32),
        "four": np.array([0, 4, -1]),
        "one": np.array([0, 1, -1]),
        "most": np.array([20]),
        "overlap": np.array([0.5], np.float32),
        "least": np.array([0.4], np.float32),
    }
    return _save(folder, nodes, {"image": (FLOAT, ["N", 3, 32, 32])}, {"kept": (WHOLE, ["n", 3])}, constants)


def image(seed: int) -> Array:
    """An image; in the first one there is nothing."""
    return (np.random.default_rng(seed).standard_normal((1, 3, 32, 32)) * (seed > 0) / 2).astype(np.float32)


def places(folder: Path) -> Path:
    """Where numbers are not zero: many of an image, and of what as many products give as the request says."""
    nodes = [
        node("Conv", ["x", "w"], ["c"], pads=[1] * 4),
        node("Relu", ["c"], ["r"]),
        node("NonZero", ["r"], ["y"]),
        loop("count", "eye", "looped"),
        node("NonZero", ["looped"], ["z"]),
    ]
    constants = {"w": _floats(8, 3, 3, 3), "eye": np.eye(32, dtype=np.float32)}
    inputs: Tensors = {"x": (FLOAT, [1, 3, 32, 32]), "count": (WHOLE, [1])}
    return _save(folder, nodes, inputs, {"y": (WHOLE, None), "z": (WHOLE, None)}, constants)


def first(folder: Path) -> Path:
    """The places of numbers above zero, and the first one, which there must be."""
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Relu", ["c"], ["r"]),
        node("NonZero", ["r"], ["y"]),
        node("Gather", ["y", "zero"], ["z"], axis=1),
    ]
    outputs: Tensors = {"y": (WHOLE, None), "z": (WHOLE, None)}
    constants = {"w": _floats(8, 3, 3, 3), "zero": np.array(0)}
    return _save(folder, nodes, {"x": (FLOAT, [1, 3, 6, 6])}, outputs, constants)


def labels(folder: Path) -> Path:
    """A text for each row, and the scores that it was chosen by."""
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Relu", ["c"], ["r"]),
        node("GlobalAveragePool", ["r"], ["p"]),
        node("Flatten", ["p"], ["f"]),
        node("Gemm", ["f", "v"], ["scores"]),
        node("ArgMax", ["scores"], ["best"], axis=1, keepdims=0),
        node("Gather", ["names", "best"], ["label"]),
    ]
    outputs: Tensors = {"label": (STRING, ["N"]), "scores": (FLOAT, ["N", 5])}
    constants = {"w": _floats(8, 3, 3, 3), "v": _floats(8, 5), "names": NAMES}
    return _save(folder, nodes, {"x": (FLOAT, ["N", 3, 6, 6])}, outputs, constants)


def classifier(folder: Path) -> Path:
    """What converters from scikit-learn write for a pipeline whose classes are words."""
    texts = NAMES.tolist()
    weights = {"coefficients": _floats(5, 4).ravel().tolist(), "intercepts": _floats(5).tolist()}
    nodes = [
        node("LinearClassifier", ["x"], ["label", "raw"], domain=ML, classlabels_strings=texts, **weights),
        node("Normalizer", ["raw"], ["scores"], domain=ML, norm="L1"),
        node("ZipMap", ["scores"], ["chances"], domain=ML, classlabels_strings=texts),
    ]
    path = _save(folder, nodes, {"x": (FLOAT, ["N", 4])}, {"label": (STRING, ["N"])}, {})
    model = onnx.load(path)
    number = helper.make_tensor_type_proto(FLOAT, [])
    maps = helper.make_sequence_type_proto(helper.make_map_type_proto(STRING, number))
    model.graph.output.append(helper.make_value_info("chances", maps))
    onnx.save(model, path)
    return path


def extracted(folder: Path) -> Path:
    """The same as converters from scikit-learn write it, and each row's best two classes by another encoder."""
    nodes = [
        node("Gemm", ["x", "v"], ["scores"]),
        node("ArgMax", ["scores"], ["best"], axis=1, keepdims=0),
        node("ArrayFeatureExtractor", ["names", "best"], ["picked"], domain=ML),
        node("Reshape", ["picked", "line"], ["label"]),
        node("TopK", ["scores", "two"], ["_", "kinds"]),
        node("LabelEncoder", ["kinds"], ["tops"], domain=ML, keys_int64s=[0, 1, 3], values_strings=["a", "b", "ü"]),
    ]
    outputs: Tensors = {"label": (STRING, ["N"]), "tops": (STRING, ["N", 2])}
    constants = {"v": _floats(8, 5), "names": NAMES, "line": np.array([-1]), "two": np.array([2])}
    return _save(folder, nodes, {"x": (FLOAT, ["N", 8])}, outputs, constants)


def accumulator(folder: Path) -> Path:
    """Adds up twice what a sequence sends, and says where the sum is not zero."""
    nodes = [
        node("MatMul", ["x", "double"], ["d"]),
        node("Add", ["before", "d"], ["after"]),
        node("NonZero", ["after"], ["y"]),
    ]
    inputs: Tensors = {"x": (FLOAT, [1, 4]), "before": (FLOAT, [1, 4])}
    outputs: Tensors = {"y": (WHOLE, None), "after": (FLOAT, [1, 4])}
    return _save(folder, nodes, inputs, outputs, {"double": 2 * np.eye(4, dtype=np.float32)})


def sums(folder: Path) -> Path:
    """A sum for each box."""
    outputs: Tensors = {"y": (FLOAT, ["n"])}
    nodes = [node("ReduceSum", ["x", "one"], ["y"], keepdims=0)]
    return _save(folder, nodes, {"x": (FLOAT, ["n", 4])}, outputs, {"one": np.array([1])})
