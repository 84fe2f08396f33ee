"""Where the heads of an attention lie: queries, keys, values and the result as parts of tensors.

Axes in front of positions and channels are windows and heads. Which of them are windows follows from how far neighbours
are apart: heads lie side by side in the channels of a position, windows one behind the other, each with positions of
its own. What lies in another way is read, or written, by its strides.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gangway.compiler.frontend.graph import Editor
from gangway.compiler.frontend.views import Run, View, divided, merged, view_of, whole
from gangway.compiler.kernels.attention_specs import BLOCKED_HEADS, PLAIN_AXES, HeadStrides
from gangway.compiler.kernels.plain_specs import contiguous
from gangway.compiler.kernels.specs import MOST_LANES

_MOST_VIEWS = 6  # behind the result
_IMAGE_AXES = 4
_MOST_STEPS = 4  # of one number each, behind a dense layer
_DENSE = (
    "MatMul",
    "Gemm",
    "LayerNormalization",
    "RMSNormalization",
    "FusedAttention",
    "PackedMatMul",
    "QuantisedMatMul",
)


class Tensors(NamedTuple):
    """Queries, keys and values [.., positions, channels of a head]."""

    query: View
    key: View
    value: View


class Context(NamedTuple):
    """The product of shares and values, [.., positions, channels of a head]; `is_turned`: these two the other way."""

    name: str
    is_turned: bool


@dataclass(frozen=True)
class Heads:
    """How many windows and heads there are; `result`: the tensor that is computed. `strides` are those of the spec.

    `begins`: from which number, or channel, of their tensors queries, keys and values are. `images`: which of these and
    of the result are channels of an image, whose pixels are positions.
    """

    windows: int
    heads: int
    sharing: int
    head_size: int
    value_size: int
    strides: tuple[HeadStrides, ...]
    begins: tuple[int, ...]
    images: tuple[bool, ...]
    result: str


def arranged(editor: Editor, tensors: Tensors, context: Context, biases: Sequence[tuple[Run, ...]]) -> Heads | None:
    """Return how the heads lie, with as many tensors in sequences of channels as possible; None if there is no way.

    `biases`: how they are repeated over windows and heads.
    """
    if any(len(axis) > 1 for view in tensors for axis in view.axes[-2:]):
        return None
    count = math.prod(tensors.query.shape[:-2])
    leads = [_lead(view) for view in tensors]
    found = [_arranged(editor, tensors, context, heads, count // heads) for heads in _counts(count, [*leads, *biases])]
    fitting = [heads for heads in found if heads and all(_fits(lead, heads) for lead in biases)]

    def merit(heads: Heads) -> tuple[bool, int]:
        """The result is preferred in the order in which it is needed."""
        return heads.result != context.name, sum(len(steps) < PLAIN_AXES for steps in heads.strides)

    return max(fitting, key=merit, default=None)


def _fits(lead: tuple[Run, ...], heads: Heads) -> bool:
    axes = divided(lead, (heads.windows, heads.heads))
    return axes is not None and all(len(axis) <= 1 for axis in axes)


def _lead(view: View) -> tuple[Run, ...]:
    return merged(run for axis in view.axes[:-2] for run in axis)


def _counts(count: int, leads: Sequence[tuple[Run, ...]]) -> Iterator[int]:
    """Yield how many heads a window may have: products of the innermost runs; few windows first."""
    found = {1, count}
    for runs in leads:
        product = 1
        for length, _ in reversed(runs):
            product *= length
            found.add(product)
    return (number for number in sorted(found, reverse=True) if number and count % number == 0)


def _arranged(editor: Editor, tensors: Tensors, context: Context, heads: int, windows: int) -> Heads | None:
    placed = [_Placed.of(editor, view, heads, windows) for view in tensors]
    query, key, value = placed
    if query is None or key is None or value is None or query.sharing != 1 or key.sharing != value.sharing:
        return None
    if len(query.strides) == PLAIN_AXES and query.strides[-1] != 1:
        return None
    result = _Result.of(editor, context, (windows, heads, tensors.query.shape[-2], tensors.value.shape[-1]))
    if result is None:
        return None
    return Heads(
        windows,
        heads,
        key.sharing,
        tensors.query.shape[-1],
        tensors.value.shape[-1],
        (query.strides, key.strides, value.strides, result.strides),
        (query.begin, key.begin, value.begin),
        (query.is_image, key.is_image, value.is_image, result.is_image),
        result.name,
    )


@dataclass(frozen=True)
class _Placed:
    """Where heads lie in one tensor. `sharing`: so many heads in a row are the same."""

    strides: HeadStrides
    sharing: int
    begin: int
    is_image: bool = False

    @staticmethod
    def of(editor: Editor, view: View, heads: int, windows: int) -> "_Placed | None":
        axes = divided(_lead(view), (windows, heads))
        if axes is None or len(axes[0]) > 1 or len(axes[1]) > 2:
            return None
        sharing, (window, head) = 1, axes
        if head and head[-1][1] == 0:
            sharing, head = head[-1][0], head[:-1]
        if len(head) > 1:
            return None
        positions, size = view.shape[-2:]
        strides = tuple(axis[0][1] if axis else 0 for axis in (window, head, *view.axes[-2:]))
        lengths = (windows, heads // sharing, positions, size)
        if _is_sequence(editor, view, lengths, strides):
            return _Placed(_steps(lengths, strides[1]), sharing, view.offset)
        if _is_image(editor, view, lengths, strides):
            pixels = windows * positions
            return _Placed(_steps(lengths, strides[1] // pixels), sharing, view.offset // pixels, is_image=True)
        return _Placed((*strides[:3], strides[3] if size > 1 else 1), sharing, view.offset)


def _steps(lengths: tuple[int, ...], step: int) -> HeadStrides:
    """Return the strides of a blocked tensor with so many channels from a head to the next."""
    _, heads, _, size = lengths
    return BLOCKED_HEADS if heads == 1 or step == size else (step,)


def _is_image(editor: Editor, view: View, lengths: tuple[int, ...], strides: HeadStrides) -> bool:
    """Whether heads are channels of an image, whose pixels are positions, window behind window."""
    shape, (windows, heads, positions, size) = editor.shape(view.root) or (), lengths
    pixels = windows * positions
    if len(shape) != _IMAGE_AXES or shape[0] > 1 or math.prod(shape[2:]) != pixels:
        return False
    step = strides[1] // pixels if heads > 1 else size
    wanted = (positions, step * pixels, 1, pixels)
    in_order = all(n == 1 or stride == want for n, stride, want in zip(lengths, strides, wanted, strict=True))
    begin, rest = divmod(view.offset, pixels)
    whole = all(number % MOST_LANES == 0 for number in (begin, step, size))
    return in_order and whole and not rest and min(positions, size) > 1 and editor.is_float(view.root)


def _is_sequence(editor: Editor, view: View, lengths: tuple[int, ...], strides: HeadStrides) -> bool:
    """Whether heads are channels of a sequence, side by side, window behind window."""
    windows, heads, positions, size = lengths
    channels, rest = divmod(math.prod(editor.shape(view.root) or ()), windows * positions)
    step = strides[1] if heads > 1 else size
    wanted = (positions * channels, step, channels, 1)
    in_order = all(n == 1 or stride == want for n, stride, want in zip(lengths, strides, wanted, strict=True))
    if windows > 1 and heads == 1 and not _is_dense(editor, view.root):
        return False  # it is likely to be plain: a copy would gain nothing
    whole = all(number % MOST_LANES == 0 for number in (view.offset, step, size))
    return in_order and whole and not rest and view.offset + (heads - 1) * step + size <= channels


def _is_dense(editor: Editor, name: str) -> bool:
    """Whether a tensor is made by layers that compute sequences."""
    shape = editor.shape(name)
    for _ in range(_MOST_STEPS):
        node = editor.producers.get(name)
        if node is None or node.operator in _DENSE:
            return node is not None
        name = next((item for item in node.inputs if item in editor.types and editor.shape(item) == shape), "")
    return False


@dataclass(frozen=True)
class _Result:
    """The tensor that is computed: heads side by side if there is one behind the product, else the product itself."""

    name: str
    strides: HeadStrides
    is_image: bool = False

    @staticmethod
    def of(editor: Editor, context: Context, lengths: tuple[int, ...]) -> "_Result | None":
        windows, heads, positions, size = lengths
        plane = positions * size
        position, channel = (1, positions) if context.is_turned else (size, 1)
        runs = ((windows, heads * plane), (heads, plane), (positions, position), (size, channel))
        sequence, image = (merged(runs[axis] for axis in order) for order in ((0, 2, 1, 3), (1, 3, 0, 2)))
        views = list(_views_behind(editor, context.name))
        for name, found in views:
            shape = editor.shape(name) or ()
            is_image = len(shape) == _IMAGE_AXES and shape[:2] == (1, heads * size) and size % MOST_LANES == 0
            if found == image and is_image and positions > 1:
                return _Result(name, BLOCKED_HEADS, is_image=True)
        if name := next((view for view, found in views if found == sequence), ""):
            strides = (plane * heads, size, heads * size, 1) if size % MOST_LANES else BLOCKED_HEADS
            return _Result(name, strides)
        return None if context.is_turned else _Result(context.name, contiguous(lengths))


def _views_behind(editor: Editor, context: str) -> Iterator[tuple[str, tuple[Run, ...]]]:
    """Yield a tensor, then views of it, each the only reader of that before; and how its numbers lie in each."""
    current = context
    for _ in range(_MOST_VIEWS):
        view = (
            view_of(editor, current, loose=True) if current != context else whole(context, editor.shape(context) or ())
        )
        if view is None or view.root != context or view.offset:
            return
        yield current, view.runs
        if editor.uses[current] != 1 or not editor.readers[current]:
            return
        current = editor.readers[current][0].outputs[0]
