"""Layers of transformers as ONNX models, written as exporters write them."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import NodeProto, TensorProto, helper, numpy_helper

from gangway.compiler.kernels.attention_specs import AttentionSpec
from gangway.compiler.kernels.plain_specs import MatMulSpec
from gangway.compiler.kernels.specs import Activation, ConvSpec, LayerNormSpec

SequenceSpec = ConvSpec | AttentionSpec | LayerNormSpec | MatMulSpec


@dataclass
class Graph:
    """A chain of nodes under construction; `last` is what the next one reads."""

    last: str = "x"
    inputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    constants: dict[str, npt.NDArray[np.generic]] = field(default_factory=dict)
    nodes: list[NodeProto] = field(default_factory=list)

    def add(self, operator: str, *others: str, **attributes: Any) -> str:
        """A node that reads the last result, then `others`; returns the name of its result."""
        return self.put(operator, self.last, *others, **attributes)

    def put(self, operator: str, *names: str, **attributes: Any) -> str:
        """A node; returns the name of its result."""
        self.last = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, names, [self.last], **attributes))
        return self.last

    def constant(self, value: npt.ArrayLike, dtype: str = "float32") -> str:
        """The name of a constant."""
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(value, dtype)
        return name

    def serialised(self) -> bytes:
        """The model, opset 17; the last result is its output."""
        floats = TensorProto.FLOAT
        inputs = [helper.make_tensor_value_info(name, floats, shape) for name, shape in self.inputs.items()]
        outputs = [helper.make_tensor_value_info(self.last, floats, None)]
        constants = [numpy_helper.from_array(value, name) for name, value in self.constants.items()]
        graph = helper.make_graph(self.nodes, "layer", inputs, outputs, constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        serialised: bytes = model.SerializeToString()
        return serialised


def is_dense(spec: object) -> bool:
    """Whether a convolution is a linear layer over a sequence."""
    return isinstance(spec, ConvSpec) and (spec.height, spec.kernel, spec.groups) == (1, (1, 1), 1) and spec.width > 1


def sequence_model(spec: SequenceSpec) -> bytes:
    """The layer alone. Operands of a product are contiguous, whatever they are in the spec."""
    graph, rng = Graph(), np.random.default_rng(0)
    match spec:
        case ConvSpec():
            _dense(graph, spec, rng)
        case LayerNormSpec():
            graph.inputs = {"x": (1, spec.positions, spec.channels)}
            weights = [graph.constant(rng.standard_normal(spec.channels)) for _ in range(2)]
            graph.add("LayerNormalization", *weights, axis=-1, epsilon=spec.epsilon)
        case MatMulSpec():
            graph.inputs = {"x": (*spec.batch_shape, spec.rows, spec.inner)}
            graph.inputs["other"] = (*spec.batch_shape, spec.inner, spec.columns)
            graph.add("MatMul", "other")
        case AttentionSpec():
            _attention(graph, spec)
    return graph.serialised()


def _dense(graph: Graph, spec: ConvSpec, rng: np.random.Generator) -> None:
    graph.inputs = {"x": (1, spec.width, spec.in_channels)}
    graph.add("MatMul", graph.constant(rng.standard_normal((spec.in_channels, spec.out_channels), np.float32)))
    graph.add("Add", graph.constant(rng.standard_normal(spec.out_channels)))
    if spec.residual:
        graph.inputs["residual"] = (1, spec.width, spec.out_channels)
        graph.add("Add", "residual")
    _activation(graph, spec.activation)


def _activation(graph: Graph, activation: Activation) -> None:
    """GELU in both forms and tanh; other activations of linear layers are left out, in favour of the peer."""
    x = graph.last
    if activation.name == "gelu":
        graph.add("Div", graph.constant(math.sqrt(2)))
        graph.add("Erf")
        graph.add("Add", graph.constant(1.0))
    elif activation.name == "gelu_tanh":
        graph.add("Pow", graph.constant(3.0))
        graph.add("Mul", graph.constant(0.044715))
        graph.put("Add", x, graph.last)
        graph.add("Mul", graph.constant(math.sqrt(2 / math.pi)))
        graph.add("Tanh")
        graph.add("Add", graph.constant(1.0))
    elif activation.name == "tanh":
        graph.add("Tanh")
        return
    else:
        return
    graph.put("Mul", x, graph.last)
    graph.add("Mul", graph.constant(0.5))


def _attention(graph: Graph, spec: AttentionSpec) -> None:
    channels = spec.heads * spec.head_size
    lengths = {"x": spec.queries, "keys": spec.keys, "values": spec.keys}
    graph.inputs = {name: (1, length, channels) for name, length in lengths.items()}
    heads = []
    for (name, length), order in zip(lengths.items(), ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3)), strict=True):
        shape = graph.constant([1, length, spec.heads, spec.head_size], "int64")
        heads.append(graph.put("Transpose", graph.put("Reshape", name, shape), perm=order))
    graph.put("MatMul", heads[0], heads[1])
    for scaled in (True, False):
        if not scaled:
            graph.add("Mul", graph.constant(spec.scale))
        for i, bias in enumerate(spec.biases):
            if bias.scaled == scaled:
                shape_of_bias = (
                    1,
                    spec.heads if bias.per_head else 1,
                    spec.queries if bias.per_query else 1,
                    spec.keys,
                )
                graph.inputs[f"bias{i}"] = shape_of_bias
                graph.add("Add", f"bias{i}")
    graph.add("Softmax", axis=-1)
    graph.add("MatMul", heads[2])
    graph.add("Transpose", perm=(0, 2, 1, 3))
    graph.add("Reshape", graph.constant([1, spec.queries, channels], "int64"))
