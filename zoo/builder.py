"""A small graph builder on top of onnx.helper: names values, declares weights, adds the usual groups of nodes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, ValueInfoProto, helper, numpy_helper

from gangway.zoo.blueprint import Blueprint, Normal, Uniform, Weight

BATCH = "N"
# ReLU halves the power of a normal signal (He et al. 2015); balanced weights see its variance only, without the mean.
HE_POWER = 2.0
BALANCED_POWER = 2.0 / (1.0 - 1.0 / math.pi)
MIN_BALANCED = 16  # channels; on fewer, brightness itself would be lost

Pair = int | tuple[int, int]  # of height and width
Datatypes = int | Mapping[str, int]


class GraphBuilder:
    """Collects nodes and initializers of one model. Every method that adds a node returns the name of its output."""

    def __init__(self, name: str, seed: int) -> None:
        self._name = name
        self._seed = seed
        self._nodes: list[Any] = []
        self._initializers: list[TensorProto | Weight] = []

    def node(self, operator: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        """Add one node with one output, which is named after the node."""
        return self.nodes(operator, inputs, [name], name, **attributes)[0]

    def nodes(
        self, operator: str, inputs: Sequence[str], outputs: Sequence[str], name: str, **attributes: Any
    ) -> Sequence[str]:
        """Add one node with several outputs; return their names."""
        self._nodes.append(helper.make_node(operator, list(inputs), list(outputs), name=name, **attributes))
        return outputs

    def constant(self, name: str, value: npt.NDArray[Any]) -> str:
        """Add an initializer that is not trained: a limit, a shape, indices."""
        self._initializers.append(numpy_helper.from_array(value, name))
        return name

    def scalar(self, name: str, value: float) -> str:
        """Add a float32 initializer of rank 0."""
        return self.constant(name, np.array(value, np.float32))

    def integers(self, name: str, values: Sequence[int]) -> str:
        """Add an int64 initializer of rank 1, as shapes, axes and slices are given."""
        return self.constant(name, np.array(values, np.int64))

    def normal(self, name: str, shape: Sequence[int], deviation: float, balanced: bool = False) -> str:
        """Declare a weight of normally distributed numbers around 0; `balanced` as in Normal."""
        self._initializers.append(Weight(name, tuple(shape), Normal(deviation, balanced)))
        return name

    def uniform(self, name: str, size: int, low: float, high: float) -> str:
        """Declare a weight of uniformly distributed numbers."""
        self._initializers.append(Weight(name, (size,), Uniform(low, high)))
        return name

    def conv(
        self,
        x: str,
        name: str,
        channels: tuple[int, int],
        kernel: Pair,
        stride: int = 1,
        groups: int = 1,
        padding: Pair | None = None,
        bias: bool = False,
    ) -> str:
        """Convolution; `channels` is (in, out), padding is "same" unless given."""
        inputs, outputs = channels
        height, width = _pair(kernel)
        vertical, horizontal = (height // 2, width // 2) if padding is None else _pair(padding)
        names = [x, self._filters(f"{name}.weight", (outputs, inputs // groups, height, width))]
        if bias:
            names.append(self.normal(f"{name}.bias", (outputs,), 0.1))
        return self.node(
            "Conv",
            names,
            name,
            kernel_shape=[height, width],
            strides=[stride, stride],
            pads=[vertical, horizontal] * 2,
            group=groups,
        )

    def _filters(self, name: str, shape: Sequence[int]) -> str:
        """Declare weights [outputs, inputs, ...] that keep the power of a signal which ReLU has been applied to."""
        balanced = shape[1] >= MIN_BALANCED
        power = BALANCED_POWER if balanced else HE_POWER
        return self.normal(name, shape, (power / math.prod(shape[1:])) ** 0.5, balanced)

    def batch_norm(self, x: str, name: str, channels: int, gain: float = 1.0, epsilon: float = 1e-5) -> str:
        """Batch normalisation with statistics as after training: scale about `gain`, variance about 1, small shift."""
        names = [
            self.uniform(f"{name}.weight", channels, 0.8 * gain, 1.2 * gain),
            self.normal(f"{name}.bias", (channels,), 0.1),
            self.normal(f"{name}.running_mean", (channels,), 0.1),
            self.uniform(f"{name}.running_var", channels, 0.7, 1.4),
        ]
        return self.node("BatchNormalization", [x, *names], name, epsilon=epsilon)

    def dense(self, x: str, name: str, inputs: int, outputs: int) -> str:
        """Fully connected layer on [N, inputs], weights stored [outputs, inputs] as PyTorch exports them."""
        weights = self._filters(f"{name}.weight", (outputs, inputs))
        return self.node("Gemm", [x, weights, self.normal(f"{name}.bias", (outputs,), 0.1)], name, transB=1)

    def max_pool(self, x: str, name: str, kernel: int, stride: int, padding: int = 0, ceil_mode: bool = False) -> str:
        """Maximum over square windows; `ceil_mode` keeps a last, incomplete window."""
        attributes: dict[str, Any] = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [padding] * 4}
        return self.node("MaxPool", [x], name, **attributes, **({"ceil_mode": 1} if ceil_mode else {}))

    def classify(self, x: str, channels: int, classes: int = 1000) -> str:
        """Average over all pixels, then a fully connected layer that makes `output` [N, classes] (logits)."""
        x = self.node("GlobalAveragePool", [x], "avgpool")
        return self.dense(self.node("Flatten", [x], "flatten", axis=1), "output", channels, classes)

    def finish(
        self,
        inputs: Mapping[str, Sequence[int | str]],
        outputs: Mapping[str, Sequence[int | str]],
        input_type: Datatypes = TensorProto.FLOAT,
        output_type: Datatypes = TensorProto.FLOAT,
    ) -> Blueprint:
        """Make the checked model. Shapes leave out the batch dimension, the symbol `N`; other symbols are names.

        Data types are those of all tensors of a side, or by name.
        """

        def infos(side: Mapping[str, Sequence[int | str]], datatypes: Datatypes) -> list[ValueInfoProto]:
            return [
                helper.make_tensor_value_info(
                    name, datatypes if isinstance(datatypes, int) else datatypes[name], [BATCH, *shape]
                )
                for name, shape in side.items()
            ]

        blueprint = Blueprint(
            self._name,
            self._seed,
            self._nodes,
            self._initializers,
            infos(inputs, input_type),
            infos(outputs, output_type),
        )
        blueprint.check()
        return blueprint


def _pair(value: Pair) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value
