"""8-bit numbers behind float32 ones: weights that are integers times a scale, scales and zero points of activations."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gangway.compiler.frontend.patterns import erf
from gangway.compiler.kernels.specs import Activation, ActivationName, Array

MOST = 127  # of a weight
_LIKELY_MOST = (MOST, MOST - 1, 64, 63)  # of 8 bits, and of 7
TOLERANCE = 5e-4  # of a number in steps of the scale; 127 of them are exact to 1e-5 in float32
CHUNK = 1 << 15  # weights that are looked at together
MOST_BIAS = float(1 << 30)
STEPS = 256
_OFFSETS = {"quantise_uint8": 0, "quantise_int8": 128}


@dataclass(frozen=True)
class Quantisation:
    """What q from 0 to 255 stands for: (q - zero) scale."""

    scale: float
    zero: int

    @property
    def values(self) -> Array:
        """Of every q, as float32."""
        return np.asarray((np.arange(STEPS) - self.zero).astype(np.float32) * np.float32(self.scale))

    @property
    def limits(self) -> list[float]:
        """Least and largest q less the zero point, and that."""
        return [-float(self.zero), float(STEPS - 1 - self.zero), float(self.zero)]

    def quantise(self, values: Array) -> Array:
        """The nearest q of float32 numbers."""
        steps = np.rint(values.astype(np.float32) / np.float32(self.scale)) + self.zero
        return np.asarray(np.clip(np.nan_to_num(steps, nan=0.0), 0, STEPS - 1).astype(np.uint8))


def quantisation(name: str, parameters: tuple[Any, ...]) -> Quantisation | None:
    """Return that of an activation function with this name, if it is one."""
    offset = _OFFSETS.get(name)
    return None if offset is None else Quantisation(float(parameters[0]), int(parameters[1]) + offset)


def integer_weights(weights: Array) -> tuple[Array, Array] | None:
    """Return int8 weights and the float32 scale of each output, their first axis; None if they are no such products.

    The scale is that of the file, if products with it are the weights.
    """
    rows = weights.reshape(len(weights), -1)
    peak = int(np.abs(rows).max(1).argmax())  # whose scale is, if there is one for all, that of all
    count = max(1, min(len(rows), rows.size // CHUNK)) if _integer_rows(rows[peak : peak + 1]) else 1
    parts = []
    for part in np.array_split(rows, count):
        if (found := _integer_rows(part, hopeless=count == 1)) is None:
            return None
        parts.append(found)
    integers, scales = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return integers.reshape(weights.shape), _exact(scales.astype(np.float32), integers, rows)


def _exact(scales: Array, integers: Array, rows: Array) -> Array:
    """Return the scales, or those beside them where these alone make all products the numbers of their row."""
    inexact = np.flatnonzero(
        [np.any(line * scale != row) for line, scale, row in zip(integers, scales, rows, strict=True)]
    )
    for index in inexact:
        for other in np.nextafter(scales[index], np.array([0, np.inf], np.float32)):
            if np.array_equal(integers[index] * other, rows[index]):
                scales[index] = other
    return scales


def _integer_rows(rows: Array, hopeless: bool = True) -> tuple[Array, Array] | None:
    """The same of a matrix; `hopeless`: if no row is one of integers with the most likely scales."""
    largest = np.abs(rows).max(1).astype(np.float64)
    scales, integers = np.ones(len(rows)), np.zeros(rows.shape, np.int8)
    left = np.flatnonzero(largest)
    if not np.isfinite(largest).all():
        return None
    others = (most for most in range(MOST, 0, -1) if most not in _LIKELY_MOST)
    for most in (*_LIKELY_MOST, *others):
        if not len(left):
            break
        scale = largest[left] / most
        numbers = (rows if len(left) == len(rows) else rows[left]) / scale[:, None].astype(np.float32)
        nearest = np.rint(numbers)
        fits = np.abs(np.subtract(numbers, nearest, out=numbers), out=numbers).max(1) <= TOLERANCE
        integers[left[fits]], scales[left[fits]] = nearest[fits], scale[fits]
        left = left[~fits]
        if hopeless and most == _LIKELY_MOST[-1] and len(left) == len(rows):  # float32 weights, almost certainly
            return None
    return None if len(left) else (integers, scales)


def integer_bias(bias: Array, steps: Array) -> Array | None:
    """Return the bias in steps of the sums' scale, rounded; None if it is too large."""
    numbers = np.rint(bias.astype(np.float64) / steps)
    return numbers.astype(np.int64) if np.all(np.abs(numbers) < MOST_BIAS) else None


def activated(activation: Activation, x: Array) -> Array | None:
    """Return a function of float32 numbers as float32; None of one that is not known here."""
    if known := quantisation(activation.name, (activation.alpha, activation.beta)):
        return known.values[known.quantise(x)]
    function = _FUNCTIONS.get(activation.name)
    with np.errstate(all="ignore"):
        value = function and function(x.astype(np.float64), activation.alpha, activation.beta)
    return None if value is None else value.astype(np.float32)


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


_FUNCTIONS: dict[ActivationName, Callable[[Array, float, float], Array]] = {  # of x, alpha and beta
    "none": lambda x, alpha, beta: x,
    "clip": lambda x, alpha, beta: np.minimum(np.maximum(x, alpha), beta),
    "leaky_relu": lambda x, alpha, beta: np.where(x >= 0, x, alpha * x),
    "bounded_leaky_relu": lambda x, alpha, beta: np.maximum(np.where(x >= 0, x, alpha * x), beta),
    "sigmoid": lambda x, alpha, beta: _sigmoid(x),
    "swish": lambda x, alpha, beta: x * _sigmoid(x),
    "hard_sigmoid": lambda x, alpha, beta: np.clip(alpha * x + beta, 0, 1),
    "hard_swish": lambda x, alpha, beta: x * np.clip(alpha * x + beta, 0, 1),
    "tanh": lambda x, alpha, beta: np.tanh(x),
    "erf": lambda x, alpha, beta: erf(x),
    "gelu": lambda x, alpha, beta: x * (1 + erf(x / np.sqrt(2))) / 2,
}
