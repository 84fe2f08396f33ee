"""Shapes as onnxruntime computes them, for operators of which onnx's inference says otherwise, in some operator sets.

They are the only ones that count: kernels, buffers and answers have these shapes. A node whose shape no rule can tell
is one of unknown shape, so that onnxruntime computes it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from onnx import helper

from gangway.compiler.frontend.graph import TensorType
from gangway.compiler.kernels.specs import Array

Shape = tuple[int, ...]
_ENDS = (2**31 - 1, 2**63 - 1)  # of a Slice: to the end, in its direction


def has_rule(node: Any) -> bool:
    """Whether the shape of what a node computes follows from a rule of this file."""
    return node.domain in ("", "ai.onnx") and node.op_type in _RULES


def shape_by_rule(node: Any, types: Mapping[str, TensorType], values: Mapping[str, Array]) -> Shape | None:
    """Return the shape of a node's outputs; None if only onnxruntime can tell it.

    `types` are those of its inputs that are tensors, `values` those of its constant inputs. Raises KeyError if one that
    decides on the shape is not known.
    """
    attributes = {item.name: helper.get_attribute_value(item) for item in node.attribute}
    return _RULES[node.op_type](node, attributes, types, values)


def same_pads(size: int, reach: int, stride: int, is_lower: bool) -> tuple[int, int]:
    """Return the padding before and behind an axis with which a window stands at every `stride`-th place.

    Either is negative where the window is so short that no padding is needed.
    """
    total = (-(-size // stride) - 1) * stride + reach - size
    small, large = total // 2, total - total // 2
    return (large, small) if is_lower else (small, large)


def windows_along(size: int, reach: int, stride: int, pads: tuple[int, int], ceil_mode: bool) -> int:
    """Return how many places a pooling window has along an axis; less than 1 if there is none.

    With `ceil_mode` the last one may reach beyond the end, but it does not begin there.
    """
    span = size + sum(pads) - reach
    if not ceil_mode:
        return span // stride + 1
    steps = -(-span // stride)
    return steps if steps * stride >= size + pads[0] else steps + 1


def transposed_begin(mode: str, is_given: bool, pad: int, whole: int, length: int) -> int:
    """Return how much of the whole result of a transposed convolution is cut off before the wanted part of an axis.

    `is_given`: the node states the length, which may be a little more than the whole.
    """
    if not is_given and mode in ("NOTSET", "VALID"):
        return pad if mode == "NOTSET" else 0
    total = max(whole - length, 0)
    return total // 2 if mode == "SAME_UPPER" else total - total // 2


def _pooled(
    node: Any, attributes: Mapping[str, Any], types: Mapping[str, TensorType], values: Mapping[str, Array]
) -> Shape | None:
    shape, kernel = types[node.input[0]].shape, attributes["kernel_shape"]
    rank = len(kernel)
    strides, dilations = (attributes.get(name) or [1] * rank for name in ("strides", "dilations"))
    given, mode = attributes.get("pads") or [0] * (2 * rank), attributes.get("auto_pad", b"NOTSET")
    if len(shape) != rank + 2 or len(strides) != rank or len(dilations) != rank or len(given) != 2 * rank:
        return None
    lengths = []
    for axis, (size, length, stride) in enumerate(zip(shape[2:], kernel, strides, strict=True)):
        pads = (given[axis], given[axis + rank]) if mode == b"NOTSET" else (0, 0)
        if stride < 1 or length < 1:
            return None
        if mode in (b"SAME_UPPER", b"SAME_LOWER"):  # dilations do not count here
            pads = same_pads(size, length, stride, mode == b"SAME_LOWER")
        reach = (length - 1) * dilations[axis] + 1
        lengths.append(windows_along(size, reach, stride, pads, bool(attributes.get("ceil_mode", 0))))
        if min(pads) < 0 or lengths[-1] < 1 or size + sum(pads) < reach:
            return None
    return *shape[:2], *lengths


def _transposed(
    node: Any, attributes: Mapping[str, Any], types: Mapping[str, TensorType], values: Mapping[str, Array]
) -> Shape | None:
    shape, weights = types[node.input[0]].shape, types[node.input[1]].shape
    kernel, rank = weights[2:], len(shape) - 2
    strides, dilations = (attributes.get(name) or [1] * rank for name in ("strides", "dilations"))
    extra, wanted = attributes.get("output_padding") or [0] * rank, attributes.get("output_shape") or []
    pads, mode = attributes.get("pads") or [0] * (2 * rank), attributes.get("auto_pad", b"NOTSET")
    if {len(kernel), len(strides), len(dilations), len(extra), len(pads) // 2} != {rank}:
        return None
    lengths = []
    for axis in range(rank):
        size, stride, reach = shape[axis + 2], strides[axis], (kernel[axis] - 1) * dilations[axis] + 1
        whole = stride * (size - 1) + extra[axis] + reach
        length = whole - (pads[axis] + pads[axis + rank] if mode == b"NOTSET" else 0)
        if wanted:
            length = wanted[axis - rank]
        elif mode in (b"SAME_UPPER", b"SAME_LOWER"):
            length = min(whole, size * stride)
        if length < 1 or windows_along(max(length, whole), reach, stride, (0, 0), ceil_mode=False) != size:
            return None  # a convolution of the result has another size
        lengths.append(length)
    return shape[0], weights[1] * attributes.get("group", 1), *lengths


def _sliced(
    node: Any, attributes: Mapping[str, Any], types: Mapping[str, TensorType], values: Mapping[str, Array]
) -> Shape | None:
    shape = list(types[node.input[0]].shape)
    given: list[Any] = [values[name].reshape(-1).tolist() if name else None for name in node.input[1:]]
    if not given:  # before opset 10
        given = [attributes.get(name) for name in ("starts", "ends", "axes")]
    starts, ends, *more = given
    axes, steps = (*more, None, None)[:2]
    axes = list(range(len(starts))) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    if not len(starts) == len(ends) == len(axes) == len(steps) or 0 in steps:
        return None
    for axis, *ask in zip(axes, starts, ends, steps, strict=True):
        shape[axis] = len(slice_range(shape[axis], *ask))
    return tuple(shape)


def slice_range(length: int, start: int, end: int, step: int) -> range:
    """Return the places along an axis that a Slice takes, whose `end` may be the largest integer: all that is left."""
    begin = start + length if start < 0 else start
    last = end + length if end < 0 else end
    if step > 0:
        return range(min(max(begin, 0), length), min(max(last, 0), length), step)
    return range(min(max(begin, 0), length - 1), -1 if end in _ENDS else min(max(last, -1), length), step)


Rule = Callable[[Any, Mapping[str, Any], Mapping[str, TensorType], Mapping[str, Array]], Shape | None]
_RULES: dict[str, Rule] = {
    **dict.fromkeys(("MaxPool", "AveragePool", "LpPool"), _pooled),
    "ConvTranspose": _transposed,
    "Slice": _sliced,
}
