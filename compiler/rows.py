"""Is every row of a batch computed by itself? Only then may a model, read at batch 1, run row by row.

Shapes are inferred at two batch sizes, so that each tensor's batch axis is the one that differs. What is known of a
tensor is the place of the batch in its row-major order: on which axis, and how many items of that axis stand before and
after it ([N * 64, 768] has 64 after). A Reshape keeps the order, a Transpose moves the axis, every other operator must
treat the axis as parallel (`rows_rules`). Constants that stem from shapes are folded at both sizes, too: where they
differ, they may only say a shape, or must hold equal rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gangway.compiler.evaluate import evaluate
from gangway.compiler.graph import WIDE_BATCH, Graph, Node
from gangway.compiler.rows_rules import NOT_KNOWN, RULES, SHAPE_INPUTS, Operands, Rows
from gangway.compiler.specs import Array


def check_rows(graph: Graph, constants: Mapping[str, Array]) -> None:
    """Do nothing if the model treats rows of the batch apart; `constants` are all that do not depend on the inputs.

    Raises MixedRowsError that names the first operator which mixes rows, UnsupportedModelError where that is not known.
    """
    if graph.batched:
        walk = _Walk(graph, constants)
        for node in graph.nodes:
            walk.visit(node)
        walk.check_outputs()


@dataclass
class _Walk:
    """What is known so far: where each activation has the batch, and constants as a batch of WIDE_BATCH has them."""

    graph: Graph
    constants: Mapping[str, Array]

    def __post_init__(self) -> None:
        self.rows = {name: Rows(0) for name in self.graph.inputs}
        self.wide: dict[str, Array] = {}

    def visit(self, node: Node) -> None:
        """Follow one node. Raises UnsupportedModelError."""
        if all(name in self.constants for name in filter(None, node.outputs)):
            self._fold(node)
            return
        if node.operator not in RULES:
            raise node.unsupported(NOT_KNOWN)
        operands = tuple(self._operand(node, index, name) for index, name in enumerate(node.inputs))
        result = RULES[node.operator](self._describe(node, operands))
        places = result if isinstance(result, tuple) else (result,) * len(node.outputs)
        for name, place in zip(node.outputs, places, strict=False):
            if name:
                self._check_shape(node, name, place)
                self.rows[name] = place

    def check_outputs(self) -> None:
        """Raise UnsupportedModelError unless a batch of answers is one after the other."""
        for name in self.graph.outputs:
            producer = self.graph.producers().get(name)
            if producer and self.rows.get(name) != Rows(0):
                raise producer.mixed(f"they are not the first axis of its output '{name}'")

    def _fold(self, node: Node) -> None:
        """Find out what a constant would be in a larger batch, if it depends on that."""
        if node.operator == "Shape":
            begin, end = node.attributes.get("start", 0), node.attributes.get("end")
            shape = self.graph.wide_shapes.get(node.inputs[0])
            if shape is None:
                raise node.unsupported(f"the shape of '{node.inputs[0]}' is not known for all batches")
            found = {node.outputs[0]: np.array(shape[begin:end], np.int64)}
        elif any(name in self.wide for name in node.inputs):
            found = evaluate(node, {**self.constants, **self.wide}, self.graph.opset)
        else:
            return
        for name, value in found.items():
            if not np.array_equal(value, self.constants[name]):
                self.wide[name] = value

    def _operand(self, node: Node, index: int, name: str) -> Rows | None:
        if name in self.wide and index not in SHAPE_INPUTS.get(node.operator, ()):
            return self._rows_of_constant(node, name)
        return self.rows.get(name)

    def _rows_of_constant(self, node: Node, name: str) -> Rows:
        """Return the axis on which a constant of a larger batch repeats that of batch 1."""
        small, wide = self.constants[name], self.wide[name]
        axes = [axis for axis, n in enumerate(small.shape) if n == 1 and wide.shape[axis : axis + 1] == (WIDE_BATCH,)]
        if len(axes) != 1 or not np.array_equal(wide, np.broadcast_to(small, wide.shape)):
            raise node.mixed(f"the number '{name}' depends on how many there are")
        return Rows(axes[0])

    def _describe(self, node: Node, operands: tuple[Rows | None, ...]) -> Operands:
        known = {name: value.shape for name, value in self.constants.items() if name in node.inputs}
        shapes = [known.get(name) or self._shape(node, name) for name in node.inputs]
        values = tuple(self.constants.get(name) for name in node.inputs)
        wide_values = tuple(self.wide.get(name, self.constants.get(name)) for name in node.inputs)
        output = node.outputs[0]
        wide = self.graph.wide_shapes.get(output, ())
        return Operands(node, operands, tuple(shapes), values, wide_values, self._shape(node, output), wide)

    def _shape(self, node: Node, name: str) -> tuple[int, ...]:
        if not name or name in self.constants:
            return ()
        if name not in self.graph.types:
            raise node.unsupported(f"the shape of tensor '{name}' depends on data or cannot be inferred")
        return self.graph.types[name].shape

    def _check_shape(self, node: Node, name: str, place: Rows) -> None:
        """Compare the place with the inferred shapes: whatever a rule overlooks is likely to be seen here."""
        shape, wide = list(self._shape(node, name)), self.graph.wide_shapes.get(name)
        fits = place.axis < len(shape) and shape[place.axis] == place.before * place.after
        if fits:
            shape[place.axis] *= WIDE_BATCH
        if not fits or wide != tuple(shape):
            many = "an unknown shape" if wide is None else list(wide)
            raise node.unsupported(f"{NOT_KNOWN}: 1 gives {list(self._shape(node, name))}, {WIDE_BATCH} give {many}")
