"""The best numbers of rows."""

import math

from gangway.compiler.frontend.graph import Node
from gangway.compiler.kernels.plain_specs import MOST_BEST, TopSpec
from gangway.compiler.lower.layers import LoweredLayer, Program, lowers

_DTYPES = ("float32", "float64", "int32", "int64")
_SMALL = 4  # counts below it are found by a heap
_HEAP = 0.725  # and others if their logarithm is less than so much of that of all numbers


@lowers("TopK")
def top(program: Program, node: Node) -> None:
    """One layer with two results, if onnxruntime, too, finds them by a heap: NaN then ends up where its heap has it."""
    kind, axis = program.type(node.inputs[0]), node.attributes.get("axis", -1)
    count = int(program.constant(node, 1).reshape(())) if len(node.inputs) > 1 else node.attributes["k"]
    columns = kind.shape[axis]
    if axis % len(kind.shape) != len(kind.shape) - 1 or not node.attributes.get("sorted", 1):
        raise node.unsupported("only sorted numbers of the last axis have a kernel")
    if kind.dtype not in _DTYPES:
        raise node.unsupported(f"element type {kind.dtype}")
    if not 0 < count <= min(columns, MOST_BEST):
        raise node.unsupported(f"the best {count} of {columns} numbers; a kernel finds 1 to {MOST_BEST}")
    if columns == 1:
        raise node.unsupported("a single number needs no kernel")
    if count >= _SMALL and math.log2(count) >= _HEAP * math.log2(columns):
        raise node.unsupported(f"the best {count} of {columns} numbers are too many for a heap")
    spec = TopSpec(kind.dtype, math.prod(kind.shape[:-1]), columns, count, bool(node.attributes.get("largest", 1)))
    output, places = node.outputs
    program.layers.append(LoweredLayer(node.name, node.operator, spec, node.inputs[:1], output, more_outputs=(places,)))
