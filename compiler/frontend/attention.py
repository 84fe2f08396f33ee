"""Attention: two products of matrices and a softmax between them become one node.

Found from the Softmax on: what is added to the scores, hides or scales them, in any order; and how queries, keys,
values and the result are cut out of sequences, by any Reshape, Transpose, Split or Slice. The rest stays as it is.
"""

from dataclasses import dataclass, replace

import numpy as np

from gangway.compiler.frontend.graph import Editor, Node, Rule, number
from gangway.compiler.frontend.views import View, view_of, whole
from gangway.compiler.kernels.specs import MOST_LANES, Array, AttentionSpec, ScoreBias

MOST_BIASES = 2
HIDDEN = -1e30  # a score this low absorbs whatever is added to it
LAST_AXIS_OPSET = 13  # since then Softmax is over the last axis if it does not say which
Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Bias:
    """A tensor that is added to the scores, after it has been multiplied by `factor`."""

    name: str
    factor: float = 1.0


@dataclass(frozen=True)
class _Scores:
    """scale x Q K^T + biases. The products of `factor` and what stands in front of the softmax are taken up already."""

    query: View
    key: View
    scale: float
    biases: tuple[_Bias, ...]


@dataclass(frozen=True)
class _Heads:
    """How heads lie in a sequence: all channels of a position, number of positions, first channel."""

    root: str
    channels: int
    begin: int


def _find_attention(editor: Editor, softmax: Node) -> None:
    """Put a FusedAttention node in the place of an attention: q, k, v, up to two biases -> all heads side by side.

    Attributes: `spec`, and `parts`, for each of the three (channels of the tensor, number of the first that counts).
    """
    context = _product_of_shares(editor, softmax)
    shape = editor.shape(softmax.outputs[0])
    if context is None or shape is None:
        return
    scores = _scores(editor, softmax.inputs[0], 1.0, shape)
    value, result = view_of(editor, context.inputs[1]), _result(editor, context)
    if scores is None or value is None or result is None:
        return
    queries, keys = shape[-2:]
    heads, head_size = int(np.prod(shape[:-2])), value.shape[-1]
    key = replace(scores.key, shape=_swapped(scores.key.shape), strides=_swapped(scores.key.strides))
    found = [
        _heads(editor, view, heads, positions, head_size)
        for view, positions in ((scores.query, queries), (key, keys), (value, keys))
    ]
    if head_size % MOST_LANES or any(part is None or part.begin % MOST_LANES for part in found):
        return
    parts = [part for part in found if part]
    scale = scores.scale * scores.query.scale * scores.key.scale
    prepared = _biases(editor, result, replace(scores, scale=scale), (heads, queries, keys))
    if prepared is None:
        return
    added, names, kinds = prepared
    spec = AttentionSpec(heads, head_size, queries, keys, scale, kinds)
    attributes = {"spec": spec, "parts": tuple((part.channels, part.begin) for part in parts)}
    inputs = (*(part.root for part in parts), *names)
    editor.replace(result, [*added, Node(context.name, "FusedAttention", inputs, (result,), attributes)])


def _swapped(values: Shape) -> Shape:
    return (*values[:-2], values[-1], values[-2])


def _product_of_shares(editor: Editor, softmax: Node) -> Node | None:
    """Return the product of the softmax, over the last axis, with the values."""
    kind = editor.types.get(softmax.inputs[0])
    if kind is None or kind.dtype != "float32" or len(kind.shape) < 2:
        return None
    rank = len(kind.shape)
    name = softmax.outputs[0]
    while (
        editor.uses[name] == 1 and editor.readers[name] and editor.readers[name][0].operator in ("Identity", "Dropout")
    ):
        name = editor.readers[name][0].outputs[0]
    default = -1 if editor.graph.opset >= LAST_AXIS_OPSET else 1
    if softmax.attributes.get("axis", default) % rank != rank - 1 or editor.uses[name] != 1:
        return None
    context = editor.readers[name][0] if editor.readers[name] else None
    return context if context and context.operator == "MatMul" and context.inputs[0] == name else None


def _scores(editor: Editor, name: str, factor: float, shape: Shape) -> _Scores | None:
    """Return what the scores are; `factor` is that of all that comes after this tensor. None if they are not known."""
    node = editor.inner(name, "MatMul", "Add", "Sub", "Mul", "Div", "Where", "Identity")
    if node is None or editor.shape(name) != shape:
        return None
    match node.operator:
        case "MatMul":
            query, key = (view_of(editor, item, scales=True) for item in node.inputs)
            if query is None or key is None or not editor.is_float(query.root) or not editor.is_float(key.root):
                return None  # products with constants are biases
            fits = len(query.shape) == len(key.shape) == len(shape)
            return _Scores(query, key, factor, ()) if fits else None
        case "Identity":
            return _scores(editor, node.inputs[0], factor, shape)
        case "Add":
            for before, bias in (node.inputs, node.inputs[::-1]):
                if found := _scores(editor, before, factor, shape):
                    return replace(found, biases=(*found.biases, _Bias(bias, factor)))
        case "Where":
            return _masked(editor, node, factor, shape)
        case "Mul" | "Div":
            operands = editor.operands(node)
            if operands and operands[1] > 0 and not (node.operator == "Div" and operands[0] != node.inputs[0]):
                scale = 1 / operands[1] if node.operator == "Div" else operands[1]
                return _scores(editor, operands[0], factor * scale, shape)
    return None


def _masked(editor: Editor, node: Node, factor: float, shape: Shape) -> _Scores | None:
    """Scores where a constant mask says so, else the lowest number: the same as adding that number, or 0."""
    mask = editor.constants.get(node.inputs[0])
    _, chosen, otherwise = node.inputs
    for before, other, shown in ((chosen, otherwise, True), (otherwise, chosen, False)):
        hidden = editor.scalar(other)
        if mask is None or hidden is None or hidden > HIDDEN:
            continue
        if found := _scores(editor, before, factor, shape):
            value = np.where(mask == shown, np.float32(0), np.float32(hidden))
            name = editor.constant(f"{node.outputs[0]}:bias", value)
            return replace(found, biases=(*found.biases, _Bias(name, factor)))
    return None


def _heads(editor: Editor, view: View, heads: int, positions: int, head_size: int) -> _Heads | None:
    """Return where the heads are, if the view [.., heads, positions, head size] shows channels of a sequence."""
    size = int(np.prod(editor.shape(view.root) or ()))
    if not editor.is_float(view.root) or int(np.prod(view.shape)) != heads * positions * head_size:
        return None
    channels = size // positions
    expected = View("", (heads, positions, head_size), (head_size, channels, 1))
    if size % positions or view.long_axes() != expected.long_axes():
        return None
    fits = view.offset + heads * head_size <= channels
    return _Heads(view.root, channels, view.offset) if fits else None


def _result(editor: Editor, context: Node) -> str | None:
    """Return the tensor in which the heads of each position lie side by side."""
    name = context.outputs[0]
    shape = editor.shape(name)
    if shape is None or len(shape) < 2:
        return None
    heads, (queries, head_size) = int(np.prod(shape[:-2])), shape[-2:]
    wanted = View("", (queries, heads, head_size), (head_size, queries * head_size, 1)).long_axes()
    current = name
    for _ in range(4):
        found = editor.shape(current)
        view = _from(editor, current, name)
        if found is None or view is None:
            return None
        if view.long_axes() == wanted:
            return current
        if editor.uses[current] != 1 or not editor.readers[current]:
            return None
        current = editor.readers[current][0].outputs[0]
    return None


def _from(editor: Editor, name: str, root: str) -> View | None:
    """Return a tensor as a view of `root`."""
    if name == root:
        return whole(root, editor.shape(root) or ())
    view = view_of(editor, name)
    return view if view and view.root == root and view.offset == 0 else None


def _biases(
    editor: Editor, result: str, scores: _Scores, shape: Shape
) -> tuple[list[Node], tuple[str, ...], tuple[ScoreBias, ...]] | None:
    """Return what must be computed before, and the tensors that the kernel adds, constants of one kind summed up."""
    groups: dict[bool, list[str]] = {False: [], True: []}
    nodes: list[Node] = []
    for index, bias in enumerate(scores.biases):
        kind = editor.shape(bias.name)
        if kind is None or not _broadcasts(kind, shape):
            return None
        scaled = bias.factor == scores.scale != 1
        name = bias.name
        if bias.factor != 1 and not scaled:
            name = _computed(editor, nodes, "Mul", f"{result}:factor{index}", name, number(bias.factor))
        groups[scaled].append(name)
    for scaled, names in groups.items():
        groups[scaled] = _summed(editor, nodes, f"{result}:{scaled}", names)
    while sum(map(len, groups.values())) > MOST_BIASES:
        longer = max(groups, key=lambda key: len(groups[key]))
        first, second, *others = groups[longer]
        name = _computed(editor, nodes, "Add", f"{result}:sum{len(nodes)}", first, second)
        groups[longer] = [name, *others]
    found = [(name, scaled) for scaled, names in groups.items() for name in names]
    kinds = tuple(_kind(editor.shape(name) or (), scaled) for name, scaled in found)
    return nodes, tuple(name for name, _ in found), kinds


def _summed(editor: Editor, nodes: list[Node], name: str, names: list[str]) -> list[str]:
    """Return the activations, and the sum of the constants."""
    constants = [editor.constants[item] for item in names if item in editor.constants]
    activations = [item for item in names if item not in editor.constants]
    if not constants:
        return activations
    with np.errstate(over="ignore"):
        total = sum(constants[1:], constants[0]).astype(np.float32)
    return [*activations, editor.constant(f"{name}:constant", total)]


def _computed(editor: Editor, nodes: list[Node], operator: str, output: str, x: str, other: str | Array) -> str:
    """Return x combined with another tensor or a constant: computed now if both are constant, else by a new node."""
    if not isinstance(other, str):
        other = editor.constant(f"{output}:operand", other)
    if x in editor.constants and other in editor.constants:
        assert operator == "Mul"
        with np.errstate(over="ignore"):
            return editor.constant(output, (editor.constants[x] * editor.constants[other]).astype(np.float32))
    shape = np.broadcast_shapes(editor.shape(x) or (), editor.shape(other) or ())
    nodes.append(editor.node(operator, (x, other), output, shape))
    return output


def _broadcasts(kind: Shape, shape: Shape) -> bool:
    """Whether a tensor has a number for each key, and repeats itself over heads or queries only as a whole."""
    return _aligned(kind, shape) is not None


def _aligned(kind: Shape, shape: Shape) -> Shape | None:
    """Return [heads or 1, queries or 1, keys] of a tensor that is added to scores of `shape`."""
    rank = max(3, len(kind))
    full = (*(1 for _ in range(rank - len(kind))), *kind)
    heads, queries, keys = int(np.prod(full[:-2])), full[-2], full[-1]
    fits = heads in (1, shape[0]) and queries in (1, shape[1]) and keys == shape[2]
    return (heads, queries, keys) if fits else None


def _kind(kind: Shape, scaled: bool) -> ScoreBias:
    full = (*(1 for _ in range(max(0, 3 - len(kind)))), *kind)
    return ScoreBias(int(np.prod(full[:-2])) > 1, full[-2] > 1, scaled)


ATTENTION = Rule(("Softmax",), _find_attention)
