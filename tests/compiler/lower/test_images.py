"""Pooling with every attribute, convolutions of every shape, dense layers on images, against onnxruntime."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import helper

from tests.helpers.onnx_models import save_model
from tests.helpers.targets import ENDS

pytestmark = pytest.mark.long

node = helper.make_node
DEEP: dict[str, list[int | str]] = {"x": ["N", 20, 13, 18]}


def weights(*shape: int, seed: int = 0) -> Any:
    random = np.random.default_rng(seed)
    return (random.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


POOLS: list[dict[str, Any]] = [
    {"kernel_shape": [5, 5], "strides": [3, 3]},
    {"kernel_shape": [5, 5], "strides": [3, 3], "ceil_mode": 1},
    {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]},
    {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 0, 0, 1], "ceil_mode": 1},
    {"kernel_shape": [4, 2], "strides": [3, 2], "pads": [0, 1, 2, 0]},
    {"kernel_shape": [2, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"},
    {"kernel_shape": [2, 2], "auto_pad": "SAME_LOWER"},
]


@pytest.mark.parametrize("target", ENDS)
def test_pooling_of_every_kind(check: Any, network: Any, target: str) -> None:
    nodes = [
        node(operator, ["x"], [f"{operator}{n}"], **attributes)
        for n, attributes in enumerate(POOLS)
        for operator in ("MaxPool", "AveragePool")
    ]
    for n, attributes in enumerate(POOLS):
        nodes.append(node("AveragePool", ["x"], [f"counted{n}"], count_include_pad=1, **attributes))
    nodes += [node("GlobalMaxPool", ["x"], ["most"]), node("GlobalAveragePool", ["x"], ["mean"])]
    outputs = {item.output[0]: None for item in nodes}
    check(network(nodes, DEEP, outputs), target)


@pytest.mark.parametrize("target", ENDS)
def test_convolutions_of_every_shape(check: Any, network: Any, target: str) -> None:
    kernels: dict[tuple[int, int], dict[str, Any]] = {
        (1, 7): {"pads": [0, 3, 0, 3]},
        (7, 1): {"pads": [3, 0, 3, 0]},
        (1, 3): {"auto_pad": "SAME_UPPER"},
        (3, 1): {"auto_pad": "SAME_LOWER", "strides": [2, 2]},
        (5, 5): {"pads": [2, 2, 2, 2], "strides": [2, 1]},
        (3, 3): {"dilations": [2, 3], "pads": [2, 3, 2, 3]},
        (2, 4): {"pads": [0, 1, 1, 2]},
        (11, 11): {"pads": [2, 2, 2, 2], "strides": [4, 4]},
    }
    nodes = [node("Conv", ["x", f"w{n}"], [f"y{n}"], **attributes) for n, attributes in enumerate(kernels.values())]
    constants = {f"w{n}": weights(10, 20, *kernel) for n, kernel in enumerate(kernels)}
    check(network(nodes, DEEP, {item.output[0]: None for item in nodes}, constants), target)


def test_a_first_convolution_with_large_kernel_and_stride(check: Any, network: Any) -> None:
    nodes = [node("Conv", ["x", "w", "b"], ["a"], pads=[2, 2, 2, 2], strides=[4, 4]), node("Relu", ["a"], ["y"])]
    constants = {"w": weights(40, 3, 11, 11), "b": weights(40)}
    check(network(nodes, {"x": ["N", 3, 63, 71]}, {"y": None}, constants))


@pytest.mark.parametrize("target", ENDS)
def test_groups(check: Any, network: Any, target: str) -> None:
    """Of whole registers, of small groups that fill some together, of odd ones, and depthwise with a multiplier."""
    nodes = [
        node("Conv", ["x", "w"], ["a"]),
        node("Conv", ["a", "w0"], ["b0"], group=2, pads=[1, 1, 1, 1]),
        node("Relu", ["b0"], ["c0"]),
        node("Add", ["c0", "a"], ["y0"]),
        node("Conv", ["a", "w1"], ["y1"], group=16, strides=[2, 2]),
        node("Conv", ["x", "w2"], ["y2"], group=4),
        node("Conv", ["x", "w3"], ["y3"], group=20, pads=[1, 1, 1, 1]),
        node("Conv", ["a", "w4"], ["y4"], group=2),
        node("GlobalAveragePool", ["a"], ["d"]),
        node("Conv", ["d", "w5"], ["y5"], group=2),
    ]
    constants = {
        "w": weights(64, 20, 1, 1),
        "w0": weights(64, 32, 3, 3),
        "w1": weights(32, 4, 3, 3),
        "w2": weights(12, 5, 3, 3),
        "w3": weights(40, 1, 3, 3),
        "w4": weights(96, 32, 1, 1),
        "w5": weights(224, 32, 1, 1),
    }
    check(network(nodes, DEEP, {f"y{n}": None for n in range(6)}, constants), target)


@pytest.mark.parametrize("target", ENDS)
def test_groups_that_begin_within_a_register(check: Any, network: Any, target: str) -> None:
    """Of 34 channels, of more outputs than inputs, with a window, and of a planar image and a vector."""
    nodes = [
        node("Conv", ["x", "w"], ["a"]),
        node("Conv", ["a", "w0"], ["b0"], group=4),
        node("Relu", ["b0"], ["c0"]),
        node("Add", ["c0", "a"], ["y0"]),
        node("Conv", ["a", "w1"], ["y1"], group=8, pads=[1, 1, 1, 1], strides=[2, 2]),
        node("Conv", ["z", "w2"], ["y2"], group=3, pads=[1, 1, 1, 1]),
        node("GlobalAveragePool", ["a"], ["d"]),
        node("Conv", ["d", "w3"], ["y3"], group=2),
    ]
    constants = {
        "w": weights(136, 20, 1, 1),
        "w0": weights(136, 34, 1, 1),
        "w1": weights(40, 17, 3, 3),
        "w2": weights(51, 1, 3, 3),
        "w3": weights(42, 68, 1, 1),
    }
    inputs: dict[str, list[int | str]] = {**DEEP, "z": ["N", 3, 7, 9]}
    check(network(nodes, inputs, {f"y{n}": None for n in range(4)}, constants), target)


@pytest.mark.parametrize("target", ENDS)
def test_dense_layers_on_images(check: Any, network: Any, target: str) -> None:
    """No layout but the image's own is needed, whatever its channels and halo."""
    nodes = [
        node("Conv", ["x", "w"], ["a"], strides=[2, 2]),
        node("Relu", ["a"], ["b"]),
        node("AveragePool", ["b"], ["b1"], kernel_shape=[1, 1]),
        node("Flatten", ["b1"], ["c"]),
        node("Gemm", ["c", "m", "n"], ["d"]),
        node("Relu", ["d"], ["y"]),
        node("Conv", ["b", "v"], ["z"], pads=[1, 1, 1, 1]),
    ]
    constants = {
        "w": weights(24, 20, 3, 3),
        "m": weights(24 * 48, 70),
        "n": weights(70),
        "v": weights(5, 24, 3, 3),
    }
    operators = check(network(nodes, DEEP, {"y": None, "z": None}, constants), target)
    assert "Gemm+Relu" in operators
    assert operators.count("Unpack") <= 2  # the outputs


@pytest.mark.parametrize("columns", [5, 16, 37])
@pytest.mark.parametrize("target", ENDS)
def test_softmax(check: Any, network: Any, target: str, columns: int) -> None:
    nodes = [
        node("Softmax", ["x"], ["a"], axis=-1),
        node("Flatten", ["a"], ["b"]),
        node("Gemm", ["b", "w"], ["c"]),
        node("Softmax", ["c"], ["y"]),
        node("Softmax", ["x"], ["d"], axis=1),
        node("LogSoftmax", ["x"], ["e"], axis=2),
        node("LogSoftmax", ["c"], ["f"], axis=-1),
    ]
    constants = {"w": weights(3 * 7 * columns, 1003) * 30}
    outputs = dict.fromkeys("yadef")
    check(network(nodes, {"x": ["N", 3, 7, columns]}, outputs, constants), target)


def test_softmax_before_opset_13_takes_all_axes_from_one_on(
    tmp_path: Path, compile_file: Any, load_artifact: Any
) -> None:
    x = np.random.default_rng(1).standard_normal((2, 3, 5), np.float32)
    path = save_model(tmp_path / "m.onnx", [node("Softmax", ["x"], ["y"])], {"x": x}, {"y": x}, opset=12)
    compiled = compile_file(path)
    assert not compiled.manifest.fallback_reason
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(load_artifact(compiled.folder)({"x": x})["y"], session.run(None, {"x": x})[0], rtol=1e-6)


@pytest.mark.parametrize("softmax", [True, False])
def test_heads_of_one_token_are_read_as_a_vector(check: Any, network: Any, softmax: bool) -> None:
    """A window over [1, heads, 1, size], as over an image's pixels, would read few channels at a time."""
    heads, size = 4, 16
    nodes, constants = [], {"apart": np.array([0, 1, heads, size]), "together": np.array([0, 1, heads * size])}
    for name in "qkvo":
        constants[f"{name}_weights"] = weights(heads * size, heads * size, seed=ord(name))
    for name, order in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        nodes += [
            node("MatMul", ["x", f"{name}_weights"], [f"{name}_all"]),
            node("Reshape", [f"{name}_all", "apart"], [f"{name}_heads"]),
            node("Transpose", [f"{name}_heads"], [name], perm=order),
        ]
    nodes += [
        node("MatMul", ["q", "k"], ["scores"]),
        node("Softmax" if softmax else "Tanh", ["scores"], ["shares"]),
        node("MatMul", ["shares", "v"], ["mixed"]),
        node("Transpose", ["mixed"], ["tokens"], perm=[0, 2, 1, 3]),
        node("Reshape", ["tokens", "together"], ["joined"]),
        node("MatMul", ["joined", "o_weights"], ["y"]),
    ]
    operators = check(network(nodes, {"x": ["N", 1, heads * size]}, {"y": None}, constants=constants))
    assert "Pack" not in operators and "Unpack" not in operators, operators
