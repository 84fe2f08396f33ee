"""Inputs that only repeat what a static output shape says, as constants: kernels then need not read them."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import numpy as np

from gangway.compiler.frontend.graph import Graph, Node, without_empty_parts
from gangway.compiler.kernels.specs import Array

Shape = tuple[int, ...]
ShapeRule = Callable[
    [Node, list[Shape], list[Shape]], list[int] | None
]  # of a node and the shapes of inputs and outputs


def state_shapes(graph: Graph) -> Graph:
    """Return the graph with tensors that a static shape determines as constants; of a batched one, without empty parts.

    Those are tensors without numbers, and inputs that only repeat what a static output shape says, which kernels then
    need not read. A request with other numbers there would need another output shape than the model declares.
    """
    if graph.batched:
        return without_empty_parts(graph)
    empty = {name: kind for name, kind in graph.types.items() if 0 in kind.shape}
    constants = {**graph.constants, **{name: np.zeros(kind.shape, kind.dtype) for name, kind in empty.items()}}
    graph = replace(graph, nodes=tuple(node for node in graph.nodes if not empty.keys() >= {*node.outputs}))
    nodes = tuple(_stated(node, graph, constants) for node in graph.nodes)
    return replace(graph, nodes=nodes, constants=constants)


def _stated(node: Node, graph: Graph, constants: dict[str, Array]) -> Node:
    index, rule = _RULES.get(node.operator, (0, None))
    given = node.inputs[index] if rule and len(node.inputs) > index else ""
    named = [name for name in (*node.inputs, *node.outputs) if name and name not in constants]
    if not rule or given not in graph.types or given in constants or any(name not in graph.types for name in named):
        return node
    shapes = [
        [constants[name].shape if name in constants else graph.types[name].shape if name else () for name in side]
        for side in (node.inputs, node.outputs)
    ]
    value, kind = rule(node, *shapes), graph.types[given]
    if value is None:
        return node
    if len(value) != math.prod(kind.shape):  # the file declares another rank than the operator has
        return node
    name = f"{node.outputs[0]}:{given}"
    constants[name] = np.array(value, kind.dtype).reshape(kind.shape)
    return replace(node, inputs=(*node.inputs[:index], name, *node.inputs[index + 1 :]))


def _whole(node: Node, inputs: list[Shape], outputs: list[Shape]) -> list[int]:
    return list(outputs[0])


def _repeats(node: Node, inputs: list[Shape], outputs: list[Shape]) -> list[int]:
    return [after // before for before, after in zip(inputs[0], outputs[0], strict=True)]


def _at_axes(node: Node, inputs: list[Shape], outputs: list[Shape]) -> list[int]:
    axes = node.attributes.get("axes", range(len(outputs[0])))
    return [outputs[0][axis] for axis in axes]


def _grid(node: Node, inputs: list[Shape], outputs: list[Shape]) -> list[int]:
    """Batch, channels, which a grid does not depend on, and pixels."""
    return [outputs[0][0], 1, *outputs[0][1:-1]]


def _at_axis(default: int) -> ShapeRule:
    """Lengths of all outputs along the axis."""

    def rule(node: Node, inputs: list[Shape], outputs: list[Shape]) -> list[int]:
        axis = node.attributes.get("axis", default)
        return [shape[axis] for shape in outputs]

    return rule


def _count(node: Node, inputs: list[Shape], outputs: list[Shape]) -> list[int]:
    return _at_axis(-1)(node, inputs, outputs[:1]) or []


def _resized(node: Node, inputs: list[Shape], outputs: list[Shape]) -> list[int] | None:
    """Sizes, unless the shape was made of them by keeping the aspect ratio: then the ratio is not in the shape."""
    if node.attributes.get("keep_aspect_ratio_policy", b"stretch") != b"stretch":
        return None
    return _at_axes(node, inputs, outputs)


def _reduced(node: Node, inputs: list[Shape], outputs: list[Shape]) -> list[int] | None:
    """The axes that give the output's shape, if all choices that do reduce the same axes longer than 1."""
    if len(inputs[1]) != 1:
        return None
    before, keep = inputs[0], node.attributes.get("keepdims", 1)
    found = []
    for axes in combinations(range(len(before)), inputs[1][0]):
        kept = [1 if axis in axes else length for axis, length in enumerate(before) if keep or axis not in axes]
        if tuple(kept) == outputs[0]:
            found.append(axes)
    if not found or not found[0] or len({tuple(a for a in axes if before[a] > 1) for axes in found}) > 1:
        return None
    return list(found[0])


_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
_RULES: dict[str, tuple[int, ShapeRule | None]] = {  # which input, and what it states
    "Reshape": (1, _whole),
    "Expand": (1, _whole),
    "ConstantOfShape": (0, _whole),
    "Tile": (1, _repeats),
    "CenterCropPad": (1, _at_axes),
    "AffineGrid": (1, _grid),
    "Resize": (3, _resized),
    "Split": (1, _at_axis(0)),
    "TopK": (1, _count),
    "OneHot": (1, _count),
    **{f"{kind}Window": (0, _whole) for kind in ("Hann", "Hamming", "Blackman")},
    **{f"Reduce{kind}": (1, _reduced) for kind in _REDUCTIONS},
}
