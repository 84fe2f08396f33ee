"""Random branching networks against onnxruntime: combinations of layouts, halos and memory reuse nobody thought of."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from onnx import helper

from tests.helpers.sampled import sampled


@dataclass(frozen=True)
class Tensor:
    name: str
    channels: int
    height: int
    width: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.channels, self.height, self.width


@dataclass
class Generator:
    """Grows a network node by node; every method adds one operator that reads `x`."""

    random: np.random.Generator
    nodes: list[Any] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)

    def constant(self, *shape: int, scale: float = 1.0) -> str:
        name = f"constant{len(self.constants)}"
        self.constants[name] = (self.random.standard_normal(shape) * scale).astype(np.float32)
        return name

    def add(self, operator: str, inputs: list[str], shape: tuple[int, int, int], **attributes: Any) -> None:
        name = f"tensor{len(self.tensors)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], **attributes))
        self.tensors.append(Tensor(name, *shape))

    def conv(self, x: Tensor) -> None:
        kernel = int(self.random.choice([1, 3, 5]))
        pads = [int(n) for n in self.random.integers(0, kernel, 4)]
        strides = [int(n) for n in self.random.integers(1, 3, 2)]
        height = (x.height + pads[0] + pads[2] - kernel) // strides[0] + 1
        width = (x.width + pads[1] + pads[3] - kernel) // strides[1] + 1
        if min(height, width) >= 1:
            channels = int(self.random.choice([5, 16, 20, 48]))
            scale = (x.channels * kernel * kernel) ** -0.5
            weights = self.constant(channels, x.channels, kernel, kernel, scale=scale)
            self.add("Conv", [x.name, weights], (channels, height, width), pads=pads, strides=strides)

    def depthwise(self, x: Tensor) -> None:
        weights = self.constant(x.channels, 1, 3, 3, scale=1 / 3)
        self.add("Conv", [x.name, weights], x.shape, pads=[1, 1, 1, 1], group=x.channels)

    def activation(self, x: Tensor) -> None:
        self.add(str(self.random.choice(["Relu", "LeakyRelu", "Sigmoid", "Tanh", "HardSwish"])), [x.name], x.shape)

    def swish(self, x: Tensor) -> None:
        self.add("Sigmoid", [x.name], x.shape)
        self.add("Mul", [self.tensors[-1].name, x.name], x.shape)

    def gate(self, x: Tensor) -> None:
        self.mean(x)
        self.add("Mul", [x.name, self.tensors[-1].name], x.shape)

    def concat(self, x: Tensor) -> None:
        others = [tensor for tensor in self.tensors if tensor.shape[1:] == x.shape[1:]]
        parts = [x, *(others[index] for index in self.random.integers(len(others), size=self.random.integers(1, 3)))]
        parts = [parts[index] for index in self.random.permutation(len(parts))]
        channels = sum(part.channels for part in parts)
        if channels <= 200:
            self.add("Concat", [part.name for part in parts], (channels, x.height, x.width), axis=1)

    def transpose(self, x: Tensor) -> None:
        self.add("Transpose", [x.name], (x.height, x.width, x.channels), perm=[0, 2, 3, 1])
        self.add("Transpose", [self.tensors[-1].name], (x.channels, x.height, x.width), perm=[0, 3, 1, 2])

    def combine(self, x: Tensor) -> None:
        others = [tensor for tensor in self.tensors if tensor.shape == x.shape]
        other = others[self.random.integers(len(others))]
        operands = [x.name, other.name] if self.random.random() < 0.5 else [other.name, x.name]
        self.add(str(self.random.choice(["Add", "Sub", "Mul"])), operands, x.shape)

    def shift(self, x: Tensor) -> None:
        shape = (x.channels, 1, 1) if self.random.random() < 0.5 else (1, *x.shape)
        self.add("Add", [x.name, self.constant(*shape)], x.shape)

    def pool(self, x: Tensor) -> None:
        stride = int(self.random.integers(1, 3))
        shape = (x.channels, (x.height - 1) // stride + 1, (x.width - 1) // stride + 1)
        window = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [stride, stride]}
        self.add(str(self.random.choice(["MaxPool", "AveragePool"])), [x.name], shape, **window)

    def mean(self, x: Tensor) -> None:
        self.add("GlobalAveragePool", [x.name], (x.channels, 1, 1))

    def dense(self, x: Tensor) -> None:
        flat = f"{x.name}:flat"
        self.nodes.append(helper.make_node("Flatten", [x.name], [flat]))
        size = x.channels * x.height * x.width
        weights = self.constant(size, 11, scale=size**-0.5)
        self.nodes.append(helper.make_node("Gemm", [flat, weights], ["y"]))


@pytest.mark.parametrize("seed", sampled(range(16), range(2)))
def test_random_network(check: Callable[..., list[str]], network: Any, seed: int) -> None:
    random = np.random.default_rng(seed)
    size = (int(random.choice([1, 3, 16, 20])), *(int(n) for n in random.integers(5, 16, 2)))
    grown = Generator(random, tensors=[Tensor("x", *size)])
    operators = [grown.conv, grown.conv, grown.depthwise, grown.activation, grown.activation, grown.combine]
    operators += [grown.combine, grown.shift, grown.pool, grown.mean, grown.swish, grown.gate, grown.transpose]
    operators += [grown.concat] * 3
    for _ in range(12):
        recent = grown.tensors[-4:]
        operators[random.integers(len(operators))](recent[random.integers(len(recent))])
    grown.dense(grown.tensors[-1])
    inner = grown.tensors[random.integers(1, len(grown.tensors))]
    check(network(grown.nodes, {"x": ["N", *size]}, {"y": None, inner.name: None}, grown.constants))
