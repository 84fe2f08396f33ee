"""Tensors as strided views of others (Reshape, Transpose, Split, Slice, Gather), and copies of such views."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from gangway.compiler.frontend.graph import Editor, Node, Rule, single
from gangway.compiler.kernels.plain_specs import ELEMENT_TYPES, contiguous

Shape = tuple[int, ...]
Run = tuple[int, int]
"""Numbers at equal distances: how many, and the distance."""
_SAME_ORDER = ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Dropout")
VIEWS = (*_SAME_ORDER, "Transpose", "Split", "Slice", "Gather")
_CUTS = ("Slice", "Split")
_MOVES = ("Gather", "Transpose")


def merged(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Return the same places, in the same order, by as few runs as possible; the first run is the outermost."""
    found: list[Run] = []
    for length, stride in runs:
        if length == 1:
            continue
        if found and found[-1][1] == length * stride:
            found[-1] = (found[-1][0] * length, stride)
        else:
            found.append((length, stride))
    return tuple(found)


def divided(runs: Iterable[Run], lengths: Shape) -> tuple[tuple[Run, ...], ...] | None:
    """Return the runs of each axis of another shape with as many places; None if an axis would begin within a run."""
    rest, axes = list(merged(runs)), list[tuple[Run, ...]]()
    for length in reversed(lengths):
        axis: list[Run] = []
        while length > 1:
            inner, stride = rest.pop() if rest else (0, 0)
            if inner and length % inner == 0:
                axis.append((inner, stride))
                length //= inner  # noqa: PLW2901
            elif inner and inner % length == 0:
                axis.append((length, stride))
                rest.append((inner // length, stride * length))
                length = 1  # noqa: PLW2901
            else:
                return None
        axes.append(merged(reversed(axis)))
    return None if rest or 0 in lengths else tuple(reversed(axes))


@dataclass(frozen=True)
class View:
    """Numbers of the tensor `root` in another shape, times `scale`: the first one is number `offset`.

    Each axis is made of runs, the outermost first: one, unless neighbouring axes of other distances are seen as one.
    """

    root: str
    axes: tuple[tuple[Run, ...], ...]
    offset: int = 0
    scale: float = 1.0

    @property
    def shape(self) -> Shape:
        """Length of each axis."""
        return tuple(math.prod(length for length, _ in axis) for axis in self.axes)

    @property
    def strides(self) -> Shape | None:
        """Distance of neighbours along each axis; None if that of some axis is not the same everywhere."""
        if any(len(axis) > 1 for axis in self.axes):
            return None
        return tuple(axis[0][1] if axis else 1 for axis in self.axes)

    @property
    def runs(self) -> tuple[Run, ...]:
        """All numbers in their order."""
        return merged(run for axis in self.axes for run in axis)

    def reshaped(self, shape: Shape) -> "View | None":
        """Return the view of another shape; None if that needs a copy."""
        axes = divided(self.runs, shape)
        return None if axes is None else replace(self, axes=axes)

    def repeated(self, shape: Shape) -> "View | None":
        """Return the view repeated as a whole along axes, and along new ones in front; None if that is not possible."""
        more = len(shape) - len(self.axes)
        axes, lengths = ((),) * more + self.axes, (1,) * more + self.shape
        if more < 0 or 0 in lengths or any(full % length for full, length in zip(shape, lengths, strict=True)):
            return None
        pairs = zip(axes, lengths, shape, strict=True)
        return replace(self, axes=tuple(merged([(full // length, 0), *axis]) for axis, length, full in pairs))


def whole(name: str, shape: Shape) -> View:
    """Return the view of all of a tensor."""
    return View(name, tuple(merged([pair]) for pair in zip(shape, contiguous(shape), strict=True)))


def view_of(editor: Editor, name: str, scales: bool = False, loose: bool = False) -> View | None:
    """Return a tensor as a view of the first one that must be computed; None if its shape is not known.

    `scales`: a product with a constant number is taken as a view, too. `loose`: so are Expand and Tile, and axes may
    have several runs.
    """
    shape = editor.shape(name)
    if shape is None:
        return None
    node = editor.producers.get(name)
    found = _Viewer(editor, scales, loose).apply(node, name, shape) if node else None
    return found if found and (loose or found.strides is not None) else whole(name, shape)


@dataclass(frozen=True)
class _Viewer:
    """What is taken as a view."""

    editor: Editor
    scales: bool
    loose: bool

    def apply(self, node: Node, name: str, shape: Shape) -> View | None:
        """Return what a node makes of the tensor that it reads; None if it computes."""
        if node.operator in ("Mul", "Div") and self.scales:
            return self._scaled(node, shape)
        if node.operator in ("Expand", "Tile") and self.loose:
            source = self._source(node.inputs[0])
            return source.repeated(shape) if source else None
        if node.operator not in VIEWS:
            return None
        source = self._source(node.inputs[0])
        if source is None:
            return None
        match node.operator:
            case "Transpose":
                order = node.attributes.get("perm", range(len(shape))[::-1])
                return replace(source, axes=tuple(source.axes[axis] for axis in order))
            case "Split":
                axis = single(node.attributes, "axis", 0, len(shape))
                before = [self.editor.shape(output) for output in node.outputs[: node.outputs.index(name)]]
                if not all(before):
                    return None
                return _cut(source, axis, sum(part[axis] for part in before if part), shape[axis])
            case "Gather":
                return _picked(self.editor, node, source, shape)
            case "Slice":
                return _sliced(self.editor, node, source, shape)
        return source.reshaped(shape)

    def _source(self, name: str) -> View | None:
        return view_of(self.editor, name, self.scales, self.loose)

    def _scaled(self, node: Node, shape: Shape) -> View | None:
        found = self.editor.operands(node)
        if found is None or (node.operator == "Div" and node.inputs[0] != found[0]):
            return None
        x, value = found
        source = self._source(x)
        if source is None or value == 0:
            return None
        kept = source if source.shape == shape else source.reshaped(shape)  # a constant of several axes adds some
        factor = 1 / value if node.operator == "Div" else value
        return replace(kept, scale=kept.scale * factor) if kept else None


def _cut(source: View, axis: int, begin: int, length: int) -> View | None:
    """A part of one axis."""
    runs = source.axes[axis]
    if begin == 0 and length == source.shape[axis]:
        return source
    if len(runs) > 1 or length == 0:
        return None
    stride = runs[0][1] if runs else 0
    axes = (*source.axes[:axis], merged([(length, stride)]), *source.axes[axis + 1 :])
    return replace(source, axes=axes, offset=source.offset + begin * stride)


def _picked(editor: Editor, node: Node, source: View, shape: Shape) -> View | None:
    """One item of an axis."""
    axis, index = single(node.attributes, "axis", 0, len(source.axes)), editor.scalar(node.inputs[1])
    if index is None or 0 in source.shape:
        return None
    place, offset = int(index) % source.shape[axis], source.offset
    for length, stride in reversed(source.axes[axis]):
        place, digit = divmod(place, length)
        offset += digit * stride
    kept = ((),) * (len(shape) + 1 - len(source.axes))
    return replace(source, axes=(*source.axes[:axis], *kept, *source.axes[axis + 1 :]), offset=offset)


def _sliced(editor: Editor, node: Node, source: View, shape: Shape) -> View | None:
    values = [editor.constants[item].ravel().tolist() for item in node.inputs[1:] if item in editor.constants]
    if len(values) != len(node.inputs) - 1 or len(values) < 2:
        return None
    starts, ends = values[0], values[1]
    axes = values[2] if len(values) > 2 else list(range(len(starts)))
    steps = values[3] if len(values) > 3 else [1] * len(starts)
    if any(step != 1 for step in steps) or len(ends) != len(axes):
        return None
    found: View | None = source
    for start, number in zip(starts, axes, strict=True):
        axis = number % len(shape)
        length = source.shape[axis]
        first = max(0, start + length) if start < 0 else min(start, length)
        found = _cut(found, axis, first, shape[axis]) if found else None
    return found


def _find_copies(editor: Editor, node: Node) -> None:
    """Put StridedCopy nodes where a tensor is cut by Slice or Split and then, perhaps, rearranged.

    Chains of nodes that only cut out and rearrange become one copy of what is needed in the end. Attributes: `strides`
    in the input, one for each axis of the output, and `offset`, in numbers.
    """
    needed = [name for name in node.outputs if name and _is_needed(editor, name)]
    copies = [_copy(editor, node, name) for name in needed]
    if copies and all(copies):
        editor.replace(node.outputs[0], [copy for copy in copies if copy])


def _is_needed(editor: Editor, name: str) -> bool:
    """Whether the tensor is an output, or a reader computes more than another view of it."""
    readers = editor.readers[name]
    return editor.uses[name] > len(readers) or not all(_looks(editor, reader) for reader in readers)


def _looks(editor: Editor, node: Node) -> bool:
    """Whether all that a node computes are views of something else."""
    views = [view_of(editor, name) for name in node.outputs if name]
    return node.operator in VIEWS and all(view and view.root not in node.outputs for view in views)


def _copy(editor: Editor, node: Node, name: str) -> Node | None:
    """Return the copy that makes a tensor from the one that it is cut out of."""
    view = view_of(editor, name)
    if (
        view is None
        or view.strides is None
        or view.root == name
        or view.root not in editor.types
        or not _is_worthwhile(editor, name, view.root)
    ):
        return None
    if editor.types[view.root].dtype not in ELEMENT_TYPES:
        return None
    attributes = {"strides": view.strides, "offset": view.offset}
    return Node(node.name, "StridedCopy", (view.root,), (name,), attributes)


def _is_worthwhile(editor: Editor, name: str, root: str) -> bool:
    """Whether a tensor is cut, and moved once more: single steps have kernels, or lie in place."""
    operators = []
    while name != root:
        operators.append(editor.producers[name].operator)
        name = editor.producers[name].inputs[0]
    return any(item in _CUTS for item in operators) and sum(item in (*_CUTS, *_MOVES) for item in operators) > 1


COPIES = Rule(VIEWS, _find_copies)
