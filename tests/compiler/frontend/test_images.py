"""Operators on several images, which kernels compute one by one, against onnxruntime."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from gangway.compiler.frontend.graph import Graph
from gangway.compiler.frontend.images import has_several_images, split_images
from gangway.compiler.frontend.importer import read_graph
from gangway.compiler.frontend.simplify import fold

pytestmark = pytest.mark.long

node = helper.make_node
RANDOM = np.random.default_rng(5)


def numbers(*shape: int) -> Any:
    return RANDOM.standard_normal(shape, np.float32) / 4


@pytest.mark.parametrize("images", [2, 3, 8])
def test_a_residual_block(check: Callable[..., list[str]], network: Any, images: int) -> None:
    """Activations and residuals are part of the convolutions; what is joined reads them, too."""
    constants = {"w": numbers(20, 3, 3, 3), "v": numbers(20, 20, 3, 3), "b": numbers(20), "d": numbers(20, 1, 3, 3)}
    constants |= {"each": numbers(images, 20, 1, 1), "fc": numbers(20, 5)}
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], strides=[2, 2], pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["r"]),
        node("MaxPool", ["r"], ["p"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        node("Conv", ["p", "v"], ["e"], pads=[1, 1, 1, 1]),
        node("Add", ["e", "p"], ["s"]),
        node("Sigmoid", ["s"], ["gate"]),
        node("Mul", ["s", "gate"], ["swish"]),
        node("Mul", ["swish", "each"], ["m"]),
        node("Conv", ["m", "d"], ["depthwise"], group=20, pads=[1, 1, 1, 1]),
        node("GlobalAveragePool", ["depthwise"], ["g"]),
        node("Flatten", ["g"], ["f"]),
        node("MatMul", ["f", "fc"], ["classes"]),
        node("Transpose", ["s"], ["turned"], perm=[3, 0, 1, 2]),
        node("ReduceMax", ["depthwise"], ["over_images"], axes=[0], keepdims=0),
    ]
    outputs = dict.fromkeys(["classes", "turned", "over_images", "depthwise"])
    found = Counter(check(network(nodes, {"x": [images, 3, 21, 17]}, outputs, constants)))
    assert found["Conv+Relu"] == found["Conv+Add"] == found["MaxPool"] == images
    assert found["Slice"] == 0


@pytest.mark.parametrize(
    ("operator", "constants", "how"),
    [
        (
            "ConvTranspose",
            {"w": numbers(6, 9, 3, 3)},
            {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]},
        ),
        ("ConvTranspose", {"w": numbers(6, 3, 3, 2)}, {"strides": [2, 1], "group": 2}),
        ("Conv", {"w": numbers(9, 2, 3, 3)}, {"group": 3, "dilations": [2, 2], "pads": [2, 2, 1, 2]}),
        ("AveragePool", {}, {"kernel_shape": [2, 3], "ceil_mode": 1, "count_include_pad": 1}),
        ("GlobalMaxPool", {}, {}),
        ("GlobalLpPool", {}, {"p": 1}),
        ("LpPool", {}, {"kernel_shape": [2, 2]}),
        ("LRN", {}, {"size": 3}),
        ("DepthToSpace", {}, {"blocksize": 1}),
        ("SpaceToDepth", {}, {"blocksize": 2}),
        ("InstanceNormalization", {"scale": numbers(6), "shift": numbers(6)}, {}),
        ("Resize", {"": np.zeros(0), "scales": np.array([1, 1, 2, 2], np.float32)}, {"mode": "linear"}),
        ("Resize", {"": np.zeros(0), "_": np.zeros(0), "sizes": np.array([3, 6, 5, 16])}, {"mode": "nearest"}),
    ],
)
def test_every_operator_on_images(
    check: Callable[..., list[str]], network: Any, operator: str, constants: dict[str, Any], how: dict[str, Any]
) -> None:
    """Between two convolutions."""
    inputs = [name.strip("_") for name in constants]
    constants = {name: value for name, value in constants.items() if value.size}
    constants |= {"first": numbers(6, 2, 1, 1)}
    nodes = [
        node("Conv", ["x", "first"], ["c"]),
        node(operator, ["c", *inputs], ["y"], **how),
        node("Relu", ["y"], ["z"]),
    ]
    found = check(network(nodes, {"x": [3, 2, 10, 8]}, {"z": None}, constants))
    assert sum(name.startswith("Conv") for name in found) >= 3


def test_volumes(check: Callable[..., list[str]], network: Any) -> None:
    constants = {"w": numbers(16, 3, 3, 3, 3)}
    nodes = [
        node("Conv", ["x", "w"], ["c"], pads=[1] * 6),
        node("MaxPool", ["c"], ["y"], kernel_shape=[2, 2, 2], strides=[2, 2, 2]),
    ]
    found = check(network(nodes, {"x": [2, 3, 4, 6, 6]}, {"y": None}, constants))
    assert found.count("MaxPool") == 2


@pytest.mark.parametrize("opset", [11, 17])
def test_what_lies_between_windows(check: Callable[..., list[str]], network: Any, opset: int) -> None:
    """A gate by dense layers, channels that are shuffled and normalised; each image goes its way alone."""
    constants = {"w": numbers(8, 3, 3, 3), "v": numbers(6, 4, 3, 3), "fc": numbers(8, 8), "bias": numbers(8)}
    constants |= {"square": np.array([2, 8, 1, 1]), "two": np.array([2, 2, 4, 6, 5]), "whole": np.array([2, 8, 6, 5])}
    constants |= {"pads": np.array([0, 0, 1, 2, 0, 0, 0, 1]), "one": np.array([1]), "end": np.array([9])}
    constants |= {"sizes": np.array([4, 4])}
    split = node("Split", ["padded", "sizes"], ["left", "right"], axis=1)
    if opset == 11:
        split = node("Split", ["padded"], ["left", "right"], axis=1, split=[4, 4])
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("GlobalAveragePool", ["c"], ["g"]),
        node("Flatten", ["g"], ["f"]),
        node("Gemm", ["f", "fc", "bias"], ["d"]),
        node("Sigmoid", ["d"], ["e"]),
        node("Reshape", ["e", "square"], ["gate"]),
        node("Mul", ["c", "gate"], ["gated"]),
        node("Reshape", ["gated", "two"], ["groups"]),
        node("Transpose", ["groups"], ["swapped"], perm=[0, 2, 1, 3, 4]),
        node("Reshape", ["swapped", "whole"], ["shuffled"]),
        node("Softmax", ["shuffled"], ["soft"], axis=1),
        node("Pad", ["soft", "pads"], ["padded"]),
        split,
        node("Slice", ["right", "one", "end", "one"], ["fewer"]),
        node("Concat", ["fewer", "left"], ["joined"], axis=1),
        node("Slice", ["joined", "one", "end", "one"], ["few"]),
        node("Slice", ["few", "one", "end", "one"], ["last"]),
        node("Conv", ["left", "v"], ["y"]),
        node("ReduceMean", ["y"], ["means"], axes=[2, 3], keepdims=0),
    ]
    outputs = dict.fromkeys(["y", "means", "last"])
    check(network(nodes, {"x": [2, 3, 8, 7]}, outputs, constants, opset=opset))


def test_a_reader_of_text(check: Callable[..., list[str]], network: Any) -> None:
    """Columns of images are the steps of a recurrent layer; its answer is [time, batch, classes]."""
    constants = {"w": numbers(16, 1, 3, 3), "r": numbers(1, 32, 8), "i": numbers(1, 32, 16), "two": np.array([2])}
    nodes = [
        node("Conv", ["x", "w"], ["c"], pads=[0, 1, 0, 1]),
        node("Squeeze", ["c", "two"], ["s"]),
        node("Transpose", ["s"], ["t"], perm=[2, 0, 1]),
        node("LSTM", ["t", "i", "r"], ["h"], hidden_size=8),
        node("Softmax", ["h"], ["y"], axis=-1),
    ]
    found = check(network(nodes, {"x": [4, 1, 3, 20]}, {"y": None}, constants))
    assert found.count("Conv") == 4


def read(tmp_path: Path, network: Any, nodes: list[Any], shape: list[int | str], constants: dict[str, Any]) -> Graph:
    return fold(read_graph(network(nodes, {"x": shape}, {"y": None}, constants).save(tmp_path / "model.onnx")))


@pytest.mark.parametrize(
    ("shape", "nodes"),
    [
        (["N", 2, 5, 5], [node("Conv", ["x", "w"], ["y"])]),
        ([1, 2, 5, 5], [node("Conv", ["x", "w"], ["y"])]),
        ([4000, 2, 3, 3], [node("Conv", ["x", "w"], ["y"])]),
        ([2, 2, 3, 3], [node("Relu", ["x"], ["y"])]),
    ],
)
def test_what_stays(tmp_path: Path, network: Any, shape: list[int | str], nodes: list[Any]) -> None:
    """A batch of requests, one image, more images than layers are possible, and what no window reads."""
    graph = read(tmp_path, network, nodes, shape, {"w": numbers(4, 2, 3, 3)})
    assert not has_several_images(graph) or split_images(graph) is graph


def test_what_mixes_images_reads_them_joined(check: Callable[..., list[str]], network: Any) -> None:
    constants = {"w": numbers(4, 4, 1, 1), "axes": np.array([0])}
    nodes = [
        node("Conv", ["x", "w"], ["c"]),
        node("Softmax", ["c"], ["s"], axis=0),
        node("Concat", ["s", "c"], ["all"], axis=0),
        node("CumSum", ["all", "axes"], ["sums"]),
        node("Conv", ["sums", "w"], ["y"]),
    ]
    found = check(network(nodes, {"x": [2, 4, 5, 5]}, {"y": None}, constants))
    assert found.count("Conv") == 2 + 4


def test_frames_of_each_row_of_a_batch(check: Callable[..., list[str]], network: Any) -> None:
    """Three frames are three images, whatever the number of rows."""
    constants = {"w": numbers(4, 2, 3, 3), "merged": np.array([-1, 2, 5, 5]), "apart": np.array([-1, 3, 4])}
    nodes = [
        node("Reshape", ["x", "merged"], ["frames"]),
        node("Conv", ["frames", "w"], ["c"], pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["r"]),
        node("GlobalAveragePool", ["r"], ["g"]),
        node("Reshape", ["g", "apart"], ["sequence"]),
        node("Softmax", ["sequence"], ["y"], axis=-2),
    ]
    found = check(network(nodes, {"x": ["N", 3, 2, 5, 5]}, {"y": None}, constants))
    assert found.count("Conv+Relu") == 3


def test_weights_that_are_no_constants(check: Callable[..., list[str]], network: Any) -> None:
    nodes = [node("Relu", ["w"], ["v"]), node("Conv", ["x", "v"], ["y"])]
    check(network(nodes, {"x": [2, 4, 5, 5], "w": [3, 4, 1, 1]}, {"y": None}))


def test_files_keep_their_weights_once(compile_file: Callable[..., Any], network: Any, tmp_path: Path) -> None:
    """Four images need the weights of one."""
    sizes = []
    for images in (1, 4):
        path = network(
            [node("Conv", ["x", "w"], ["y"])], {"x": [images, 64, 6, 6]}, {"y": None}, {"w": numbers(64, 64, 3, 3)}
        ).save(tmp_path / "model.onnx")
        sizes.append((compile_file(path).folder / "weights.bin").stat().st_size)
    assert sizes[0] == sizes[1]
