"""A model's graph, built node by node, whose weights are drawn only when its file is written.

So the structure costs nothing, and the file is never in memory. The file is the protobuf message `onnx.ModelProto`,
field by field in the order in which protobuf itself writes them:
https://protobuf.dev/programming-guides/encoding/
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from onnx import GraphProto, ModelProto, TensorProto, ValueInfoProto, checker, helper, numpy_helper

OPSET = 17
IR_VERSION = 8
PRODUCER = "gangway-zoo"
BATCH = "N"

GRAPH_FIELD = 7  # of ModelProto
INITIALIZER_FIELD = 5  # of GraphProto
RAW_DATA_FIELD = 9  # of TensorProto
LENGTH_DELIMITED = 2  # protobuf's wire type of bytes and messages

# ReLU halves the power of a normal signal (He et al. 2015); balanced weights see its variance only, without the mean.
HE_POWER = 2.0
BALANCED_POWER = 2.0 / (1.0 - 1.0 / math.pi)
MIN_BALANCED = 16  # channels; on fewer, brightness itself would be lost

Floats = npt.NDArray[np.float32]
Pair = int | tuple[int, int]  # of height and width
Datatypes = int | Mapping[str, int]


@dataclass(frozen=True)
class Normal:
    """Normally distributed numbers around 0."""

    deviation: float
    # Make each output's weights sum to 0. The mean that ReLU leaves in every channel then does not add up from layer
    # to layer, until all inputs look alike at the end of a deep network.
    balanced: bool = False

    def draw(self, random: np.random.Generator, shape: Sequence[int]) -> Floats:
        """Draw an array of this shape."""
        values = random.standard_normal(tuple(shape), dtype=np.float32)
        values *= np.float32(self.deviation)
        if self.balanced:
            rows = values.reshape(shape[0], -1)  # shape is [outputs, ...]
            rows -= rows.mean(axis=1, keepdims=True)
        return values


@dataclass(frozen=True)
class Uniform:
    """Uniformly distributed numbers."""

    low: float
    high: float

    def draw(self, random: np.random.Generator, shape: Sequence[int]) -> Floats:
        """Draw an array of this shape."""
        return random.uniform(self.low, self.high, tuple(shape)).astype(np.float32)


@dataclass(frozen=True)
class Weight:
    """A float32 initializer that is yet to be drawn."""

    name: str
    shape: tuple[int, ...]
    distribution: Normal | Uniform

    def header(self) -> TensorProto:
        """The initializer without its numbers."""
        return TensorProto(dims=self.shape, data_type=TensorProto.FLOAT, name=self.name)


@dataclass(frozen=True)
class ModelGraph:
    """A model's graph. `initializers` holds constants as they are, and weights in the order in which they are drawn."""

    name: str
    seed: int
    nodes: Sequence[Any]
    initializers: Sequence[TensorProto | Weight]
    inputs: Sequence[Any]
    outputs: Sequence[Any]

    def check(self) -> None:
        """Raise onnx.checker.ValidationError if the graph is not valid ONNX."""
        # The checker requires numbers in an initializer; declared as an input, a weight needs none.
        weights = [
            helper.make_tensor_value_info(w.name, TensorProto.FLOAT, w.shape)
            for w in self.initializers
            if isinstance(w, Weight)
        ]
        constants = [tensor for tensor in self.initializers if not isinstance(tensor, Weight)]
        graph = helper.make_graph(self.nodes, self.name, [*self.inputs, *weights], self.outputs, initializer=constants)
        checker.check_model(self._model(graph))

    def without_weights(self) -> ModelProto:
        """Return the model with all constants, but with weights that have a shape and no numbers."""
        initializers = [item.header() if isinstance(item, Weight) else item for item in self.initializers]
        return self._model(
            helper.make_graph(self.nodes, self.name, self.inputs, self.outputs, initializer=initializers)
        )

    def write(self, file: BinaryIO) -> None:
        """Write the whole model. At no time is more than one weight in memory. The bytes depend on nothing but self."""
        front = GraphProto(node=self.nodes, name=self.name).SerializeToString(deterministic=True)
        back = GraphProto(input=self.inputs, output=self.outputs).SerializeToString(deterministic=True)
        heads = [_initializer_head(item) for item in self.initializers]
        size = len(front) + len(back) + sum(map(len, heads)) + sum(map(_raw_bytes, self.initializers))
        model = self._model(GraphProto())
        file.write(ModelProto(ir_version=IR_VERSION, producer_name=PRODUCER).SerializeToString())
        file.write(_field_head(GRAPH_FIELD, size))
        file.write(front)
        for head, raw in zip(heads, self._raw_data(), strict=True):
            file.write(head)
            file.write(raw)
        file.write(back)
        file.write(ModelProto(opset_import=model.opset_import).SerializeToString())

    def _raw_data(self) -> Iterator[bytes | memoryview]:
        random = np.random.default_rng(self.seed)
        for item in self.initializers:
            if isinstance(item, Weight):
                yield item.distribution.draw(random, item.shape).data.cast("B")
            else:
                yield b""  # a constant is complete in its head

    @staticmethod
    def _model(graph: GraphProto) -> ModelProto:
        opset = helper.make_opsetid("", OPSET)
        return helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION, producer_name=PRODUCER)


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
    ) -> ModelGraph:
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

        graph = ModelGraph(
            self._name,
            self._seed,
            self._nodes,
            self._initializers,
            infos(inputs, input_type),
            infos(outputs, output_type),
        )
        graph.check()
        return graph


def _pair(value: Pair) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def _initializer_head(item: TensorProto | Weight) -> bytes:
    """Everything of GraphProto's initializer field that comes before the weight's numbers."""
    if not isinstance(item, Weight):
        content: bytes = item.SerializeToString(deterministic=True)
        return _field_head(INITIALIZER_FIELD, len(content)) + content
    header = item.header().SerializeToString(deterministic=True) + _field_head(RAW_DATA_FIELD, _raw_bytes(item))
    return _field_head(INITIALIZER_FIELD, len(header) + _raw_bytes(item)) + header


def _raw_bytes(item: TensorProto | Weight) -> int:
    return int(np.prod(item.shape, dtype=np.int64)) * 4 if isinstance(item, Weight) else 0


def _field_head(number: int, length: int) -> bytes:
    """Tag and length of a length-delimited protobuf field."""
    return _varint(number << 3 | LENGTH_DELIMITED) + _varint(length)


def _varint(value: int) -> bytes:
    groups = bytearray()
    while value >= 0x80:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)
