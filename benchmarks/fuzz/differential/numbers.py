"""Numbers to compute with: ordinary ones, and those at which implementations part."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_FLOATS: dict[str, list[float]] = {
    "nan": [np.nan],
    "infinite": [np.inf, -np.inf],
    "zeros": [0.0, -0.0],
    "halves": [0.5, -0.5, 1.5, -1.5, 2.5, -2.5, 3.5, 126.5, 127.5, 128.5, 254.5, 255.5, -128.5, -0.49999997],
    "large": [1e10, -1e10, 2.0**31, -(2.0**31), 2.0**32, 3e9, -3e9, 300.0, -300.0, 40000.0, -40000.0, 70000.0],
    "huge": [3.4e38, -3.4e38, 1e30, -1e30, 1e19, -1e19],
    "tiny": [1e-30, -1e-30, 1.2e-38, -1e-20, 1e-7, -1e-7],
    "ends": [1.0, -1.0, 2.0, -2.0, 88.0, 89.5, -88.0, -104.0, 10.0, -10.0, 3.0, -3.0, 6.0],
}
_ORDINARY = ("halves", "ends", "zeros")
_STRINGS = ["", "a", "b", "A", "aa", "0", "1", "-1", "1.5", "nan", "é", "ab c", "ÄÖ", "x" * 30]


def numbers(random: np.random.Generator, shape: Sequence[int], dtype: str, kind: str = "") -> Array:
    """Return numbers. Kinds: "plain", "finite" (odd, but neither infinite nor NaN), "sums" (without huge ones),
    "positive", "ties" (of few values), "unit" (in [-1, 1]); by default all are possible that the type has.
    """
    kind = kind or str(random.choice(["odd", "odd", "odd", "plain", "ties"]))
    if dtype == "bool":
        return np.asarray(random.random(shape) < random.choice([0.5, 0.5, 0, 1]))
    if dtype == "object":
        return np.asarray(random.choice(np.array(_STRINGS, object), shape), object)
    if np.dtype(dtype).kind == "f":
        with np.errstate(over="ignore"):
            return np.asarray(_floats(random, shape, kind), dtype)
    return _integers(random, shape, dtype, kind)


def _floats(random: np.random.Generator, shape: Sequence[int], kind: str) -> Array:
    if kind == "ties":
        return random.integers(-2, 3, shape) / 2.0
    values = np.asarray(random.standard_normal(shape) * random.choice([0.5, 1, 4]))
    if kind == "unit":
        return np.asarray(np.clip(values, -1, 1))
    if kind == "positive":
        return np.asarray(np.abs(values) + 0.1)
    families = {
        "plain": [],
        "sums": ["nan", "infinite", "zeros", "halves", "ends"],
        "finite": [*_ORDINARY, "large", "tiny"],
    }.get(kind, list(_FLOATS))
    if families:
        chosen = random.choice(families, random.integers(1, min(3, len(families)) + 1), replace=False)
        odd = np.array([value for name in chosen for value in _FLOATS[name]])
        where = random.random(shape) < random.choice([0.15, 0.5, 1.0])
        values = np.where(where, random.choice(odd, shape), values)
    return np.asarray(values)


def _integers(random: np.random.Generator, shape: Sequence[int], dtype: str, kind: str) -> Array:
    limits = np.iinfo(dtype)
    low = -4 if limits.min else 0
    values = random.integers(low, 6, shape)
    if kind in ("plain", "ties", "sums", "unit"):
        return np.asarray(values).astype(dtype)
    if kind == "positive":
        return np.asarray(random.integers(1, 6, shape)).astype(dtype)
    if kind == "finite":
        return random.integers(max(limits.min, -100), min(limits.max, 100), shape).astype(dtype)
    edges = np.array([limits.min, limits.max, limits.max - 1, limits.min + 1, 0, 1, limits.max // 2], dtype)
    where = random.random(shape) < random.choice([0.2, 0.6])
    return np.asarray(np.where(where, random.choice(edges, shape), values.astype(dtype))).astype(dtype)
