"""Check that every row of a batch is computed by itself: only then may a model, read at batch 1, run row by row.

Two things are followed through the graph, for all batches at once. One is the place of the batch in a tensor's
row-major order: on which axis, and how many items of that axis stand before and after it ([N * 64, 768] has 64 after).
A Reshape keeps the order, a Transpose moves the axis, most operators must treat the axis as parallel:
`batch/rules.py`. The other is how numbers depend on the size of the batch n and on the row's number b: shapes do, and
places that are counted from the first row on. They are polynomials of n and b (`batch/numbers.py`), whose arithmetic is
in `batch/arithmetic.py`. Such numbers may make shapes, and pick what a row has itself (`batch/indices.py`). In the end
no number depends on them.

Shapes are also inferred at a second batch size, with which all that is found must agree.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gangway.compiler.frontend.batch.arithmetic import NUMBERS
from gangway.compiler.frontend.batch.bodies import BODIES, rows_of_results
from gangway.compiler.frontend.batch.numbers import ROWS, UNKNOWN, AffineNumbers, UndecidedError
from gangway.compiler.frontend.batch.places import NOT_KNOWN, BatchAxis, BatchedTensor, Operands
from gangway.compiler.frontend.batch.rules import ALWAYS_ASKED, RULES, SHAPE_INPUTS
from gangway.compiler.frontend.graph import WIDE_BATCH, Graph, Node
from gangway.compiler.kernels.specs import Array

_NO_TENSOR = BatchedTensor((), "")
_EXACT_BYTES = 4  # of an element type that can count the rows of any batch


def check_rows(graph: Graph, constants: Mapping[str, Array]) -> None:
    """Do nothing if the model treats rows of the batch apart; `constants` are all that do not depend on the inputs.

    Raises MixedRowsError that names the first operator which mixes rows, UnsupportedModelError where that is not known.
    """
    if graph.batched:
        known = {
            name: BatchedTensor(graph.types[name].shape, graph.types[name].dtype, BatchAxis(0)) for name in graph.inputs
        }
        walk = _Walk(graph, constants, known)
        walk.run()
        walk.check_outputs()


def _require_exact(numbers: AffineNumbers, tensor: BatchedTensor) -> None:
    """Raise UndecidedError for numbers that a larger batch may not have room for: as of one element type."""
    kind = np.dtype(tensor.dtype or "int64")
    if numbers.terms and (kind.itemsize < _EXACT_BYTES or (kind.kind == "f" and any(row for _, row in numbers.terms))):
        raise UndecidedError(f"a number that depends on the batch is {kind.name}, which is not exact for all batches")


def _follow(
    graph: Graph, constants: Mapping[str, Array], known: dict[str, BatchedTensor]
) -> Mapping[str, BatchedTensor]:
    """Return what is known of all tensors of a graph inside of a node."""
    walk = _Walk(graph, constants, dict(known))
    walk.run()
    return walk.known


@dataclass
class _Walk:
    """What is known so far of tensors: all that are computed from inputs, and constants that depend on the batch."""

    graph: Graph
    constants: Mapping[str, Array]
    known: dict[str, BatchedTensor]

    def run(self) -> None:
        """Follow all nodes. Raises UnsupportedModelError."""
        for node in self.graph.nodes:
            self._visit(node)

    def check_outputs(self) -> None:
        """Raise UnsupportedModelError unless a batch of answers is one after the other."""
        for name in self.graph.outputs:
            producer = self.graph.producers().get(name)
            if producer is None:
                continue
            found = self.known.get(name)
            if found is None or found.rows != BatchAxis(0):
                raise producer.mixed(f"they are not the first axis of its output '{name}'")
            if found.varies:
                why = found.numbers.why_not if found.numbers else ""
                raise producer.mixed(why or f"its output '{name}' depends on how many rows there are")

    def _visit(self, node: Node) -> None:
        names = [name for name in node.outputs if name]
        is_folded = all(name in self.constants for name in names)
        read = node.inputs[:1] if node.operator == "CastLike" else node.inputs  # the other one is a type
        tensors = tuple(self._tensor(name) for name in read)
        if node.operator in ("Shape", "Size"):
            self._measure(node, tensors[0])
            return
        depends = any(tensor.rows or tensor.varies for tensor in tensors)
        if is_folded and not depends:
            return
        if node.operator not in RULES and node.operator not in BODIES:
            raise node.unsupported(NOT_KNOWN)
        output = node.outputs[0]
        op = Operands(node, tensors, self._shape(node, output), self.graph.wide_shapes.get(output, ()))
        self._require_numbers(op)
        places = self._places(op)
        outputs = tuple(
            BatchedTensor(self._shape(node, name), self._dtype(name), place, value=self.constants.get(name))
            if name
            else _NO_TENSOR
            for name, place in zip(node.outputs, places, strict=False)
        )
        numbers = self._numbers(op, outputs)
        for name, tensor, found in zip(node.outputs, outputs, numbers, strict=False):
            if name:
                self._keep(node, name, replace(tensor, numbers=found))

    def _places(self, op: Operands) -> Sequence[BatchAxis | None]:
        """Return where the batch is in the outputs."""
        node, shapes = op.node, SHAPE_INPUTS.get(op.node.operator, ())
        if node.operator in BODIES:
            return rows_of_results(node, op.tensors, self.graph, _follow)
        varies = any(tensor.varies for index, tensor in enumerate(op.tensors) if index in shapes)
        is_asked = varies or any(op.rows) or node.operator in ALWAYS_ASKED
        result = RULES[node.operator](op) if is_asked else None
        return result if isinstance(result, tuple) else (result,) * len(node.outputs)

    def _require_numbers(self, op: Operands) -> None:
        """Raise MixedRowsError for a number that depends on the batch as this operator has no rule for."""
        shapes, has_rule = SHAPE_INPUTS.get(op.node.operator, ()), op.node.operator in NUMBERS
        for index, tensor in enumerate(op.tensors):
            is_read = index in shapes
            if tensor.varies and not (has_rule or is_read):
                raise op.mixed(f"the number '{op.node.inputs[index]}' depends on how many there are")
            if tensor.numbers and tensor.numbers.why_not and is_read:
                raise op.mixed(tensor.numbers.why_not)

    def _numbers(self, op: Operands, outputs: tuple[BatchedTensor, ...]) -> list[AffineNumbers]:
        """Return what is known of the outputs' numbers: of fractions only how they depend on the batch."""
        unknown, shapes = [UNKNOWN] * len(outputs), SHAPE_INPUTS.get(op.node.operator, ())
        varies = any(tensor.varies for tensor in op.tensors)
        counts = any(tensor.dtype and np.dtype(tensor.dtype).kind in "iub" for tensor in outputs)
        if op.node.operator not in NUMBERS or not (varies or counts or op.node.operator in ALWAYS_ASKED):
            return unknown
        try:
            if why := next((numbers.why_not for numbers in op.numbers if numbers.why_not), ""):
                raise UndecidedError(why)
            found = [*NUMBERS[op.node.operator](op, outputs), *unknown][: len(outputs)]
            is_made_of_them = any(tensor.varies for index, tensor in enumerate(op.tensors) if index not in shapes)
            if is_made_of_them and any(numbers is UNKNOWN for numbers in found):
                raise UndecidedError("it is not known how a number depends on the batch")
            for numbers, tensor in zip(found, outputs, strict=True):
                _require_exact(numbers, tensor)
            return found
        except UndecidedError as error:
            return [replace(UNKNOWN, why_not=str(error))] * len(outputs) if varies else unknown

    def _measure(self, node: Node, tensor: BatchedTensor) -> None:
        """Follow a Shape or a Size."""
        name = node.outputs[0]
        if name not in self.constants:
            raise node.unsupported(f"the shape of '{node.inputs[0]}' is not known for all batches")
        if tensor.rows is None:
            return
        value = self.constants[name]
        many = np.zeros(len(tensor.shape))
        many[tensor.rows.axis] = tensor.shape[tensor.rows.axis]
        if node.operator == "Size":
            many = value.astype(np.float64)
        else:
            many = many[node.attributes.get("start", 0) : node.attributes.get("end")]
        terms = {ROWS: many} if many.any() else {}
        self._keep(
            node, name, BatchedTensor(value.shape, value.dtype.name, None, AffineNumbers(value, value, terms), value)
        )

    def _keep(self, node: Node, name: str, tensor: BatchedTensor) -> None:
        """Remember a tensor, unless it is the same constant in all batches."""
        self._check_shape(node, name, tensor)
        if tensor.value is not None and tensor.numbers:
            if not tensor.rows and not tensor.varies:
                return
            if not tensor.numbers.why_not:
                own = tensor.value.astype(np.float64) - tensor.numbers.at_one()
                tensor = replace(tensor, numbers=tensor.numbers.with_own(own))
        self.known[name] = tensor

    def _tensor(self, name: str) -> BatchedTensor:
        if name in self.known:
            return self.known[name]
        if name in self.constants:
            value = self.constants[name]
            return BatchedTensor(value.shape, value.dtype.name, value=value)
        return _NO_TENSOR

    def _shape(self, node: Node, name: str) -> tuple[int, ...]:
        if not name:
            return ()
        if name in self.constants:
            return self.constants[name].shape
        if name not in self.graph.types:
            raise node.unsupported(f"the shape of tensor '{name}' depends on data or cannot be inferred")
        return self.graph.types[name].shape

    def _dtype(self, name: str) -> str:
        return self.constants[name].dtype.name if name in self.constants else self.graph.types[name].dtype

    def _check_shape(self, node: Node, name: str, tensor: BatchedTensor) -> None:
        """Compare the place with the inferred shapes: whatever a rule overlooks is likely to be seen here."""
        shape, wide, place = list(tensor.shape), self.graph.wide_shapes.get(name), tensor.rows
        fits = place is None or (place.axis < len(shape) and shape[place.axis] == place.before * place.after)
        if fits and place:
            shape[place.axis] *= WIDE_BATCH
        is_known = wide is not None or tensor.value is None
        if not fits or (is_known and wide != tuple(shape)):
            many = "an unknown shape" if wide is None else list(wide)
            raise node.unsupported(f"{NOT_KNOWN}: 1 gives {list(tensor.shape)}, {WIDE_BATCH} give {many}")
