"""Odd graphs, compiled, against onnxruntime: what is fused, which layouts meet, which memory is shared."""

from typing import Any

import numpy as np
import pytest
from onnx import helper

from tests.helpers.targets import EVERY

node = helper.make_node


def weights(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) / np.float32(
        np.sqrt(np.prod(shape[1:]))
    )


IMAGE: dict[str, list[int | str]] = {"x": ["N", 3, 10, 12]}
DEEP: dict[str, list[int | str]] = {"x": ["N", 20, 7, 9]}  # more channels than lanes, and some left over


@pytest.mark.parametrize(
    ("channels", "attributes"),
    [
        (3, {}),
        (3, {"pads": [1, 1, 1, 1]}),
        (20, {"pads": [0, 2, 1, 0], "strides": [2, 1]}),
        (20, {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
        (20, {"auto_pad": "SAME_LOWER"}),
        (3, {"auto_pad": "VALID"}),
        (20, {"dilations": [2, 1], "pads": [2, 1, 2, 1]}),
    ],
)
def test_convolution_without_bias(check: Any, network: Any, channels: int, attributes: dict[str, Any]) -> None:
    inputs = IMAGE if channels == 3 else DEEP
    graph = network(
        [node("Conv", ["x", "w"], ["y"], **attributes)], inputs, {"y": None}, {"w": weights(10, channels, 3, 3)}
    )
    assert check(graph).count("Conv") == 1


@pytest.mark.parametrize("residual_first", [True, False])
@pytest.mark.parametrize("residual_later", [True, False])
def test_residual_on_either_side(check: Any, network: Any, residual_first: bool, residual_later: bool) -> None:
    """The shortcut may stand on either side of the Add, and be computed before or after the convolution."""
    operands = ["r", "c"] if residual_first else ["c", "r"]
    conv = node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1])
    shortcut = node("MaxPool", ["x"], ["r"], kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    nodes = [conv, shortcut] if residual_later else [shortcut, conv]
    nodes += [node("Add", operands, ["s"]), node("Relu", ["s"], ["y"])]
    operators = check(network(nodes, DEEP, {"y": None}, {"w": weights(20, 20, 3, 3)}))
    assert "Conv+Add+Relu" in operators
    assert "Add" not in operators


def test_add_of_two_convolutions_absorbs_one(check: Any, network: Any) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["a"]),
        node("Conv", ["x", "v"], ["b"]),
        node("Add", ["a", "b"], ["y"]),
    ]
    constants = {"w": weights(20, 20, 1, 1), "v": weights(20, 20, 1, 1, seed=1)}
    operators = check(network(nodes, DEEP, {"y": None}, constants))
    assert operators.count("Conv+Add") == operators.count("Conv") == 1


def test_a_tensor_added_to_itself(check: Any, network: Any) -> None:
    nodes = [node("Conv", ["x", "w"], ["a"]), node("Add", ["a", "a"], ["y"])]
    check(network(nodes, DEEP, {"y": None}, {"w": weights(20, 20, 1, 1)}))


def test_clip_with_constant_inputs_and_constant_nodes(check: Any, network: Any) -> None:
    six = node("Constant", [], ["six"], value_float=6.0)
    nodes = [
        six,
        node("Conv", ["x", "w"], ["a"]),
        node("Clip", ["a", "zero", "six"], ["b"]),
        node("Clip", ["b", "zero"], ["y"]),
    ]
    constants = {"w": weights(20, 20, 1, 1) * 3, "zero": np.array(0, np.float32)}
    assert "Conv+Clip+Clip" in check(network(nodes, DEEP, {"y": None}, constants))


@pytest.mark.parametrize(
    "attributes",
    [
        {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 2]},
        {"kernel_shape": [2, 3], "strides": [2, 2], "ceil_mode": 1},
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 0, 0, 1], "ceil_mode": 1},
    ],
)
@pytest.mark.parametrize("operator", ["MaxPool", "AveragePool"])
def test_pooling_ignores_padding(check: Any, network: Any, operator: str, attributes: dict[str, Any]) -> None:
    """The input is negative everywhere: a zero from the padding would show in every maximum and mean."""
    nodes = [
        node("Relu", ["x"], ["positive"]),
        node("Sub", ["offset", "positive"], ["negative"]),
        node(operator, ["negative"], ["y"], **attributes),
    ]
    check(network(nodes, DEEP, {"y": None}, {"offset": np.full((1, 20, 7, 9), -3, np.float32)}))


def test_average_that_counts_padding_and_means_of_everything(check: Any, network: Any) -> None:
    nodes = [
        node("AveragePool", ["x"], ["a"], kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1),
        node("AveragePool", ["a"], ["b"], kernel_shape=[7, 9]),
        node("ReduceMean", ["a"], ["c"], axes=[-1, 2], keepdims=0),
    ]
    assert check(network(nodes, DEEP, {"b": None, "c": None})).count("ReduceMean") == 1


def test_an_output_that_is_also_an_intermediate(check: Any, network: Any) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        node("Relu", ["a"], ["b"]),
        node("Conv", ["b", "v"], ["c"], pads=[1, 1, 1, 1]),
    ]
    constants = {"w": weights(20, 20, 3, 3), "v": weights(5, 20, 3, 3)}
    check(network(nodes, DEEP, {"a": None, "b": None, "c": None}, constants))


def test_outputs_that_are_inputs_or_each_other(check: Any, network: Any) -> None:
    nodes = [
        node("Identity", ["x"], ["same"]),
        node("Relu", ["x"], ["y"]),
        node("Identity", ["y"], ["again"]),
    ]
    check(network(nodes, DEEP, {"same": None, "y": None, "again": None}))


def test_flattened_image_into_a_dense_layer(check: Any, network: Any) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        node("Flatten", ["a"], ["b"]),
        node("MatMul", ["b", "v"], ["c"]),
        node("Add", ["bias", "c"], ["d"]),
        node("Relu", ["d"], ["y"]),
    ]
    constants = {"w": weights(5, 20, 3, 3), "v": weights(5 * 63, 33), "bias": weights(33)}
    assert "Gemm+Relu" in check(network(nodes, DEEP, {"y": None}, constants))


def test_elementwise_layers_of_a_flattened_image(check: Any, network: Any) -> None:
    """The image is blocked, its flat view is plain, and 315 numbers fill no whole number of registers."""
    nodes = [
        node("Conv", ["x", "w"], ["a"]),
        node("Flatten", ["a"], ["b"]),
        node("Relu", ["b"], ["c"]),
        node("Mul", ["c", "b"], ["d"]),
        node("Gemm", ["d", "v"], ["y"]),
        node("Gemm", ["b", "v"], ["z"]),
    ]
    constants = {"w": weights(5, 20, 1, 1), "v": weights(5 * 63, 33)}
    check(network(nodes, DEEP, {"y": None, "z": None}, constants))


@pytest.mark.parametrize(("before", "after"), [([6, 4], [2, 3, 4]), ([6, 4], [1, 6, 4]), ([1, 6, 4], [6, 4])])
def test_a_view_between_elementwise_layers(check: Any, network: Any, before: list[int], after: list[int]) -> None:
    nodes = [
        helper.make_node("Add", ["a", "b"], ["sum"]),
        helper.make_node("Reshape", ["sum", "shape"], ["seen"]),
        helper.make_node("HardSwish", ["seen"], ["y"]),
    ]
    check(network(nodes, {"a": before, "b": before}, {"y": after}, {"shape": np.array(after)}))


def test_shape_arithmetic_of_an_exporter(check: Any, network: Any) -> None:
    """x.view(x.size(0), -1), as it is exported."""
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "zero"], ["n"]),
        node("Unsqueeze", ["n", "axes"], ["n1"]),
        node("Concat", ["n1", "rest"], ["shape"], axis=0),
        node("Reshape", ["x", "shape"], ["flat"]),
        node("Gemm", ["flat", "w"], ["y"], alpha=0.5),
    ]
    constants = {
        "zero": np.array(0, np.int64),
        "axes": np.array([0], np.int64),
        "rest": np.array([-1], np.int64),
        "w": weights(20 * 63, 7),
    }
    check(network(nodes, DEEP, {"y": None}, constants))


@pytest.mark.parametrize("axes", [1, 2])
def test_scales_and_shifts_are_folded_where_possible(check: Any, network: Any, axes: int) -> None:
    statistics = {f"bn{n}": np.abs(weights(20, seed=n)) + np.float32(0.5) for n in range(4)}
    names = list(statistics)
    nodes = [
        node("BatchNormalization", ["x", *names], ["a"]),  # nothing before it: stays
        node("Conv", ["a", "w"], ["b"], pads=[1] * 2 * axes),
        node("BatchNormalization", ["b", *names], ["c"]),
        node("Mul", ["c", "scale"], ["d"]),
        node("Sub", ["shift", "d"], ["e"]),
        node("Relu", ["e"], ["y"]),
    ]
    constants = {
        "w": weights(20, 20, *[3] * axes),
        "scale": weights(20, *[1] * axes, seed=7),
        "shift": np.array([0.25], np.float32),
        **statistics,
    }
    operators = check(network(nodes, {"x": DEEP["x"][: 2 + axes]}, {"y": None}, constants))
    assert [name for name in operators if name not in ("Pack", "Unpack")] == ["BatchNormalization", "Conv+Relu"]


def test_normalised_image(check: Any, network: Any) -> None:
    """Constants on the input, per channel and per pixel, before the first convolution."""
    nodes = [
        node("Sub", ["x", "mean"], ["a"]),
        node("Mul", ["a", "mask"], ["b"]),
        node("Conv", ["b", "w"], ["y"], pads=[1, 1, 1, 1]),
    ]
    constants = {"mean": weights(3, 1, 1), "mask": weights(1, 1, 10, 12), "w": weights(32, 3, 3, 3)}
    check(network(nodes, IMAGE, {"y": None}, constants))


def test_halos_agree_between_elementwise_operands(check: Any, network: Any) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["a"]),
        node("Relu", ["a"], ["b"]),
        node("MaxPool", ["b"], ["c"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        node("Mul", ["b", "c"], ["d"]),
        node("Conv", ["d", "v"], ["e"], pads=[2, 2, 2, 2]),
        node("MaxPool", ["a"], ["f"], kernel_shape=[1, 1]),
    ]
    constants = {"w": weights(24, 20, 1, 1), "v": weights(40, 24, 5, 5)}
    check(network(nodes, DEEP, {"e": None, "f": None}, constants))


def test_memory_of_halos_is_reused_without_leaving_rubbish(check: Any, network: Any) -> None:
    nodes, name = [], "x"
    for index in range(6):
        nodes.append(node("Conv", [name, "w" if index % 2 else "v"], [f"c{index}"], pads=[1, 1, 1, 1]))
        nodes.append(node("Relu", [f"c{index}"], [f"r{index}"]))
        name = f"r{index}"
    constants = {"w": weights(20, 33, 3, 3), "v": weights(33, 20, 3, 3)}
    check(network(nodes, DEEP, {name: None}, constants))


def test_padded_convolution_of_one_pixel(check: Any, network: Any) -> None:
    nodes = [
        node("GlobalAveragePool", ["x"], ["a"]),
        node("Conv", ["a", "w"], ["b"], pads=[1, 1, 1, 1]),
        node("Conv", ["a", "v"], ["c"]),
        node("Add", ["b", "c"], ["y"]),
    ]
    constants = {"w": weights(20, 20, 3, 3), "v": weights(20, 20, 1, 1)}
    check(network(nodes, DEEP, {"y": None}, constants))


def test_vectors_with_surplus_channels(check: Any, network: Any) -> None:
    """10 numbers do not fill a vector register: elementwise layers and dense layers must agree on the rest."""
    nodes = [
        node("Mul", ["x", "x"], ["a"]),
        node("Gemm", ["a", "w"], ["b"]),
        node("Relu", ["b"], ["c"]),
        node("Sub", ["c", "x"], ["d"]),
        node("Gemm", ["d", "w"], ["y"]),
        node("Gemm", ["x", "w"], ["z"]),
    ]
    check(network(nodes, {"x": ["N", 10]}, {"y": None, "z": None}, {"w": weights(10, 10)}))


def test_integers_of_any_shape_without_a_batch(check: Any, network: Any) -> None:
    from onnx import TensorProto

    nodes = [
        node("Add", ["x", "z"], ["a"]),
        node("Mul", ["a", "three"], ["b"]),
        node("Reshape", ["b", "shape"], ["y"]),
    ]
    constants = {"three": np.array(3, np.int64), "shape": np.array([7, 15], np.int64)}
    check(network(nodes, {"x": [3, 5, 7], "z": [3, 5, 7]}, {"y": None}, constants, TensorProto.INT64))


@pytest.mark.parametrize("target", EVERY)
def test_every_target_that_runs_here(check: Any, network: Any, target: str) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["a"], pads=[3, 3, 3, 3], strides=[2, 2]),
        node("Relu", ["a"], ["b"]),
        node("MaxPool", ["b"], ["c"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        node("Conv", ["c", "d"], ["e"], group=20, pads=[1, 1, 1, 1]),
        node("Conv", ["e", "v"], ["f"]),
        node("Add", ["c", "f"], ["g"]),
        node("GlobalAveragePool", ["g"], ["h"]),
        node("Flatten", ["h"], ["i"]),
        node("Gemm", ["i", "m"], ["y"]),
        node("Sub", ["g", "c"], ["z"]),
    ]
    constants = {
        "w": weights(20, 3, 7, 7),
        "d": weights(20, 1, 3, 3),
        "v": weights(20, 20, 1, 1),
        "m": weights(20, 13),
    }
    check(network(nodes, {"x": ["N", 3, 37, 35]}, {"y": None, "z": None}, constants), target)


def test_depthwise(check: Any, network: Any) -> None:
    nodes = [
        node("Conv", ["x", "w", "b"], ["a"], group=20, pads=[1, 1, 1, 1], strides=[2, 2]),
        node("Relu", ["a"], ["y"]),
    ]
    assert "Conv+Relu" in check(network(nodes, DEEP, {"y": None}, {"w": weights(20, 1, 3, 3), "b": weights(20)}))
