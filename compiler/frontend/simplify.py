"""Rewrites of a graph that leave its answers alone: scaling of weights, and what `folding.py` has."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from gangway.compiler.errors import ModelError, UnsupportedModelError
from gangway.compiler.frontend.batch_independence import check_rows
from gangway.compiler.frontend.dynamic_quantisation import BIASES
from gangway.compiler.frontend.folding import CONSTANTS
from gangway.compiler.frontend.graph import (
    Editor,
    Graph,
    Node,
    Rule,
    TensorType,
    apply_rule,
    number,
    remove_unused,
    rewrite,
)
from gangway.compiler.frontend.packed import PACKED_MATMUL
from gangway.compiler.kernels.specs import Array


def simplify(graph: Graph) -> Graph:
    """Return an equivalent graph with fewer nodes, which computes every row of a batch by itself.

    Raises MixedRowsError when the model mixes rows, UnsupportedModelError when that is not known, ModelError when
    weights do not fit their operators.
    """
    with _faults_of_weights():
        return rewrite(_folded(graph), BIASES, GEMMS, AFFINE, PACKED_AFFINE)


def fold(graph: Graph) -> Graph:
    """Return an equivalent graph with constants in the place of what is known, if its rows are seen to be apart.

    Otherwise the graph is returned as it is: its operators' definitions may show more.
    """
    with _faults_of_weights():
        try:
            return _folded(graph)
        except UnsupportedModelError:
            return graph


def _folded(graph: Graph) -> Graph:
    """Return the graph with constants in the place of what is known. Raises UnsupportedModelError as above."""
    graph = remove_unused(apply_rule(graph, TABLES))
    folded = apply_rule(graph, CONSTANTS)
    if not graph.apart:
        check_rows(graph, folded.constants)
    return replace(remove_unused(folded), apart=True)


@contextmanager
def _faults_of_weights() -> Iterator[None]:
    try:
        with np.errstate(all="ignore"):  # weights that overflow do so in the model, too
            yield
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise ModelError(f"weights or attributes do not fit their operators: {error!r}") from error


def _look_up_first(editor: Editor, node: Node) -> None:
    """Dequantise what is looked up in a table of integers instead of the table."""
    table = editor.producer(node.inputs[0], "DequantizeLinear")
    output = node.outputs[0]
    if table is None or table.inputs[0] not in editor.constants or node.inputs[1] in editor.constants:
        return
    if any(editor.scalar(name) is None for name in filter(None, table.inputs[1:])) or output not in editor.types:
        return
    found, dtype = f"{output}:integers", editor.constants[table.inputs[0]].dtype.name
    editor.types[found] = TensorType(editor.types[output].shape, dtype)
    if output in editor.wide_shapes:
        editor.wide_shapes[found] = editor.wide_shapes[output]
    gather = replace(node, inputs=(table.inputs[0], node.inputs[1]), outputs=(found,))
    editor.replace(output, [gather, replace(table, inputs=(found, *table.inputs[1:]), outputs=(output,))])


def _fold_affine(editor: Editor, node: Node) -> None:
    """Let a Conv, Gemm or MatMul absorb a node that scales and shifts its output by constants per channel.

    That is BatchNormalization, and Add, Sub, Mul or Div with a constant, when nothing else reads the output in between.
    """
    source = next((name for name in node.inputs if name not in editor.constants), "")
    producer = editor.inner(source, "Conv", "Gemm", "MatMul")
    if producer is None or not _absorbs(producer, editor.constants) or source not in editor.types:
        return
    shape = editor.types[source].shape
    axis = 1 if producer.operator == "Conv" else len(shape) - 1
    factors = affine_factors(node, editor.constants, shape, axis)
    if factors is not None:
        editor.remove(producer)
        editor.replace(node.outputs[0], [_absorb(producer, editor.constants, factors, node.outputs[:1])])


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
    if not plain or node.attributes.get("transA", 0):
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


def _scale_packed(editor: Editor, node: Node) -> None:
    """Let a product with integers absorb a node that scales and shifts its outputs by constants, as above."""
    source, output = next((name for name in node.inputs if name not in editor.constants), ""), node.outputs[0]
    producer, shape = editor.inner(source, PACKED_MATMUL), editor.shape(source)
    factors = affine_factors(node, editor.constants, shape, len(shape) - 1) if producer and shape else None
    if producer is None or factors is None or editor.shape(output) != shape:
        return
    (scale, shift), (x, integers, scales, zeros, bias) = factors, producer.inputs
    scaled = editor.constant(f"{output}:scales", editor.constants[scales] * scale[:, None])
    before = editor.constants[bias] if bias else np.float32(0)
    added = editor.constant(f"{output}:bias", (before * scale + shift).astype(np.float32))
    editor.remove(producer)
    editor.replace(output, [replace(producer, inputs=(x, integers, scaled, zeros, added), outputs=node.outputs[:1])])


def _split_gemm(editor: Editor, node: Node) -> None:
    """Put Transpose, MatMul, Mul and Add in the place of a Gemm that is no dense layer.

    That is one whose B is no constant, or whose C is no vector.
    """
    known = all(editor.shape(name) is not None for name in (*node.inputs, *node.outputs) if name)
    if known and not _is_dense(editor, node):
        editor.replace(node.outputs[0], list(_single_steps(editor, node)))


def _single_steps(editor: Editor, node: Node) -> Iterator[Node]:
    """Yield transposed matrices, product, factors and summand; the last node computes the output."""
    output, shape = node.outputs[0], editor.types[node.outputs[0]].shape
    matrices = []
    for name, attribute in zip(node.inputs[:2], ("transA", "transB"), strict=True):
        turned = bool(node.attributes.get(attribute, 0))
        matrices.append(f"{output}:{attribute}" if turned else name)
        if turned and name in editor.constants:
            editor.constants[matrices[-1]] = editor.constants[name].T
        elif turned:
            columns_first = (editor.shape(name) or ())[::-1]
            yield _step(editor, node, "Transpose", (name,), attribute, columns_first, {"perm": [1, 0]})
    steps: list[tuple[str, tuple[str, ...]]] = [("MatMul", tuple(matrices))]
    alpha, beta = (node.attributes.get(name, 1.0) for name in ("alpha", "beta"))
    if alpha != 1.0:
        steps.append(("Mul", (editor.constant(f"{output}:alpha", number(alpha)),)))
    if len(node.inputs) > 2 and node.inputs[2] and beta:
        summand = node.inputs[2]
        if beta != 1.0:
            factor = editor.constant(f"{output}:beta", number(beta))
            if summand in editor.constants:
                summand = editor.constant(f"{output}:summand", editor.constants[summand] * np.float32(beta))
            else:
                yield _step(editor, node, "Mul", (summand, factor), "scaled", editor.shape(summand) or ())
                summand = f"{output}:scaled"
        steps.append(("Add", (summand,)))
    source: tuple[str, ...] = ()
    for operator, others in steps[:-1]:
        yield _step(editor, node, operator, (*source, *others), operator, shape)
        source = (f"{output}:{operator}",)
    operator, others = steps[-1]
    yield Node(node.name, operator, (*source, *others), node.outputs)


def _is_dense(editor: Editor, node: Node) -> bool:
    """Whether a Gemm is an activation times a constant matrix, plus a constant with a number for each column."""
    x, matrix, *bias = node.inputs
    if x in editor.constants or matrix not in editor.constants or node.attributes.get("transA", 0):
        return False
    value = editor.constants.get(bias[0]) if bias and bias[0] else np.zeros(1, np.float32)
    return value is not None and value.size == (value.shape[-1] if value.ndim else 1)


def _step(
    editor: Editor,
    node: Node,
    operator: str,
    inputs: tuple[str, ...],
    suffix: str,
    shape: tuple[int, ...],
    attributes: dict[str, object] | None = None,
) -> Node:
    output = f"{node.outputs[0]}:{suffix}"
    editor.types[output] = TensorType(shape, "float32")
    return Node(f"{node.name}:{suffix}", operator, inputs, (output,), attributes or {})


TABLES = Rule(("Gather",), _look_up_first)
GEMMS = Rule(("Gemm",), _split_gemm)
AFFINE = Rule((), _fold_affine)
PACKED_AFFINE = Rule(("Add", "Sub", "Mul", "Div"), _scale_packed)
