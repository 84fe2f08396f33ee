"""A model whose weights are drawn only when it is written: its structure costs nothing, its file is never in memory.

The file is the protobuf message `onnx.ModelProto`, field by field in the order in which protobuf itself writes them:
https://protobuf.dev/programming-guides/encoding/
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from onnx import GraphProto, ModelProto, TensorProto, checker, helper

OPSET = 17
IR_VERSION = 8
PRODUCER = "gangway-zoo"

GRAPH_FIELD = 7  # of ModelProto
INITIALIZER_FIELD = 5  # of GraphProto
RAW_DATA_FIELD = 9  # of TensorProto
LENGTH_DELIMITED = 2  # protobuf's wire type of bytes and messages

Floats = npt.NDArray[np.float32]


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
    law: Normal | Uniform

    def header(self) -> TensorProto:
        """The initializer without its numbers."""
        return TensorProto(dims=self.shape, data_type=TensorProto.FLOAT, name=self.name)


@dataclass(frozen=True)
class Blueprint:
    """A model's graph. `initializers` holds constants as they are, and weights in the order in which they are drawn."""

    name: str
    seed: int
    nodes: Sequence[Any]
    initializers: Sequence[TensorProto | Weight]
    inputs: Sequence[Any]
    outputs: Sequence[Any]

    def check(self) -> None:
        """Raise onnx.checker.ValidationError if the graph is not valid ONNX."""
        # The checker wants numbers in an initializer; declared as an input, a weight needs none.
        weights = [
            helper.make_tensor_value_info(w.name, TensorProto.FLOAT, w.shape)
            for w in self.initializers
            if isinstance(w, Weight)
        ]
        constants = [tensor for tensor in self.initializers if not isinstance(tensor, Weight)]
        graph = helper.make_graph(self.nodes, self.name, [*self.inputs, *weights], self.outputs, initializer=constants)
        checker.check_model(self._model(graph))

    def skeleton(self) -> ModelProto:
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
                yield item.law.draw(random, item.shape).data.cast("B")
            else:
                yield b""  # a constant stands in its head

    @staticmethod
    def _model(graph: GraphProto) -> ModelProto:
        opset = helper.make_opsetid("", OPSET)
        return helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION, producer_name=PRODUCER)


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
