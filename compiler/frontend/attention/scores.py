"""What stands before the softmax of an attention: scale x Q K^T, what is added to it, and which keys are hidden."""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from gangway.compiler.frontend.attention.empty_rows import Mask, ZeroedRows
from gangway.compiler.frontend.graph import Editor, Node
from gangway.compiler.frontend.views import Run, View, merged, view_of, whole

HIDDEN = -1e30  # a score this low absorbs whatever is added to it
LOW = -1e4  # beside a score this low, exp of any that is no outlier gives 0
LOWERED = 1e21  # makes a low score absorb others, and keeps the order of low scores
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Bias:
    """A tensor that is added to the scores, after it has been multiplied by `factor`.

    `lead`: how it is repeated over all axes of the scores but the last two, in numbers.
    """

    name: str
    lead: tuple[Run, ...]
    per_query: bool
    factor: float = 1.0
    mask: Mask | None = None  # of what it is made, if it hides keys

    def hiding(self, editor: Editor) -> "Bias":
        """Return the same with minus infinity where it hides keys."""
        assert self.mask
        mask = replace(self.mask, hidden=-math.inf)
        return replace(self, name=mask.tensor(editor), mask=mask)


@dataclass(frozen=True)
class Scores:
    """softcap(scale x Q K^T) + biases. Factors between these and the softmax are taken up already.

    `lead` are the axes of Q K^T but the last two. `nodes` are new ones, which compute Q.
    """

    query: View
    key: View
    lead: Shape
    scale: float
    biases: tuple[Bias, ...] = ()
    softcap: float = 0.0
    nodes: tuple[Node, ...] = ()

    @property
    def full_scale(self) -> float:
        """The factor of the products of the tensors that queries and keys are views of."""
        return self.scale * self.query.scale * self.key.scale

    def plus(self, bias: Bias | None) -> "Scores | None":
        """Return them with one bias more."""
        return replace(self, biases=(*self.biases, bias)) if bias else None


def find_scores(editor: Editor, softmax: Node, choices: Collection[ZeroedRows]) -> Scores | None:
    """Return what a softmax reads; `choices` may read it, too. None if it is no score of an attention."""
    name = softmax.inputs[0]
    shape, reads = editor.shape(name), sum(choice.reads(editor, name) for choice in choices)
    return _Finder(editor, {name: 1 + reads}).scores(name, 1.0, shape) if shape else None


@dataclass(frozen=True)
class _Finder:
    """Looks for scores. `uses` says how often a tensor may be read, if not once."""

    editor: Editor
    uses: dict[str, int]

    def scores(self, name: str, factor: float, shape: Shape) -> Scores | None:
        """Return what the scores are, None if they are not known. `factor`: of all that comes after this tensor."""
        editor, node = self.editor, self.editor.producers.get(name)
        if node is None or editor.uses[name] != self.uses.get(name, 1) or editor.shape(name) != shape:
            return None
        match node.operator:
            case "MatMul":
                return self._product(node, factor, shape)
            case "Identity":
                return self.scores(node.inputs[0], factor, shape)
            case "Cast" if editor.is_float(name) and editor.is_float(node.inputs[0]):
                return self.scores(node.inputs[0], factor, shape)
            case "Reshape" | "Squeeze" | "Unsqueeze":
                before = editor.shape(node.inputs[0]) or ()
                return self.scores(node.inputs[0], factor, before) if before[-2:] == shape[-2:] else None
            case "Add":
                for x, added in (node.inputs, node.inputs[::-1]):
                    if found := self.scores(x, factor, shape):
                        return found.plus(self._bias(added, factor, shape))
            case "Sub":
                found = self.scores(node.inputs[0], factor, shape)
                return found.plus(self._bias(node.inputs[1], -factor, shape)) if found else None
            case "Where":
                return self._masked(node, factor, shape)
            case "Mul" | "Div":
                return self._scaled(node, factor, shape)
            case "Tanh":
                found = self.scores(node.inputs[0], 1.0, shape)
                if found and not found.biases and not found.softcap and factor > 0:
                    return replace(found, scale=found.scale * factor, softcap=factor)
        return None

    def _product(self, node: Node, factor: float, shape: Shape) -> Scores | None:
        query, key = (view_of(self.editor, item, scales=True, loose=True) for item in node.inputs)
        if query is None or key is None or not self.editor.is_float(key.root):
            return None  # products with constants are biases
        if query.root not in self.editor.constants and not self.editor.is_float(query.root):
            return None
        fits = min(len(query.axes), len(key.axes)) >= 2 and max(len(query.axes), len(key.axes)) == len(shape)
        return Scores(query, key, shape[:-2], factor) if fits else None

    def _scaled(self, node: Node, factor: float, shape: Shape) -> Scores | None:
        """By a number, or by a constant for each head."""
        editor = self.editor
        for x, other in (node.inputs, node.inputs[::-1]):
            value = editor.constants.get(other)
            if value is None or value.dtype != np.float32 or (node.operator == "Div" and x != node.inputs[0]):
                continue
            with np.errstate(divide="ignore"):
                value = 1 / value if node.operator == "Div" else value
            if value.size and (value > 0).all() and (value == value.flat[0]).all():
                return self.scores(x, factor * float(value.flat[0]), shape)
            if value.ndim >= 2 and value.shape[-2:] == (1, 1):
                return self._times(self.scores(x, factor, shape), value, node.outputs[0], shape)
        return None

    def _times(self, found: Scores | None, value: np.ndarray, name: str, shape: Shape) -> Scores | None:
        """Return scores with a factor of each head, by which queries are multiplied."""
        if found is None or found.biases or found.softcap or found.lead != shape[:-2]:
            return None
        source, editor = self.editor.producers.get(name), self.editor
        while source and source.operator != "MatMul":
            source = editor.producers.get(next(item for item in source.inputs if item not in editor.constants))
        query_shape = editor.shape(source.inputs[0]) if source else None
        if source is None or query_shape is None or len(query_shape) != len(shape):
            return None
        factors, output = editor.constant(f"{name}:factors", value), f"{name}:queries"
        scaled = editor.node("Mul", (source.inputs[0], factors), output, query_shape)
        return replace(found, query=whole(output, query_shape), nodes=(*found.nodes, scaled))

    def _masked(self, node: Node, factor: float, shape: Shape) -> Scores | None:
        """Scores where a mask says so, else the lowest number: the same as adding that number, or 0."""
        condition, chosen, otherwise = node.inputs
        for before, other, shown in ((chosen, otherwise, True), (otherwise, chosen, False)):
            value = self.editor.constants.get(other)
            if value is None or not value.size or not (value == value.flat[0]).all() or value.flat[0] > LOW:
                continue
            if found := self.scores(before, factor, shape):
                with np.errstate(over="ignore"):
                    hidden = float(np.float32(value.flat[0]) * np.float32(factor))
                mask = Mask.of(self.editor, condition, shown, hidden if hidden <= HIDDEN else hidden * LOWERED)
                name = mask.tensor(self.editor)
                bias = self._bias(name, 1.0, shape)
                return found.plus(replace(bias, mask=mask if bias.name == name else None) if bias else None)
        return None

    def _bias(self, name: str, factor: float, shape: Shape) -> Bias | None:
        """Return how a tensor is added to scores of a shape; None if it is not known."""
        editor = self.editor
        if name in editor.constants and not editor.constants[name].any():
            return Bias("", (), False)
        kind = editor.shape(name)
        if kind is None or len(kind) > len(shape) or (name not in editor.constants and not editor.is_float(name)):
            return None
        if not kind or kind[-1] != shape[-1]:  # the same for all keys, which may hide all
            zeros = editor.constant(f"{shape[-1]}:zeros", np.zeros(shape[-1], np.float32))
            wide, kind = f"{name}:by:{shape[-1]}", (*kind[:-1], shape[-1])
            if name in editor.constants:
                editor.constant(wide, editor.constants[name] + editor.constants[zeros])
            elif wide not in editor.producers:
                editor.share(editor.node("Add", (name, zeros), wide, kind))
            name = wide
        view = whole(name, kind).repeated(shape)
        if view is None:
            return None
        lead = merged(run for axis in view.axes[:-2] for run in axis)
        return Bias(name, lead, bool(view.axes[-2]) and view.axes[-2][0][1] > 0, factor)
