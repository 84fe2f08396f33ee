"""Where the heads of an attention lie: queries, keys, values and the result as parts of tensors.

Axes in front of positions and channels are windows and heads. Which of them are windows follows from how far neighbours
are apart: heads lie side by side in the channels of a position, windows one behind the other, each with positions of
its own. What lies in another way is read, or written, by its strides.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gangway.compiler.frontend.graph import Editor, Node
from gangway.compiler.frontend.views import Run, View, divided, merged, view_of, whole
from gangway.compiler.kernels.attention_specs import BLOCKED_HEADS, HeadStrides
from gangway.compiler.kernels.plain_specs import contiguous
from gangway.compiler.kernels.specs import MOST_LANES

_MOST_VIEWS = 4  # behind the result


class Tensors(NamedTuple):
    """Queries, keys and values [.., positions, channels of a head]."""

    query: View
    key: View
    value: View


@dataclass(frozen=True)
class Heads:
    """How many windows and heads there are; `result`: the tensor that is computed. `strides` are those of the spec."""

    windows: int
    heads: int
    sharing: int
    head_size: int
    value_size: int
    strides: tuple[HeadStrides, ...]
    result: str


def arranged(editor: Editor, tensors: Tensors, context: Node, biases: Sequence[tuple[Run, ...]]) -> Heads | None:
    """Return how the heads lie, with as many tensors in sequences of channels as possible; None if there is no way.

    `biases`: how they are repeated over windows and heads.
    """
    if any(len(axis) > 1 for view in tensors for axis in view.axes[-2:]):
        return None
    count = math.prod(tensors.query.shape[:-2])
    leads = [_lead(view) for view in tensors]
    found = [_arranged(editor, tensors, context, heads, count // heads) for heads in _counts(count, [*leads, *biases])]
    fitting = [heads for heads in found if heads and all(_fits(lead, heads) for lead in biases)]
    moved = context.outputs[0]  # the result is preferred in the order in which it is needed
    return max(fitting, key=lambda heads: (heads.result != moved, heads.strides.count(BLOCKED_HEADS)), default=None)


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


def _arranged(editor: Editor, tensors: Tensors, context: Node, heads: int, windows: int) -> Heads | None:
    placed = [_Placed.of(editor, view, heads, windows) for view in tensors]
    query, key, value = placed
    if query is None or key is None or value is None or query.sharing != 1 or key.sharing != value.sharing:
        return None
    if not query.is_sequence and query.strides[-1] != 1:
        return None
    value_size = tensors.value.shape[-1]
    shape = (windows, heads, tensors.query.shape[-2], value_size)
    result = _side_by_side(editor, context.outputs[0], shape)
    strides = [BLOCKED_HEADS if item.is_sequence else item.strides for item in (query, key, value)]
    return Heads(
        windows,
        heads,
        key.sharing,
        tensors.query.shape[-1],
        value_size,
        (*strides, BLOCKED_HEADS if result else contiguous(shape)),
        result or context.outputs[0],
    )


@dataclass(frozen=True)
class _Placed:
    """Where heads lie in one tensor. `sharing`: so many heads in a row are the same."""

    strides: HeadStrides
    sharing: int
    is_sequence: bool

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
        positions, channels = view.shape[-2:]
        strides = tuple(axis[0][1] if axis else 0 for axis in (window, head, *view.axes[-2:]))
        sequence = _is_sequence(editor, view, (windows, heads // sharing, positions, channels), strides)
        own = (*strides[:3], strides[3] if channels > 1 else 1)
        return _Placed(own, sharing, sequence)


def _is_sequence(editor: Editor, view: View, lengths: tuple[int, ...], strides: HeadStrides) -> bool:
    """Whether heads are channels of a sequence, side by side, window behind window."""
    windows, heads, positions, size = lengths
    channels, rest = divmod(math.prod(editor.shape(view.root) or ()), windows * positions)
    wanted = (positions * channels, size, channels, 1)
    in_order = all(n == 1 or step == want for n, step, want in zip(lengths, strides, wanted, strict=True))
    return in_order and not rest and view.offset % MOST_LANES == 0 and view.offset + heads * size <= channels


def _side_by_side(editor: Editor, context: str, shape: tuple[int, ...]) -> str | None:
    """Return the tensor in which the heads of each position of each window lie side by side; None if there is none."""
    windows, heads, positions, size = shape
    lengths = (windows, positions, heads, size)
    wanted = merged(zip(lengths, (heads * positions * size, size, positions * size, 1), strict=True))
    current = context
    for _ in range(_MOST_VIEWS):
        view = (
            whole(context, editor.shape(context) or ()) if current == context else view_of(editor, current, loose=True)
        )
        if view is None or view.root != context or view.offset:
            return None
        if view.runs == wanted:
            return current
        if editor.uses[current] != 1 or not editor.readers[current]:
            return None
        current = editor.readers[current][0].outputs[0]
    return None
