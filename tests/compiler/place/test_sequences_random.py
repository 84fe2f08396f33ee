"""Random networks of sequences against onnxruntime: views, residuals, parts and layouts in odd combinations."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from onnx import helper

from tests.helpers.sampled import sampled

S, C = 6, 20


@dataclass
class Generator:
    """Grows a network of tensors [N, S, C] node by node; every method adds one operator, or a few, that read `x`."""

    random: np.random.Generator
    nodes: list[Any] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    tensors: list[str] = field(default_factory=lambda: ["x"])

    def constant(self, value: Any) -> str:
        name = f"constant{len(self.constants)}"
        self.constants[name] = value if isinstance(value, np.ndarray) else np.array(value, np.int64)
        return name

    def weights(self, *shape: int) -> str:
        return self.constant((self.random.standard_normal(shape) * shape[0] ** -0.5).astype(np.float32))

    def node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [name], **attributes))
        return name

    def linear(self, x: str) -> str:
        y = self.node("MatMul", x, self.weights(C, C))
        return self.node("Add", y, self.weights(C)) if self.random.random() < 0.5 else y

    def gemm(self, x: str) -> str:
        rows = self.node("Gemm", self.node("Reshape", x, self.constant([-1, C])), self.weights(C, C), self.weights(C))
        return self.node("Reshape", rows, self.constant([-1, S, C]))

    def wide(self, x: str) -> str:
        """A layer of twice the channels, whose halves are multiplied."""
        both = self.node("MatMul", x, self.weights(C, 2 * C))
        axes = self.constant([2])
        halves = [
            self.node("Slice", both, self.constant([begin]), self.constant([begin + C]), axes) for begin in (0, C)
        ]
        return self.node("Mul", *halves)

    def normalise(self, x: str) -> str:
        return self.node("LayerNormalization", x, self.weights(C), self.weights(C))

    def activate(self, x: str) -> str:
        return self.node(str(self.random.choice(["Relu", "Tanh", "Sigmoid"])), x)

    def combine(self, x: str) -> str:
        other = self.tensors[self.random.integers(len(self.tensors))]
        operands = [x, other] if self.random.random() < 0.5 else [other, x]
        return self.node(str(self.random.choice(["Add", "Add", "Sub", "Mul"])), *operands)

    def shift(self, x: str) -> str:
        shape = [(C,), (S, C), (S, 1), (1, 1, 1)][self.random.integers(4)]
        return self.node("Add", x, self.weights(*shape))

    def turn(self, x: str) -> str:
        """Heads of five channels to the front, something that depends on their place, and back."""
        split = self.node("Reshape", x, self.constant([0, S, 4, 5]))
        y = self.node("Softmax", self.node("Transpose", split, perm=[0, 2, 1, 3]), axis=-1)
        return self.node("Reshape", self.node("Transpose", y, perm=[0, 2, 1, 3]), self.constant([0, S, C]))

    def positions(self, x: str) -> str:
        """One position, added to all of them."""
        picked = self.node("Gather", x, self.constant(int(self.random.integers(-S, S))), axis=1)
        return self.node("Add", x, self.node("Unsqueeze", picked, self.constant([1])))


@pytest.mark.parametrize("seed", sampled(range(6), range(2)))
def test_random_network(check: Callable[..., list[str]], network: Any, seed: int) -> None:
    random = np.random.default_rng(seed)
    grown = Generator(random)
    operators = [grown.linear, grown.linear, grown.gemm, grown.wide, grown.normalise, grown.activate, grown.combine]
    operators += [grown.combine, grown.shift, grown.turn, grown.positions]
    for _ in range(8):
        recent = grown.tensors[-3:]
        grown.tensors.append(operators[random.integers(len(operators))](recent[random.integers(len(recent))]))
    outputs = {grown.tensors[-1], grown.tensors[random.integers(1, len(grown.tensors))]}
    needed = {name for item in grown.nodes for name in item.input}
    constants = {name: value for name, value in grown.constants.items() if name in needed}
    check(network(grown.nodes, {"x": ["N", S, C]}, dict.fromkeys(sorted(outputs)), constants))
