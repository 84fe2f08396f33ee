"""Kernel, stride, padding and dilation as ONNX's Conv and pooling operators state them."""

from dataclasses import dataclass

from gangway.compiler.graph import Node
from gangway.compiler.layers import Geometry
from gangway.compiler.specs import window_output

Pair = tuple[int, int]
Pads = tuple[int, int, int, int]


@dataclass(frozen=True)
class Window:
    """A window that slides over an image; pads are top, left, bottom, right, `ceil_pads` of them are ceil_mode's."""

    kernel: Pair
    stride: Pair
    pads: Pads
    dilation: Pair
    ceil_pads: Pair  # bottom, right


def window_of(node: Node, image: Geometry, kernel: Pair) -> Window:
    """Return the node's window with explicit padding; `ceil_mode` becomes padding at the bottom and right."""
    stride = _pair(node, "strides", (1, 1))
    dilation = _pair(node, "dilations", (1, 1))
    size = (image.height, image.width)
    pads = given = _pads(node, size, kernel, stride, dilation)
    if node.attributes.get("ceil_mode", 0):
        pads = _ceil_pads(size, kernel, stride, pads, dilation)
    if min(pads) < 0 or min(*kernel, *stride, *dilation) < 1:
        raise node.unsupported(f"kernel {kernel}, strides {stride}, pads {pads}, dilations {dilation}")
    if min(window_output(size, kernel, stride, pads, dilation)) < 1:
        raise node.unsupported(f"the image {size} is smaller than the window {kernel}")
    return Window(kernel, stride, pads, dilation, (pads[2] - given[2], pads[3] - given[3]))


def _pair(node: Node, name: str, default: Pair) -> Pair:
    values = tuple(node.attributes.get(name, default))
    if len(values) != 2:
        raise node.unsupported(f"{name} {values}: only images of two dimensions")
    return values


def _pads(node: Node, size: Pair, kernel: Pair, stride: Pair, dilation: Pair) -> Pads:
    mode = node.attributes.get("auto_pad", b"NOTSET").decode()
    if mode == "NOTSET":
        top, left, bottom, right = node.attributes.get("pads", (0, 0, 0, 0))
        return top, left, bottom, right
    if mode == "VALID":
        return 0, 0, 0, 0
    total = [
        max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0)
        for n, k, s, d in zip(size, kernel, stride, dilation, strict=True)
    ]
    small, large = [n // 2 for n in total], [n - n // 2 for n in total]
    first, last = (small, large) if mode == "SAME_UPPER" else (large, small)
    return first[0], first[1], last[0], last[1]


def _ceil_pads(size: Pair, kernel: Pair, stride: Pair, pads: Pads, dilation: Pair) -> Pads:
    """Return pads with which rounding down gives ceil_mode's output; no window begins in the padding at the end."""
    ends = list(pads[2:])
    for axis in range(2):
        reach = (kernel[axis] - 1) * dilation[axis] + 1
        span = size[axis] + pads[axis] + ends[axis] - reach
        steps = -(-span // stride[axis])
        if steps * stride[axis] >= size[axis] + pads[axis]:
            steps -= 1
        ends[axis] += max(steps * stride[axis] - span, 0)
    return pads[0], pads[1], ends[0], ends[1]
