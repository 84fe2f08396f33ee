"""Rewrites of a graph that leave its answers alone: constant folding, scaling of weights, removal of unused nodes."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from gangway.compiler.errors import ModelError
from gangway.compiler.frontend.graph import Graph, Node, TensorType
from gangway.compiler.frontend.inference import evaluate
from gangway.compiler.frontend.rows import check_rows
from gangway.compiler.kernels.specs import Array

# Gemms that are no dense layer: alpha A B + beta C in single steps, wherever B is no constant or C no vector.


def split_gemm(graph: Graph) -> Graph:
    """Return the graph with Transpose, MatMul, Mul and Add in the place of such Gemms."""
    splitter = _Splitter(graph)
    nodes = tuple(item for node in graph.nodes for item in splitter.visit(node))
    return replace(graph, nodes=nodes, constants=splitter.constants, types=splitter.types)


class _Splitter:
    def __init__(self, graph: Graph) -> None:
        self.constants = dict(graph.constants)
        self.types = dict(graph.types)

    def visit(self, node: Node) -> Iterator[Node]:
        """Return what stands for a node."""
        known = all(self._shape(name) is not None for name in (*node.inputs, *node.outputs) if name)
        if node.operator != "Gemm" or not known or self._is_dense(node):
            yield node
            return
        matrices = []
        for name, attribute in zip(node.inputs[:2], ("transA", "transB"), strict=True):
            turned = bool(node.attributes.get(attribute, 0))
            matrices.append(f"{node.outputs[0]}:{attribute}" if turned else name)
            if turned and name in self.constants:
                self.constants[matrices[-1]] = self.constants[name].T
            elif turned:
                shape = self._shape(name)
                assert shape is not None  # else `known` is false
                yield self._node(node, "Transpose", (name,), attribute, shape[::-1], {"perm": [1, 0]})
        yield from self._sum(node, (matrices[0], matrices[1]))

    def _sum(self, node: Node, matrices: tuple[str, str]) -> Iterator[Node]:
        """Product, factors and summand; the last of them computes the output."""
        output, shape = node.outputs[0], self.types[node.outputs[0]].shape
        steps: list[tuple[str, tuple[str, ...]]] = [("MatMul", matrices)]
        alpha, beta = (node.attributes.get(name, 1.0) for name in ("alpha", "beta"))
        if alpha != 1.0:
            steps.append(("Mul", (self._constant(f"{output}:alpha", np.array(alpha, np.float32)),)))
        if len(node.inputs) > 2 and node.inputs[2]:
            summand = node.inputs[2]
            if beta != 1.0:
                factor = self._constant(f"{output}:beta", np.array(beta, np.float32))
                if summand in self.constants:
                    summand = self._constant(f"{output}:summand", self.constants[summand] * np.float32(beta))
                else:
                    yield self._node(node, "Mul", (summand, factor), "scaled", self._shape(summand) or ())
                    summand = f"{output}:scaled"
            steps.append(("Add", (summand,)))
        source: tuple[str, ...] = ()
        for operator, others in steps[:-1]:
            yield self._node(node, operator, (*source, *others), operator, shape)
            source = (f"{output}:{operator}",)
        operator, others = steps[-1]
        yield Node(node.name, operator, (*source, *others), node.outputs)

    def _is_dense(self, node: Node) -> bool:
        """Whether it is an activation times a constant matrix, plus a constant with a number for each column."""
        x, matrix, *bias = node.inputs
        if x in self.constants or matrix not in self.constants or node.attributes.get("transA", 0):
            return False
        value = self.constants.get(bias[0]) if bias and bias[0] else np.zeros(1, np.float32)
        return value is not None and value.size == (value.shape[-1] if value.ndim else 1)

    def _shape(self, name: str) -> tuple[int, ...] | None:
        if name in self.constants:
            return self.constants[name].shape
        return self.types[name].shape if name in self.types else None

    def _constant(self, name: str, value: Array) -> str:
        self.constants[name] = value
        return name

    def _node(
        self,
        node: Node,
        operator: str,
        inputs: tuple[str, ...],
        suffix: str,
        shape: tuple[int, ...],
        attributes: dict[str, object] | None = None,
    ) -> Node:
        output = f"{node.outputs[0]}:{suffix}"
        self.types[output] = TensorType(shape, "float32")
        return Node(f"{node.name}:{suffix}", operator, inputs, (output,), attributes or {})


_RANDOM = {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial"}
_UNFOLDED = _RANDOM | {"If", "Loop", "Scan"}  # the latter read tensors that are not among their inputs


def simplify(graph: Graph) -> Graph:
    """Return an equivalent graph with fewer nodes, which computes every row of a batch by itself.

    Raises MixedRowsError when the model mixes rows, UnsupportedModelError when that is not known, ModelError when
    weights do not fit their operators.
    """
    try:
        with np.errstate(all="ignore"):  # weights that overflow do so in the model, too
            graph = remove_unused(graph)
            folded = fold_constants(graph)
            check_rows(graph, folded.constants)
            return remove_unused(fold_affine(split_gemm(remove_unused(folded))))
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise ModelError(f"weights or attributes do not fit their operators: {error!r}") from error


def fold_constants(graph: Graph) -> Graph:
    """Replace what does not depend on the inputs by constants, and `Shape` by the shape at batch 1."""
    constants = dict(graph.constants)
    kept = []
    for node in graph.nodes:
        if node.operator == "Shape" and node.inputs[0] in graph.types:
            begin, end = node.attributes.get("start", 0), node.attributes.get("end")
            constants[node.outputs[0]] = np.array(graph.types[node.inputs[0]].shape[begin:end], np.int64)
        elif node.operator == "CastLike" and node.inputs[0] in constants and node.outputs[0] in graph.types:
            constants[node.outputs[0]] = constants[node.inputs[0]].astype(graph.types[node.outputs[0]].dtype)
        elif node.operator not in _UNFOLDED and all(name in constants or not name for name in node.inputs):
            constants.update(evaluate(node, constants, graph.opset))
        else:
            kept.append(node)
    return replace(graph, nodes=tuple(kept), constants=constants)


def fold_affine(graph: Graph) -> Graph:
    """Let a Conv, Gemm or MatMul absorb what scales and shifts its output by constants per channel.

    That is BatchNormalization, and Add, Sub, Mul or Div with a constant, when nothing else reads the output in between.
    """
    uses, nodes = graph.uses(), {node.outputs[0]: node for node in graph.nodes}
    constants = dict(graph.constants)
    for node in graph.nodes:
        source = next((name for name in node.inputs if name not in constants), "")
        producer = nodes.get(source)
        if producer is None or uses[source] != 1 or not _absorbs(producer, constants):
            continue
        if source not in graph.types:
            continue
        shape = graph.types[source].shape
        axis = 1 if producer.operator == "Conv" else len(shape) - 1
        factors = affine_factors(node, constants, shape, axis)
        if factors is not None:
            del nodes[source]
            nodes[node.outputs[0]] = _absorb(producer, constants, factors, node.outputs[:1])
    kept = tuple(nodes[node.outputs[0]] for node in graph.nodes if node.outputs[0] in nodes)
    return replace(graph, nodes=kept, constants=constants)


def affine_factors(
    node: Node, constants: Mapping[str, Array], shape: tuple[int, ...], channel_axis: int = 1
) -> tuple[Array, Array] | None:
    """Return (scale, shift), each [channels], if the node computes y = scale x + shift on x of `shape`; None if not."""
    channels = shape[channel_axis] if len(shape) > channel_axis else 0
    if node.operator == "BatchNormalization":
        if channel_axis != 1:
            return None
        return _batch_norm_factors(node, constants)
    operand = next((constants[name] for name in node.inputs if name in constants), None)
    if node.operator not in {"Add", "Sub", "Mul", "Div"} or operand is None or operand.dtype != np.float32:
        return None
    reversed_operands = node.inputs[0] in constants
    aligned = (1,) * (len(shape) - operand.ndim) + operand.shape
    if len(aligned) != len(shape) or any(n != 1 for axis, n in enumerate(aligned) if axis != channel_axis):
        return None
    if operand.size not in (1, channels):
        return None
    value = np.broadcast_to(operand.reshape(-1), (channels,))
    one, zero = np.ones(channels, np.float32), np.zeros(channels, np.float32)
    match node.operator, reversed_operands:
        case "Add", _:
            return one, value
        case "Sub", False:
            return one, -value
        case "Sub", True:
            return -one, value
        case "Mul", _:
            return value, zero
        case "Div", False:
            return one / value, zero
    return None


def _batch_norm_factors(node: Node, constants: Mapping[str, Array]) -> tuple[Array, Array] | None:
    if node.attributes.get("training_mode", 0) or any(name not in constants for name in node.inputs[1:]):
        return None
    gamma, beta, mean, variance = (constants[name] for name in node.inputs[1:5])
    scale = (gamma / np.sqrt(variance + np.float32(node.attributes.get("epsilon", 1e-5)))).astype(np.float32)
    return scale, (beta - mean * scale).astype(np.float32)


def _absorbs(node: Node, constants: Mapping[str, Array]) -> bool:
    plain = all(node.attributes.get(name, 1.0) == 1.0 for name in ("alpha", "beta"))
    if node.operator not in {"Conv", "Gemm", "MatMul"} or not plain or node.attributes.get("transA", 0):
        return False
    if node.inputs[0] in constants or any(name not in constants for name in node.inputs[1:]):
        return False
    return node.operator == "Conv" or constants[node.inputs[1]].ndim == 2


def _absorb(node: Node, constants: dict[str, Array], factors: tuple[Array, Array], outputs: tuple[str, ...]) -> Node:
    """Return the node with scaled weights and shifted bias, which are added to `constants`.

    MatMul becomes Gemm, which may have any number of axes here. Weights that are not scaled are not copied.
    """
    scale, shift = factors
    x, weights = node.inputs[0], constants[node.inputs[1]]
    axis = 0 if node.operator == "Conv" or node.attributes.get("transB", 0) else 1
    bias = constants[node.inputs[2]] if len(node.inputs) > 2 else np.float32(0)
    names = (f"{outputs[0]}:weights", f"{outputs[0]}:bias")
    if (scale != 1).any():
        weights = weights * scale.reshape([-1 if n == axis else 1 for n in range(weights.ndim)])
    constants[names[0]] = weights
    constants[names[1]] = (bias * scale + shift).astype(np.float32).reshape(-1)
    operator = "Gemm" if node.operator == "MatMul" else node.operator
    return replace(node, operator=operator, inputs=(x, *names), outputs=outputs)


def remove_unused(graph: Graph) -> Graph:
    """Drop nodes and constants that no output depends on."""
    needed = set(graph.outputs)
    kept = []
    for node in reversed(graph.nodes):
        if needed.intersection(node.outputs):
            kept.append(node)
            needed.update(node.inputs)
    constants = {name: value for name, value in graph.constants.items() if name in needed}
    return replace(graph, nodes=tuple(reversed(kept)), constants=constants)
