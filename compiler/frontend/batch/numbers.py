"""Numbers of a tensor as polynomials of the batch size n and of a row's number b.

A row's tensor at batch size n is what the row's own data make of it, plus terms `C n^i b^j` with constant C: the shape
[n, 8] is [0, 8] + [1, 0] n, places in n rows of 8 numbers are [0 ... 7] + 8 b. The model is compiled at n = 1, b = 0.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from gangway.compiler.kernels.specs import Array

Powers = tuple[int, int]  # of n and of b
ROWS: Powers = (1, 0)
ROW: Powers = (0, 1)
_OWN: Powers = (0, 0)
MOST_FLOATS = 1 << 20  # of a constant whose numbers are looked at


class UndecidedError(Exception):
    """Numbers that are no polynomial, or a decision that differs from batch to batch; the message says why."""


@dataclass(frozen=True)
class AffineNumbers:
    """The own part lies between `low` and `high`, equal if it is constant; `terms` are the others, by their powers.

    All are float64, of shapes that can be repeated to the tensor's at batch 1. Where numbers depend on the batch in
    another way, `why_not` says why: only the tensor's shape may be used.
    """

    low: Array
    high: Array
    terms: Mapping[Powers, Array] = field(default_factory=dict)
    why_not: str = ""

    @property
    def own(self) -> Array | None:
        """The own part, None if it depends on data."""
        return self.low if np.array_equal(self.low, self.high) else None

    @property
    def constant(self) -> Array | None:
        """The numbers, None if they depend on data or on the batch."""
        return None if self.terms else self.own

    def each(self, change: Callable[[Array], Array]) -> "AffineNumbers":
        """Return the numbers in other places: `change` does the same to every part."""
        return _made(change(self.low), change(self.high), {powers: change(part) for powers, part in self.terms.items()})

    def at_one(self) -> Array:
        """Return what the terms are at n = 1, b = 0."""
        return np.asarray(sum((part for (_, row), part in self.terms.items() if not row), np.zeros(())))

    def with_own(self, own: Array) -> "AffineNumbers":
        """Return the same terms with a constant own part."""
        return replace(self, low=own, high=own)

    def span(self) -> tuple[Array, Array]:
        """Return bounds of the numbers in all rows of all batches."""
        if not self.terms:
            return self.low, self.high
        rest = _in_free_variables(self.terms)
        fixed, others = rest.pop(_OWN, np.zeros(())), list(rest.values())
        rises = np.logical_or.reduce(np.broadcast_arrays(*(part > 0 for part in others), np.zeros((), bool)))
        falls = np.logical_or.reduce(np.broadcast_arrays(*(part < 0 for part in others), np.zeros((), bool)))
        return (
            np.where(falls, -math.inf, self.low + fixed),
            np.where(rises, math.inf, self.high + fixed),
        )


UNKNOWN = AffineNumbers(np.array(-math.inf), np.array(math.inf))


def constant(value: Array) -> AffineNumbers:
    """Return what is known of a constant. A large one of floats is a weight, whose numbers are no places."""
    if value.dtype.kind not in "iufb" or (value.dtype.kind == "f" and value.size > MOST_FLOATS):
        return UNKNOWN
    numbers = value.astype(np.float64)
    return AffineNumbers(numbers, numbers) if np.isfinite(numbers).all() else UNKNOWN


def between(low: float, high: float) -> AffineNumbers:
    """Return numbers of which only these bounds are known."""
    return AffineNumbers(np.array(low, np.float64), np.array(high, np.float64))


def join(parts: Iterable[AffineNumbers], change: Callable[[list[Array]], Array]) -> AffineNumbers:
    """Return what `change` makes of several tensors, whose shapes are those at batch 1."""
    parts = list(parts)
    keys = {powers: None for part in parts for powers in part.terms}
    shapes = [part.low.shape for part in parts]
    terms = {
        powers: change([part.terms.get(powers, np.zeros(shape)) for part, shape in zip(parts, shapes, strict=True)])
        for powers in keys
    }
    return _made(change([part.low for part in parts]), change([part.high for part in parts]), terms)


def add(first: AffineNumbers, second: AffineNumbers) -> AffineNumbers:
    """Return the sum."""
    terms = dict(first.terms)
    for powers, part in second.terms.items():
        terms[powers] = terms[powers] + part if powers in terms else part
    return _made(first.low + second.low, first.high + second.high, terms)


def negative(numbers: AffineNumbers) -> AffineNumbers:
    """Return the numbers with the other sign."""
    return _made(-numbers.high, -numbers.low, {powers: -part for powers, part in numbers.terms.items()})


def subtract(first: AffineNumbers, second: AffineNumbers) -> AffineNumbers:
    """Return the difference."""
    return add(first, negative(second))


def multiply(first: AffineNumbers, second: AffineNumbers) -> AffineNumbers:
    """Return the product. Raises UndecidedError if data and the batch are multiplied."""
    for data, other in ((first, second), (second, first)):
        if data.own is None and other.terms:
            raise UndecidedError("data are multiplied by a number that depends on how many rows there are")
    terms: dict[Powers, Array] = {}
    for (one, left), (two, right) in product(_parts(first), _parts(second)):
        powers = (one[0] + two[0], one[1] + two[1])
        terms[powers] = terms[powers] + left * right if powers in terms else left * right
    own = terms.pop(_OWN, np.zeros(()))
    if first.own is not None and second.own is not None:
        return _made(own, own, terms)
    corners = [_finite_product(a, b) for a in (first.low, first.high) for b in (second.low, second.high)]
    return _made(np.minimum.reduce(corners), np.maximum.reduce(corners), terms)


def divide(first: AffineNumbers, second: AffineNumbers, whole: bool) -> AffineNumbers:
    """Return the quotient, rounded to zero if `whole`. Raises UndecidedError where that is no polynomial."""
    if second.terms:
        return _divide_by_batch(first, second)
    divisor = _constant_divisor(second)
    if not whole:
        if (divisor < 0).any():
            raise UndecidedError("the divisor is negative")
        return first.each(lambda part: part / divisor)
    if not first.terms and first.own is not None:
        return constant(np.trunc(first.own / divisor))
    _require_multiples(first, divisor)
    if (divisor < 0).any() or (first.low < 0).any() or (first.span()[0] < 0).any():
        raise UndecidedError("what is divided may be negative")
    return _made(
        np.floor(first.low / divisor),
        np.floor(first.high / divisor),
        {powers: part / divisor for powers, part in first.terms.items()},
    )


def remainder(first: AffineNumbers, second: AffineNumbers) -> AffineNumbers:
    """Return the remainder, which has the divisor's sign. Raises UndecidedError where that is not known."""
    divisor = _constant_divisor(second)
    if (divisor < 0).any():
        raise UndecidedError("the divisor is negative")
    _require_multiples(first, divisor)
    if first.own is not None:
        return constant(np.mod(first.own, divisor))
    inside = (first.low >= 0) & (first.high < divisor)
    return AffineNumbers(np.where(inside, first.low, 0), np.where(inside, first.high, divisor - 1))


def sign_of_difference(first: AffineNumbers, second: AffineNumbers) -> tuple[Array, Array]:
    """Return bounds of first - second, in all rows of all batches."""
    return subtract(first, second).span()


def select(chosen: Array, first: AffineNumbers, second: AffineNumbers) -> AffineNumbers:
    """Return the first where `chosen`, the second elsewhere."""
    return join_repeated((first, second), lambda parts: np.where(chosen, parts[0], parts[1]))


def join_repeated(parts: tuple[AffineNumbers, AffineNumbers], change: Callable[[list[Array]], Array]) -> AffineNumbers:
    """Return what `change` makes of two tensors, whose axes it repeats as operators do."""
    keys = {powers: None for part in parts for powers in part.terms}
    terms = {powers: change([part.terms.get(powers, np.zeros(())) for part in parts]) for powers in keys}
    return _made(change([part.low for part in parts]), change([part.high for part in parts]), terms)


def either(first: AffineNumbers, second: AffineNumbers) -> AffineNumbers:
    """Return one or the other, as data say. Raises UndecidedError unless both depend on the batch alike."""
    difference = subtract(first, second)
    if difference.terms:
        raise UndecidedError("data decide between numbers that depend on the batch in two ways")
    low, high = np.minimum(first.low, second.low), np.maximum(first.high, second.high)
    return _made(low, high, first.terms)


def _made(low: Array, high: Array, terms: Mapping[Powers, Array]) -> AffineNumbers:
    """Return the numbers without terms that are 0."""
    return AffineNumbers(np.asarray(low), np.asarray(high), {key: part for key, part in terms.items() if np.any(part)})


def _parts(numbers: AffineNumbers) -> list[tuple[Powers, Array]]:
    """Return all constant parts; the own one counts as 0 if it depends on data."""
    own = numbers.own
    return [*numbers.terms.items(), *([(_OWN, own)] if own is not None else [])]


def _finite_product(first: Array, second: Array) -> Array:
    """Return the product, 0 where a factor is 0 and the other infinite."""
    with np.errstate(invalid="ignore"):
        found = np.multiply(first, second)
    return np.where((first == 0) | (second == 0), 0, found)


def _constant_divisor(numbers: AffineNumbers) -> Array:
    divisor = numbers.constant
    if divisor is None or not divisor.all():
        raise UndecidedError("the divisor depends on data or on the batch, or is 0")
    return divisor


def _require_multiples(numbers: AffineNumbers, divisor: Array) -> None:
    if any(np.mod(part, divisor).any() for part in numbers.terms.values()):
        raise UndecidedError("a number that depends on the batch is no multiple of the divisor")


def _divide_by_batch(first: AffineNumbers, second: AffineNumbers) -> AffineNumbers:
    """Return the quotient where each divisor is a constant, or a constant multiple of one power, as is the dividend."""
    error = UndecidedError("it divides by the number of rows")
    if len(second.terms) != 1 or second.own is None or first.own is None:
        raise error
    ((powers, divisor),) = second.terms.items()
    is_power, own = divisor != 0, second.own
    if (is_power & ((own != 0) | (first.own != 0))).any() or (~is_power & (own == 0)).any():
        raise error
    terms = {_OWN: np.where(is_power, 0, first.own / np.where(is_power, 1, own))}
    for key, part in first.terms.items():
        if (~is_power & (part != 0)).any():
            raise error
        left = (key[0] - powers[0], key[1] - powers[1])
        quotient = np.where(is_power, part, 0) / np.where(is_power, divisor, 1)
        if quotient.any() and min(left) < 0:
            raise error
        terms[left] = terms[left] + quotient if left in terms else quotient
    if any((part % 1).any() for part in terms.values()):
        raise error
    own = terms.pop(_OWN)
    return _made(own, own, terms)


def _in_free_variables(terms: Mapping[Powers, Array]) -> dict[Powers, Array]:
    """Return the same polynomial of b and of m = n - 1 - b, which may both be any number from 0 on: of m^i b^j."""
    found: dict[Powers, Array] = {}
    for (rows, row), part in terms.items():
        for first, second in product(range(rows + 1), repeat=2):  # of n^i = (m + b + 1)^i
            if first + second <= rows:
                ways = math.comb(rows, first) * math.comb(rows - first, second)
                powers = (first, row + second)
                found[powers] = found.get(powers, np.zeros(())) + ways * part
    return found
