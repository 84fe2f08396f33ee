"""A small graph builder on top of onnx.helper: names values, draws seeded weights, adds the usual groups of nodes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, TensorProto, ValueInfoProto, checker, helper, numpy_helper

OPSET = 17
IR_VERSION = 8
BATCH = "N"

Floats = npt.NDArray[np.float32]


class GraphBuilder:
    """Collects nodes and initializers of one model. Every method that adds a node returns the name of its output."""

    def __init__(self, name: str, seed: int) -> None:
        self._name = name
        self._random = np.random.default_rng(seed)
        self._nodes: list[Any] = []
        self._initializers: list[Any] = []

    def node(self, operator: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        """Add one node with one output, which is named after the node."""
        self._nodes.append(helper.make_node(operator, list(inputs), [name], name=name, **attributes))
        return name

    def constant(self, name: str, value: npt.NDArray[Any]) -> str:
        """Add an initializer."""
        self._initializers.append(numpy_helper.from_array(value, name))
        return name

    def normal(self, shape: Sequence[int], deviation: float, mean: float = 0.0) -> Floats:
        """Draw normally distributed float32 numbers."""
        draw = self._random.standard_normal(tuple(shape), dtype=np.float32)
        return draw * np.float32(deviation) + np.float32(mean)

    def uniform(self, size: int, low: float, high: float) -> Floats:
        """Draw uniformly distributed float32 numbers."""
        return self._random.uniform(low, high, size).astype(np.float32)

    def conv(self, x: str, name: str, channels: tuple[int, int], kernel: int, stride: int = 1, groups: int = 1) -> str:
        """Convolution without bias, "same" padding, He initialisation; `channels` is (in, out)."""
        inputs, outputs = channels
        fan_in = inputs // groups * kernel * kernel
        weights = self.normal((outputs, inputs // groups, kernel, kernel), (2.0 / fan_in) ** 0.5)
        names = [x, self.constant(f"{name}.weight", weights)]
        return self.node(
            "Conv",
            names,
            name,
            kernel_shape=[kernel, kernel],
            strides=[stride, stride],
            pads=[kernel // 2] * 4,
            group=groups,
        )

    def batch_norm(self, x: str, name: str, channels: int, gain: float = 1.0) -> str:
        """Batch normalisation with statistics as after training: scale about `gain`, variance about 1, small shift."""
        parameters = {
            "weight": self.uniform(channels, 0.8 * gain, 1.2 * gain),
            "bias": self.normal((channels,), 0.1),
            "running_mean": self.normal((channels,), 0.1),
            "running_var": self.uniform(channels, 0.7, 1.4),
        }
        names = [self.constant(f"{name}.{key}", value) for key, value in parameters.items()]
        return self.node("BatchNormalization", [x, *names], name, epsilon=1e-5)

    def dense(self, x: str, name: str, inputs: int, outputs: int) -> str:
        """Fully connected layer on [N, inputs], weights stored [outputs, inputs] as PyTorch exports them."""
        weights = self.constant(f"{name}.weight", self.normal((outputs, inputs), (2.0 / inputs) ** 0.5))
        bias = self.constant(f"{name}.bias", self.normal((outputs,), 0.1))
        return self.node("Gemm", [x, weights, bias], name, transB=1)

    def finish(
        self, inputs: dict[str, Sequence[int]], outputs: dict[str, Sequence[int]], datatype: int = TensorProto.FLOAT
    ) -> ModelProto:
        """Make the checked model. Shapes are given without the batch dimension, which becomes the symbol `N`."""

        def infos(side: dict[str, Sequence[int]]) -> list[ValueInfoProto]:
            return [helper.make_tensor_value_info(name, datatype, [BATCH, *shape]) for name, shape in side.items()]

        graph = helper.make_graph(
            self._nodes, self._name, infos(inputs), infos(outputs), initializer=self._initializers
        )
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="gangway-zoo"
        )
        checker.check_model(model)
        return model
