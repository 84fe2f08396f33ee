"""Tensors as strided views of others (Reshape, Transpose, Split, Slice, Gather), and copies of such views."""

from dataclasses import dataclass, replace

from gangway.compiler.frontend.graph import Editor, Node, Rule, single
from gangway.compiler.kernels.plain_specs import ELEMENT_TYPES, contiguous

Shape = tuple[int, ...]
_SAME_ORDER = ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Dropout")
VIEWS = (*_SAME_ORDER, "Transpose", "Split", "Slice", "Gather")
_CUTS = ("Slice", "Split")
_MOVES = ("Gather", "Transpose")


@dataclass(frozen=True)
class View:
    """Number (i, j, ...) of a tensor is `scale` times number offset + i strides[0] + ... of the tensor `root`."""

    root: str
    shape: Shape
    strides: Shape
    offset: int = 0
    scale: float = 1.0

    def long_axes(self) -> tuple[tuple[int, int], ...]:
        """Length and stride of each axis, without those of length 1; neighbours that are one axis are merged."""
        axes: list[tuple[int, int]] = []
        for length, stride in zip(self.shape, self.strides, strict=True):
            if length == 1:
                continue
            if axes and axes[-1][1] == length * stride:
                axes[-1] = (axes[-1][0] * length, stride)
            else:
                axes.append((length, stride))
        return tuple(axes)

    def reshaped(self, shape: Shape) -> "View | None":
        """Return the view of another shape; None if that needs a copy."""
        axes, strides = list(self.long_axes()), []
        for length in reversed(shape):
            if length == 1:
                strides.append(1)
                continue
            inner, stride = axes.pop() if axes else (0, 0)
            if not inner or inner % length:
                return None
            strides.append(stride)
            if inner > length:
                axes.append((inner // length, stride * length))
        return replace(self, shape=shape, strides=tuple(reversed(strides)))


def whole(name: str, shape: Shape) -> View:
    """Return the view of all of a tensor."""
    return View(name, shape, contiguous(shape))


def view_of(editor: Editor, name: str, scales: bool = False) -> View | None:
    """Return a tensor as a view of the first one that must be computed; None if its shape is not known.

    `scales`: a product with a constant number is taken as a view, too.
    """
    shape = editor.shape(name)
    if shape is None:
        return None
    node = editor.producers.get(name)
    found = _apply(editor, node, name, shape, scales) if node else None
    return found or whole(name, shape)


def _apply(editor: Editor, node: Node, name: str, shape: Shape, scales: bool) -> View | None:
    """Return what a node makes of the tensor that it reads; None if it computes."""
    if node.operator in ("Mul", "Div") and scales:
        return _scaled(editor, node, shape)
    if node.operator not in VIEWS:
        return None
    source = view_of(editor, node.inputs[0], scales)
    if source is None:
        return None
    match node.operator:
        case "Transpose":
            order = node.attributes.get("perm", range(len(shape))[::-1])
            return replace(source, shape=shape, strides=tuple(source.strides[axis] for axis in order))
        case "Split":
            axis = single(node.attributes, "axis", 0, len(shape))
            before = [editor.shape(output) for output in node.outputs[: node.outputs.index(name)]]
            if not all(before):
                return None
            skipped = sum(part[axis] for part in before if part)
            return replace(source, shape=shape, offset=source.offset + skipped * source.strides[axis])
        case "Gather":
            return _picked(editor, node, source, shape)
        case "Slice":
            return _sliced(editor, node, source, shape)
    return source.reshaped(shape)


def _scaled(editor: Editor, node: Node, shape: Shape) -> View | None:
    found = editor.operands(node)
    if found is None or (node.operator == "Div" and node.inputs[0] != found[0]):
        return None
    x, value = found
    source = view_of(editor, x, scales=True)
    if source is None or source.shape != shape or value == 0:
        return None
    return replace(source, scale=source.scale * (1 / value if node.operator == "Div" else value))


def _picked(editor: Editor, node: Node, source: View, shape: Shape) -> View | None:
    """One item of an axis."""
    axis, index = single(node.attributes, "axis", 0, len(source.shape)), editor.scalar(node.inputs[1])
    if index is None:
        return None
    length, stride = source.shape[axis], source.strides[axis]
    kept = (1,) * (len(shape) + 1 - len(source.shape))
    strides = (*source.strides[:axis], *kept, *source.strides[axis + 1 :])
    return replace(source, shape=shape, strides=strides, offset=source.offset + int(index) % length * stride)


def _sliced(editor: Editor, node: Node, source: View, shape: Shape) -> View | None:
    values = [editor.constants[item].ravel().tolist() for item in node.inputs[1:] if item in editor.constants]
    if len(values) != len(node.inputs) - 1 or len(values) < 2:
        return None
    starts, ends = values[0], values[1]
    axes = values[2] if len(values) > 2 else list(range(len(starts)))
    steps = values[3] if len(values) > 3 else [1] * len(starts)
    if any(step != 1 for step in steps) or len(ends) != len(axes):
        return None
    offset = source.offset
    for start, axis in zip(starts, axes, strict=True):
        length = source.shape[axis]
        first = max(0, start + length) if start < 0 else min(start, length)
        offset += first * source.strides[axis]
    return replace(source, shape=shape, offset=offset)


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
