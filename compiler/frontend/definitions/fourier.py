"""Fourier transforms of a known length as products with a constant matrix of cosines and sines.

A complex number is a last axis of two. A matrix takes n^2 multiplications where a fast transform takes n log n, but the
kernels of products are quick enough up to some thousand numbers.
"""

import numpy as np

from gangway.compiler.frontend.decompositions import Body, defines
from gangway.compiler.kernels.specs import Array

_MOST_NUMBERS = 1 << 23  # of a matrix: 32 MiB, as for 2048 real numbers and all frequencies
_AXIS_BY_INPUT = 20  # of DFT


@defines("DFT")
def dft(body: Body) -> None:
    """One product along an axis, which is moved to the end before, and back after."""
    x, shape = body.node.inputs[0], body.type(0).shape
    length, parts = body.value(1), shape[-1]
    given = body.value(2) if body.graph.opset >= _AXIS_BY_INPUT else np.array(body.attribute("axis", 1))
    axis = (-2 if given is None else int(given.item())) % len(shape)
    inverse, onesided = bool(body.attribute("inverse", 0)), bool(body.attribute("onesided", 0))
    if axis == len(shape) - 1 or (onesided and inverse != (parts == 2)):
        raise body.node.unsupported(f"axis {axis}, or one half of the transform of complex numbers")
    if onesided and inverse:
        count, made = body.type_of(body.node.outputs[0]).shape[axis], 1
        matrix = _matrix_of_half(body, shape[axis], count)
    else:
        count, made = shape[axis] if length is None else int(length.item()), 2
        matrix = _matrix(body, shape[axis], count, count // 2 + 1 if onesided else count, parts, inverse)
    order = [*(each for each in range(len(shape) - 1) if each != axis), axis, len(shape) - 1]
    last = order == sorted(order)
    turned = x if last else body.op("Transpose", x, perm=order)
    kept = [0] * (len(shape) - 2)  # lengths that stay, the batch among them
    product = body.op("MatMul", body.reshape(turned, [*kept, shape[axis] * parts]), body.constant(matrix))
    output = body.node.outputs[0]
    result = body.reshape(product, [*kept, matrix.shape[1] // made, made], output if last else "")
    if not last:
        body.op("Transpose", result, perm=[order.index(each) for each in range(len(shape))], output=output)


@defines("STFT")
def stft(body: Body) -> None:
    """A convolution of the signal with windowed waves; its stride is the step between frames."""
    x, shape = body.node.inputs[0], body.type(0).shape
    step, window, length = body.value(1), body.value(2) if len(body.node.inputs) > 2 else None, body.value(3)
    if step is None or len(shape) != 3 or shape[2] != 1 or (window is None and length is None):
        raise body.node.unsupported("a signal of complex numbers, or frames of unknown length")
    count = window.size if window is not None else int(length.item()) if length is not None else 0
    if length is not None and int(length.item()) != count:
        raise body.node.unsupported("a window of another length than frames have")
    bins = count // 2 + 1 if body.attribute("onesided", 1) else count
    matrix = _matrix(body, count, count, bins, 1, inverse=False)
    waves = matrix if window is None else matrix * window.astype(np.float32)[:, None]
    weights = np.ascontiguousarray(waves.T)[:, None]  # [2 bins, 1, length]
    line = body.reshape(x, [0, 1, shape[1]])
    found = body.op("Conv", line, body.constant(weights), kernel_shape=[count], strides=[int(step.item())])
    _, frames, inferred, _ = body.type_of(body.node.outputs[0]).shape
    if inferred != bins:  # onnx takes a node without the attribute for one of all frequencies
        raise body.node.unsupported(f"{inferred} frequencies were inferred, {bins} are computed")
    body.reshape(body.op("Transpose", found, perm=[0, 2, 1]), [0, frames, bins, 2], body.node.outputs[0])


def _matrix(body: Body, rows: int, count: int, bins: int, parts: int, inverse: bool) -> Array:
    """Return what multiplies `rows` numbers of one or two parts, [rows * parts, bins * 2], for a length of `count`.

    Numbers beyond that length count nothing. Raises UnsupportedModelError if it is too large, or not of float32.
    """
    if body.type(0).dtype != "float32" or not 0 < rows * parts * bins * 2 <= _MOST_NUMBERS:
        raise body.node.unsupported(f"{body.type(0).dtype}, or {rows} numbers")
    turns = np.outer(np.arange(rows), np.arange(bins)) % count / count
    angles = 2 * np.pi * (turns if inverse else -turns)
    cosines, sines = (wave * (np.arange(rows) < count)[:, None] for wave in (np.cos(angles), np.sin(angles)))
    real = np.stack([cosines, sines], -1)  # [rows, bins, 2]: of what a real number adds
    both = real if parts == 1 else np.stack([real, np.stack([-sines, cosines], -1)], 1)
    scaled = both / count if inverse else both
    return np.ascontiguousarray(scaled.reshape(rows * parts, bins * 2), np.float32)


def _matrix_of_half(body: Body, rows: int, count: int) -> Array:
    """Return what makes `count` real numbers of one half of their transform, [rows * 2, count].

    Raises UnsupportedModelError if there are more or fewer than one half, or as `_matrix` does.
    """
    if rows != count // 2 + 1:
        raise body.node.unsupported(f"{count} numbers of {rows} frequencies")
    whole = _matrix(body, rows, count, count, 2, inverse=True).reshape(rows, 2, count, 2)
    twice = [1 if row in (0, count - row) else 2 for row in range(rows)]  # the other half is the same, conjugated
    real = whole[..., 0] * np.array(twice, np.float32)[:, None, None]
    return np.ascontiguousarray(real.reshape(rows * 2, count))
