"""What becomes of a row of an attention whose keys are all hidden: its shares may be replaced by 0 behind the softmax.

Exporters write it in several ways: where a share is NaN, where all scores are minus infinity, where a mask hides the
key. What a condition on shares or scores says is found by computing it for a few rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gangway.compiler.errors import ModelError
from gangway.compiler.frontend.graph import Editor, Node, TensorType
from gangway.compiler.frontend.shape_inference import evaluate
from gangway.compiler.kernels.specs import Array

_MOST_NODES = 10  # of a condition
_READ = """
    And Cast Equal Greater GreaterOrEqual Identity IsInf IsNaN Less LessOrEqual Not Or ReduceMax ReduceMin ReduceSum
"""
_LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True)
class Mask:
    """A condition that shows keys, where it is `shown`, and hides the others by a low score."""

    condition: str
    shown: bool
    hidden: float

    @staticmethod
    def of(editor: Editor, condition: str, shown: bool, hidden: float) -> "Mask":
        """Return the mask, whose condition is no negation."""
        return Mask(*_without_negation(editor, condition, shown), hidden)

    def tensor(self, editor: Editor) -> str:
        """Return the tensor that is 0 where keys are shown; it is made once for all layers."""
        name = f"{self.condition}:{'shows' if self.shown else 'hides'}:{self.hidden!r}"
        condition = editor.constants.get(self.condition)
        if condition is not None:
            value = np.where(condition == self.shown, np.float32(0), np.float32(self.hidden))
            return editor.constant(name, value.astype(np.float32))
        values = (0.0, self.hidden) if self.shown else (self.hidden, 0.0)
        shape = editor.shape(self.condition) or ()
        editor.types.setdefault(self.condition, TensorType(shape, "bool"))
        numbers = [editor.constant(f"number:{value!r}", np.array(value, np.float32)) for value in values]
        editor.share(editor.node("Where", (self.condition, *numbers), name, shape))
        return name


@dataclass(frozen=True)
class ZeroedRows:
    """Shares are replaced by 0 where a condition is `zero_where`. `shares`: their name."""

    condition: str
    zero_where: bool
    shares: str

    @staticmethod
    def of_shares(editor: Editor, node: Node, shares: str) -> "ZeroedRows | None":
        """Return what a Where makes of shares; None if it is something else."""
        condition, chosen, otherwise = node.inputs
        for other, kept, zero_where in ((chosen, otherwise, True), (otherwise, chosen, False)):
            value = editor.constants.get(other)
            if kept == shares and value is not None and not value.any():
                return ZeroedRows(condition, zero_where, shares)
        return None

    def reads(self, editor: Editor, name: str) -> int:
        """Return how often the condition reads a tensor."""
        cone = _cone(editor, self.condition, name) or []
        return sum(item == name for node in cone for item in node.inputs)

    def is_of(self, mask: Mask, editor: Editor) -> bool:
        """Whether shares are replaced where a mask hides keys."""
        return _without_negation(editor, self.condition, not self.zero_where) == (mask.condition, mask.shown)

    def where_nan(self, editor: Editor) -> bool:
        """Whether rows are replaced whose shares are NaN, and no others."""
        keys = (editor.shape(self.shares) or (1,))[-1]
        one = np.zeros(keys)
        one[0] = 1
        rows = {0: np.full(keys, np.nan), 1: np.full(keys, 1 / keys), 2: one}
        return self._rows(editor, self.shares, list(rows.values())) == [True, False, False]

    def where_hidden(self, editor: Editor, scores: str) -> bool:
        """Whether rows are replaced whose scores, or biases, are minus infinity, and no others."""
        keys = (editor.shape(scores) or (1,))[-1]
        rows = [np.full(keys, value) for value in (-np.inf, 0.0, _LOWEST, 3.0, np.nan)]
        expected = [True, False, False, False, False]
        if keys > 1:
            for shown in (0, keys - 1):
                rows.append(np.where(np.arange(keys) == shown, -2.0, -np.inf))
                expected.append(False)
        return self._rows(editor, scores, rows) == expected

    def _rows(self, editor: Editor, source: str, rows: Sequence[Array]) -> list[bool] | None:
        """Return which rows are replaced, if the condition depends on `source` alone, row by row."""
        cone, kind = _cone(editor, self.condition, source), editor.shape(source)
        if not cone or not kind:
            return None
        sample = np.array(rows, np.float32).reshape(*(1 for _ in kind[:-2]), len(rows), kind[-1])
        values = {source: sample}
        for node in cone:
            operands = {name: values.get(name, _small(editor, name)) for name in node.inputs if name}
            found = {name: value for name, value in operands.items() if value is not None}
            if len(found) < len(operands) or not _along_rows(editor, node, len(kind)):
                return None
            try:
                values |= evaluate(node, found, editor.graph.opset)
            except ModelError:
                return None
        result = values[self.condition]
        if result.shape[:-1] != sample.shape[:-1]:
            return None
        zeros = (result == self.zero_where).reshape(len(rows), -1)
        return zeros.all(-1).tolist() if (zeros.all(-1) == zeros.any(-1)).all() else None


def _without_negation(editor: Editor, condition: str, value: bool) -> tuple[str, bool]:
    """Return the condition that a chain of Not begins with, and what it is where this one is `value`."""
    while node := editor.producer(condition, "Not", "Identity"):
        condition, value = node.inputs[0], value != (node.operator == "Not")
    return condition, value


def _cone(editor: Editor, end: str, source: str) -> list[Node] | None:
    """Return the nodes, in order, that compute a tensor from `source` and constants; None if there is more to it."""
    order: list[Node] = []

    def visit(name: str) -> bool:
        if not name or name == source or name in editor.constants or any(name in node.outputs for node in order):
            return True
        node = editor.producer(name, *_READ.split())
        if node is None or len(order) == _MOST_NODES or not all(visit(item) for item in node.inputs):
            return False
        order.append(node)
        return True

    return order if visit(end) and any(source in node.inputs for node in order) else None


def _small(editor: Editor, name: str) -> Array | None:
    """Return a constant of one axis, or a single number of it if all are equal."""
    value = editor.constants.get(name)
    if value is None or value.ndim <= 1 or value.size == 1:
        return value
    return value.reshape(-1)[:1].reshape((1,) * value.ndim) if (value == value.flat[0]).all() else None


def _along_rows(editor: Editor, node: Node, rank: int) -> bool:
    """Whether a node leaves rows apart: a reduction is over the last axis only."""
    if not node.operator.startswith("Reduce"):
        return True
    given = node.attributes.get("axes")
    if given is None and len(node.inputs) > 1 and node.inputs[1] in editor.constants:
        given = editor.constants[node.inputs[1]].ravel().tolist()
    return given is not None and [axis % rank for axis in given] == [rank - 1]
