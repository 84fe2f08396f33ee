"""Attention: two products of matrices and a softmax between them become one node.

Found from the Softmax on, by what is computed: what is added to the scores, hides or scales them, in any order
(`scores.py`); what rows become whose keys are all hidden (`empty_rows.py`); and how queries, keys, values and
the result lie in tensors, by any view (`heads.py`). The rest stays as it is.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from gangway.compiler.frontend.attention.empty_rows import ZeroedRows
from gangway.compiler.frontend.attention.heads import Context, Heads, Tensors, arranged
from gangway.compiler.frontend.attention.scores import Bias, Scores, find_scores
from gangway.compiler.frontend.graph import Editor, Node, Rule, number
from gangway.compiler.frontend.views import View, divided, view_of
from gangway.compiler.kernels.attention_specs import AttentionSpec, EmptyRows, ScoreBias
from gangway.compiler.kernels.specs import Array

MOST_BIASES = 2
LAST_AXIS_OPSET = 13  # since then Softmax is over the last axis if it does not say which
_PASSED = ("Identity", "Dropout", "Reshape", "Squeeze", "Unsqueeze", "Cast")
Shape = tuple[int, ...]


def _find_attention(editor: Editor, softmax: Node) -> None:
    """Put a FusedAttention node in the place of an attention: q, k, v, up to two biases -> y.

    Attributes: `spec`; for each of the three the number, or channel, of the tensor with which it begins, `begins`; and
    which tensors of the four are images, `images`.
    """
    product = _product_of_shares(editor, softmax)
    shape = editor.shape(softmax.inputs[0])
    if product is None or shape is None:
        return
    scores = find_scores(editor, softmax, product.choices)
    value = product.values(editor)
    context = editor.shape(product.context.outputs[0])
    if scores is None or value is None or context is None or not editor.is_float(value.root):
        return
    found = _empty_rows(editor, product.choices, scores, softmax.inputs[0])
    if found is None:
        return
    empty_rows, scores = found
    tensors = _tensors(scores, value, context, shape)
    if tensors is None:
        return
    leads = [bias.lead for bias in scores.biases if bias.name]
    heads = arranged(editor, tensors, Context(product.context.outputs[0], product.is_turned), leads)
    if heads is None:
        return
    biases = _Biases(editor, heads, shape[-2:], scores).prepare()
    if biases is None:
        return
    queries, keys = shape[-2:]
    spec = AttentionSpec(
        heads.heads,
        heads.head_size,
        queries,
        keys,
        scores.full_scale,
        biases.kinds,
        windows=heads.windows,
        sharing=heads.sharing,
        value_size=0 if heads.value_size == heads.head_size else heads.value_size,
        softcap=scores.softcap,
        empty_rows=empty_rows,
        strides=heads.strides,
    )
    inputs = (*(view.root for view in tensors), *biases.names)
    attributes = {"spec": spec, "begins": heads.begins, "images": heads.images}
    attention = Node(product.context.name, "FusedAttention", inputs, (heads.result,), attributes)
    editor.replace(heads.result, [*scores.nodes, *biases.nodes, attention])


class _Product(NamedTuple):
    """The product of shares with values, or of both turned; `choices`: which shares are replaced by 0 before it."""

    context: Node
    choices: tuple[ZeroedRows, ...]
    is_turned: bool = False

    def values(self, editor: Editor) -> View | None:
        """Return the values [.., keys, channels]."""
        found = view_of(editor, self.context.inputs[1 - self.is_turned], loose=True)
        return _turned(found) if found and self.is_turned and len(found.axes) > 1 else found


def _product_of_shares(editor: Editor, softmax: Node) -> _Product | None:
    """Return the product of the softmax, over the last axis, with the values."""
    kind = editor.types.get(softmax.inputs[0])
    if kind is None or kind.dtype != "float32" or len(kind.shape) < 2:
        return None
    rank, shape = len(kind.shape), kind.shape
    default = -1 if editor.graph.opset >= LAST_AXIS_OPSET else 1
    if softmax.attributes.get("axis", default) % rank != rank - 1:
        return None
    name, choices = softmax.outputs[0], list[ZeroedRows]()
    while True:
        readers = editor.readers[name]
        if editor.uses[name] != len(readers) or not readers:  # an output, too
            return None
        choosing = next((node for node in readers if node.operator == "Where"), None)
        if choosing:
            choice = ZeroedRows.of_shares(editor, choosing, name)
            if choice is None or len(readers) != 1 + choice.reads(editor, name):
                return None
            choices.append(choice)
            name = choosing.outputs[0]
        elif len(readers) == 1 and readers[0].operator in _PASSED and readers[0].inputs[0] == name:
            name = readers[0].outputs[0]
            found = editor.types.get(name)
            if found is None or found.dtype != "float32" or found.shape[-2:] != shape[-2:]:
                return None
        elif len(readers) == 1 and readers[0].operator == "MatMul" and readers[0].inputs[0] == name:
            return _Product(readers[0], tuple(choices))
        else:
            context = _product_of_turned(editor, readers[0]) if len(readers) == 1 else None
            return _Product(context, tuple(choices), is_turned=True) if context else None


def _product_of_turned(editor: Editor, node: Node) -> Node | None:
    """Return the product of values [.., channels, keys] with shares that a node turns."""
    (name,), rank = node.outputs[:1], len(editor.shape(node.outputs[0]) or ())
    turns = node.operator == "Transpose" and rank > 1
    if not turns or list(node.attributes.get("perm", ())) != [*range(rank - 2), rank - 1, rank - 2]:
        return None
    readers = editor.readers[name]
    is_product = editor.uses[name] == len(readers) == 1 and readers[0].operator == "MatMul"
    return readers[0] if is_product and readers[0].inputs[1] == name else None


def _turned(view: View) -> View:
    return replace(view, axes=(*view.axes[:-2], view.axes[-1], view.axes[-2]))


def _empty_rows(
    editor: Editor, choices: tuple[ZeroedRows, ...], scores: Scores, name: str
) -> tuple[EmptyRows, Scores] | None:
    """Return what rows become whose keys are all hidden, and the scores, in which what hides them is minus infinity.

    None if shares are replaced by 0 for another reason. `name`: what the softmax reads.
    """
    result: EmptyRows = "nan"
    for choice in choices:
        condition = editor.constants.get(choice.condition)
        same_axes = editor.shape(choice.shares) == editor.shape(name)
        masks = [bias.mask for bias in scores.biases if bias.mask and same_axes and choice.is_of(bias.mask, editor)]
        added = [bias for bias in scores.biases if bias.name]
        sources = [name, *(bias.name for bias in added if len(added) == 1 and same_axes and bias.factor > 0)]
        if condition is not None and not (condition == choice.zero_where).any():
            continue
        if masks:
            biases = (bias.hiding(editor) if bias.mask in masks else bias for bias in scores.biases)
            scores = replace(scores, biases=tuple(biases))
        elif choice.where_nan(editor):
            result = "zero and nan"
            continue
        elif not any(choice.where_hidden(editor, source) for source in sources):
            return None
        result = "zero" if result == "nan" else result
    return result, scores


def _tensors(scores: Scores, value: View, context: Shape, shape: Shape) -> Tensors | None:
    """Return queries, keys and values [.., positions, channels], with as many axes in front as their products have."""
    query = scores.query.repeated((*scores.lead, *scores.query.shape[-2:]))
    key = scores.key.repeated((*scores.lead, *scores.key.shape[-2:]))
    value_ = value.repeated((*context[:-2], *value.shape[-2:]))
    if query is None or key is None or value_ is None or 0 in shape:
        return None
    return Tensors(query, _turned(key), value_)


class _Prepared(NamedTuple):
    """Nodes that are computed before, the tensors that the kernel adds, and what they are."""

    nodes: list[Node]
    names: tuple[str, ...]
    kinds: tuple[ScoreBias, ...]


class _Biases:
    """What the kernel adds to the scores: at most two tensors, [windows or 1][heads or 1][queries or 1][keys]."""

    def __init__(self, editor: Editor, heads: Heads, lengths: Shape, scores: Scores) -> None:
        self._editor, self._heads, self._lengths, self._scores = editor, heads, lengths, scores
        self._nodes: list[Node] = []

    def prepare(self) -> _Prepared | None:
        """Return them; None if one is repeated in another way."""
        groups: dict[bool, list[tuple[str, ScoreBias]]] = {False: [], True: []}
        for bias in self._scores.biases:
            if not bias.name:  # it is 0
                continue
            kind = self._kind(bias)
            if kind is None:
                return None
            name, kind = self._with_factor(bias, kind)
            groups[kind.scaled].append((name, kind))
        for scaled, group in groups.items():
            groups[scaled] = self._with_constants_summed(group)
        while sum(map(len, groups.values())) > MOST_BIASES:
            longer = max(groups.values(), key=len)
            longer[:2] = [self._sum(*longer[:2])]
        found = groups[False] + groups[True]
        return _Prepared(self._nodes, tuple(name for name, _ in found), tuple(kind for _, kind in found))

    def _kind(self, bias: Bias) -> ScoreBias | None:
        """Return along which axes a bias changes."""
        queries, keys = self._lengths
        axes = divided(bias.lead, (self._heads.windows, self._heads.heads))
        if axes is None or any(len(axis) > 1 for axis in axes):
            return None
        (window, head), row = ((axis[0][1] if axis else 0 for axis in axes), queries if bias.per_query else 1)
        unit = keys * row
        fits = head in (0, unit) and window in (0, unit * (self._heads.heads if head else 1))
        return ScoreBias(head > 0, bias.per_query, False, window > 0) if fits else None

    def _with_factor(self, bias: Bias, kind: ScoreBias) -> tuple[str, ScoreBias]:
        """Return a bias that is multiplied, by the kernel if its factor is that of the products."""
        if bias.factor == 1:
            return bias.name, kind
        if bias.factor == self._scores.full_scale and not self._scores.softcap:
            return bias.name, replace(kind, scaled=True)
        editor, name = self._editor, f"{bias.name}:times:{bias.factor!r}"
        if bias.name in editor.constants:
            with np.errstate(over="ignore"):
                return editor.constant(name, editor.constants[bias.name] * np.float32(bias.factor)), kind
        factor = editor.constant(f"{name}:factor", number(bias.factor))
        editor.share(editor.node("Mul", (bias.name, factor), name, editor.shape(bias.name) or ()))
        return name, kind

    def _with_constants_summed(self, group: list[tuple[str, ScoreBias]]) -> list[tuple[str, ScoreBias]]:
        """Sum up constants, unless the sum is larger than both and there is room for two."""
        constants = [item for item in group if item[0] in self._editor.constants]
        others = [item for item in group if item[0] not in self._editor.constants]
        while len(constants) > 1:
            kinds = [kind for _, kind in constants[:2]]
            if len(others) + len(constants) <= MOST_BIASES and _joined(*kinds) not in kinds:
                break
            constants[:2] = [self._sum(*constants[:2])]
        return others + constants

    def _sum(self, first: tuple[str, ScoreBias], second: tuple[str, ScoreBias]) -> tuple[str, ScoreBias]:
        editor, kind = self._editor, _joined(first[1], second[1])
        names = (first[0], second[0])
        if all(name in editor.constants for name in names):
            with np.errstate(over="ignore", invalid="ignore"):
                arrays = [self._array(*item) for item in (first, second)]
                return editor.constant(f"{':'.join(names)}:{self._heads.result}", arrays[0] + arrays[1]), kind
        shaped = [self._reshaped(*item) for item in (first, second)]
        output = f"{self._heads.result}:bias{len(self._nodes)}"
        self._nodes.append(editor.node("Add", (shaped[0], shaped[1]), output, self._shape(kind)))
        return output, kind

    def _shape(self, kind: ScoreBias) -> Shape:
        lengths = (self._heads.windows, self._heads.heads, *self._lengths)
        return tuple(
            n if there else 1
            for n, there in zip(lengths, (kind.per_window, kind.per_head, kind.per_query, True), strict=True)
        )

    def _array(self, name: str, kind: ScoreBias) -> Array:
        return self._editor.constants[name].reshape(self._shape(kind)).astype(np.float32)

    def _reshaped(self, name: str, kind: ScoreBias) -> str:
        """A bias by four axes."""
        editor, shape = self._editor, self._shape(kind)
        if editor.shape(name) == shape:
            return name
        output = f"{self._heads.result}:bias{len(self._nodes)}"
        if name in editor.constants:
            return editor.constant(output, self._array(name, kind))
        to = editor.constant(f"{output}:shape", np.array(shape))
        self._nodes.append(editor.node("Reshape", (name, to), output, shape))
        return output


def _joined(first: ScoreBias, second: ScoreBias) -> ScoreBias:
    return replace(
        first,
        per_window=first.per_window or second.per_window,
        per_head=first.per_head or second.per_head,
        per_query=first.per_query or second.per_query,
    )


ATTENTION = Rule(("Softmax",), _find_attention)
