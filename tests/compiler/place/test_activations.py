"""Activations, squeeze-and-excite and elementwise layers of blocked tensors, against onnxruntime on every target."""

from typing import Any

import numpy as np
import pytest
from onnx import helper

from tests.helpers.targets import ENDS

node = helper.make_node
DEEP: dict[str, list[int | str]] = {"x": ["N", 20, 7, 9]}


def weights(*shape: int, seed: int = 0) -> Any:
    random = np.random.default_rng(seed)
    return (random.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


ACTIVATIONS: dict[str, dict[str, Any]] = {
    "Relu": {},
    "LeakyRelu": {"alpha": 0.1},
    "Sigmoid": {},
    "Tanh": {},
    "HardSigmoid": {"alpha": 0.3},
    "HardSwish": {},
}


@pytest.mark.parametrize("target", ENDS)
def test_activations_are_fused_or_stand_alone(check: Any, network: Any, target: str) -> None:
    """Each is applied by a convolution, by a depthwise one, after an Add, and alone on a tensor with a halo."""
    nodes, name = [], "x"
    for n, (operator, attributes) in enumerate(ACTIVATIONS.items()):
        nodes += [
            node("Conv", [name, "w"], [f"a{n}"], pads=[1, 1, 1, 1]),
            node(operator, [f"a{n}"], [f"b{n}"], **attributes),
            node("MaxPool", [f"b{n}"], [f"p{n}"], kernel_shape=[1, 1]),
            node(operator, [f"p{n}"], [f"c{n}"], **attributes),
            node("Conv", [f"c{n}", "d"], [f"d{n}"], group=20, pads=[1, 1, 1, 1]),
            node(operator, [f"d{n}"], [f"e{n}"], **attributes),
            node("Add", [f"e{n}", f"b{n}"], [f"f{n}"]),
            node(operator, [f"f{n}"], [f"g{n}"], **attributes),
        ]
        name = f"g{n}"
    constants = {"w": weights(20, 20, 3, 3), "d": weights(20, 1, 3, 3)}
    operators = check(network(nodes, DEEP, {name: None}, constants), target)
    for operator in ACTIVATIONS:
        assert operators.count(f"Conv+{operator}") == 2
        assert operators.count(operator) == operators.count(f"Add+{operator}") == 1


@pytest.mark.parametrize("target", ENDS)
def test_limits_are_one_function_with_what_is_before_them(check: Any, network: Any, target: str) -> None:
    """Max and Min of a constant number are limits, on either side."""
    nodes = [
        node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        node("LeakyRelu", ["a"], ["a1"], alpha=0.2),
        node("Max", ["a1", "low"], ["a2"]),
        node("Conv", ["a2", "w"], ["b"], pads=[1, 1, 1, 1]),
        node("Max", ["low", "b"], ["b1"]),
        node("Min", ["b1", "high"], ["b2"]),
        node("Conv", ["b2", "w"], ["c"], pads=[1, 1, 1, 1]),
        node("LeakyRelu", ["c"], ["c1"], alpha=0.2),
        node("Min", ["c1", "high"], ["c2"]),
        node("Conv", ["c2", "w"], ["d"], pads=[1, 1, 1, 1]),
        node("Min", ["d", "high"], ["d1"]),
        node("Max", ["d1", "low"], ["y"]),
    ]
    constants = {
        "w": weights(20, 20, 3, 3),
        "low": np.full((1, 1, 1, 1), -0.4, np.float32),
        "high": np.float32(0.7),
    }
    operators = check(network(nodes, DEEP, {"y": None}, constants), target)
    assert [name for name in operators if "M" in name and "Pack" not in name] == [
        "Conv+LeakyRelu+Max",
        "Conv+Max+Min",
        "Min",
        "Conv+Min+Max",
    ]


@pytest.mark.parametrize("target", ENDS)
def test_squeeze_and_excite(check: Any, network: Any, target: str) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        node("Sigmoid", ["a"], ["a1"]),
        node("Mul", ["a1", "a"], ["a2"]),
        node("GlobalAveragePool", ["a2"], ["b"]),
        node("Conv", ["b", "v"], ["c"]),
        node("Sigmoid", ["c"], ["c1"]),
        node("Mul", ["c", "c1"], ["c2"]),
        node("Conv", ["c2", "u"], ["d"]),
        node("Sigmoid", ["d"], ["d1"]),
        node("Mul", ["d1", "a2"], ["e"]),
        node("Conv", ["e", "w"], ["y"], pads=[1, 1, 1, 1]),
    ]
    constants = {"w": weights(20, 20, 3, 3), "v": weights(5, 20, 1, 1), "u": weights(20, 5, 1, 1)}
    operators = check(network(nodes, DEEP, {"y": None}, constants), target)
    assert operators.count("Conv+Swish") == 2
    assert operators.count("Mul") == operators.count("Conv+Sigmoid") == 1


def test_gates_that_are_read_elsewhere_stay(check: Any, network: Any) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["a"]),
        node("HardSigmoid", ["a"], ["b"]),
        node("Mul", ["a", "b"], ["y"]),
        node("HardSigmoid", ["a"], ["c"], beta=0.25),
        node("Mul", ["c", "a"], ["z"]),
    ]
    operators = check(network(nodes, DEEP, {"y": None, "z": None, "b": None}, {"w": weights(20, 20, 1, 1)}))
    assert operators.count("HardSwish") == operators.count("HardSigmoid") == operators.count("Mul") == 1


def test_clip_between_any_limits(check: Any, network: Any) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["a"]),
        node("Clip", ["a", "low", "high"], ["b"]),
        node("MaxPool", ["b"], ["c"], kernel_shape=[3, 3]),
        node("Clip", ["c", "", "zero"], ["d"]),
        node("Conv", ["d", "v"], ["y"], pads=[1, 1, 1, 1]),
    ]
    limits = {"low": np.float32(0.25), "high": np.float32(1.5), "zero": np.float32(0.5)}
    constants = {"w": weights(20, 20, 1, 1), "v": weights(20, 20, 3, 3), **{k: np.array(v) for k, v in limits.items()}}
    assert "Conv+Clip" in check(network(nodes, DEEP, {"y": None}, constants))


def test_constants_of_blocked_tensors(check: Any, network: Any) -> None:
    """One number, one per channel, one per pixel, and all; on either side; the padding after them is zero."""
    nodes = [
        node("MaxPool", ["x"], ["a"], kernel_shape=[1, 1]),
        node("Mul", ["a", "one"], ["b"]),
        node("Sub", ["channels", "b"], ["c"]),
        node("Add", ["c", "pixels"], ["d"]),
        node("Sub", ["d", "all"], ["e"]),
        node("Conv", ["e", "w"], ["y"], pads=[1, 1, 1, 1]),
    ]
    constants = {
        "one": np.array(0.5, np.float32),
        "channels": weights(20, 1, 1),
        "pixels": weights(1, 7, 9),
        "all": weights(1, 20, 7, 9),
        "w": weights(20, 20, 3, 3),
    }
    operators = check(network(nodes, DEEP, {"y": None}, constants))
    assert operators.count("Unpack") == operators.count("Pack") == 1


def test_a_gate_for_the_model_s_input(check: Any, network: Any) -> None:
    nodes = [
        node("GlobalAveragePool", ["x"], ["a"]),
        node("Sub", ["a", "x"], ["b"]),
        node("Tanh", ["b"], ["y"]),
    ]
    assert "Sub+Tanh" in check(network(nodes, DEEP, {"y": None}))


# Each node reads x, earlier nodes by their numbers (#0), and constants by theirs.
SPELLED: dict[str, list[str]] = {
    "HardSwish": ["Add x 3", "Clip #0 0 6", "Mul x #1", "Div #2 6"],
    "HardSwish by parts": ["Add 3 x", "Clip #0 0 6", "Div #1 6", "Mul #2 x"],
    "HardSwish of Relu": ["Add x 3", "Relu #0", "Min #1 6", "Mul #2 0.1666667", "Mul x #3"],
    "HardSigmoid": ["Add x 3", "Clip #0 0 6", "Mul #1 0.1666667"],
    "HardSigmoid of limits": ["Mul x 0.2", "Add #0 0.5", "Max #1 0", "Min #2 1"],
    "Swish": ["Neg x", "Exp #0", "Add #1 1", "Div x #2"],
    "Swish by a Reciprocal": ["Neg x", "Exp #0", "Add 1 #1", "Reciprocal #2", "Mul #3 x"],
    "Mish": ["Softplus x", "Tanh #0", "Mul #1 x"],
    "Div": ["Add x 3", "Clip #0 0 5", "Mul x #1", "Div #2 6"],  # none of them
}


@pytest.mark.parametrize("target", ENDS)
def test_functions_that_are_spelled_out(check: Any, network: Any, target: str) -> None:
    nodes, expected = [], []
    for number, (form, lines) in enumerate(SPELLED.items()):
        nodes.append(node("Conv", ["x" if not number else f"{number - 1}:y", "w"], [f"{number}:x"], pads=[1] * 4))
        for index, (operator, *operands) in enumerate(line.split() for line in lines):
            names = [f"{number}:{text.removeprefix('#')}" if text[0] in "x#" else text for text in operands]
            nodes.append(node(operator, names, [f"{number}:{'y' if index == len(lines) - 1 else index}"]))
        expected.append(f"Conv+{form.split()[0]}")
    constants = {text: np.float32(text) for text in ("0", "1", "3", "5", "6", "0.2", "0.5", "0.1666667")}
    operators = check(network(nodes, DEEP, {f"{number}:y": None}, {"w": weights(20, 20, 3, 3), **constants}), target)
    assert operators[1 : len(SPELLED)] == expected[:-1]
    assert operators[len(SPELLED) :] == ["Conv", "Add+Clip", "Mul", "Div", "Unpack"]


@pytest.mark.parametrize("target", ENDS)
def test_images_are_divided_by_constants_only(check: Any, network: Any, target: str) -> None:
    """Divisors of a zero, and divisors that are computed, are of no use to surplus channels."""
    nodes = [
        node("Conv", ["x", "w"], ["a"]),
        node("MaxPool", ["a"], ["m"], kernel_shape=[1, 1]),
        node("Div", ["m", "one"], ["b"]),
        node("Div", ["b", "each"], ["c"]),
        node("Conv", ["c", "w"], ["d"]),
        node("Div", ["d", "zeros"], ["e"]),
        node("Tanh", ["e"], ["y"]),
        node("Exp", ["c"], ["f"]),
        node("Div", ["d", "f"], ["z"]),
    ]
    each = np.arange(1, 21, dtype=np.float32).reshape(20, 1, 1)
    constants = {"w": weights(20, 20, 1, 1), "one": np.float32(3), "each": each, "zeros": each - 1}
    operators = check(network(nodes, DEEP, {"y": None, "z": None}, constants), target)
    assert operators[:6] == ["Pack", "Conv", "MaxPool", "Div", "Div", "Conv"]
