"""Numbers that depend on the batch: arithmetic is that of polynomials, and bounds hold in all rows of all batches."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gangway.compiler.frontend.batch import numbers as of
from gangway.compiler.frontend.batch.numbers import ROW, ROWS, AffineNumbers, UndecidedError


def polynomial(own: Any, **terms: Any) -> AffineNumbers:
    """own + n_ n + b_ b + nb n b"""
    powers = {"n": ROWS, "b": ROW, "nb": (1, 1)}
    own = np.asarray(own, np.float64)
    return AffineNumbers(own, own, {powers[name]: np.asarray(part, np.float64) for name, part in terms.items()})


def at(numbers: AffineNumbers, n: int, b: int) -> Any:
    """The numbers in row b of n."""
    assert numbers.own is not None
    return numbers.own + sum(part * n ** powers[0] * b ** powers[1] for powers, part in numbers.terms.items())


SAMPLES = [
    polynomial([0, 1, 2], b=3),
    polynomial([5, 0, 2], n=[1, 0, 2]),
    polynomial(4),
    polynomial([[6], [3]], n=6, b=-3),
    polynomial(0, nb=1, b=2),
]


@pytest.mark.parametrize(
    ("make", "expected"),
    [(of.add, np.add), (of.subtract, np.subtract), (of.multiply, np.multiply)],
)
def test_arithmetic_is_that_of_every_row(make: Callable[..., AffineNumbers], expected: Callable[..., Any]) -> None:
    for first in SAMPLES:
        for second in SAMPLES:
            found = make(first, second)
            for n, b in ((1, 0), (4, 3), (9, 2)):
                np.testing.assert_array_equal(at(found, n, b), expected(at(first, n, b), at(second, n, b)))


@pytest.mark.parametrize("numbers", SAMPLES)
def test_bounds_hold_in_every_row_of_every_batch(numbers: AffineNumbers) -> None:
    low, high = numbers.span()
    for n in (1, 2, 5, 30):
        for b in range(n):
            assert (low <= at(numbers, n, b)).all()
            assert (at(numbers, n, b) <= high).all()


def test_the_last_row_is_one_less_than_the_number_of_rows() -> None:
    assert of.subtract(polynomial(-1, n=1), polynomial(0, b=1)).span() == (0, np.inf)


def test_data_keep_their_bounds_through_products() -> None:
    found = of.add(of.multiply(of.between(0, 4), polynomial(3)), polynomial([0, 1, 2], b=15))
    assert (found.low.tolist(), found.high.tolist()) == ([0, 1, 2], [12, 13, 14])
    assert found.terms[ROW] == 15


def test_quotients_and_remainders_of_what_a_row_has() -> None:
    places = of.add(of.between(0, 79), polynomial(0, b=80))
    row, place = of.divide(places, polynomial(80), whole=True), of.remainder(places, polynomial(80))
    assert (row.own, row.terms) == (0, {ROW: 1})
    assert (place.low, place.high, place.terms) == (0, 79, {})


def test_sizes_divided_by_sizes() -> None:
    found = of.divide(polynomial([0, 32, 64], n=[2, 0, 0]), polynomial([0, 16, 64], n=[1, 0, 0]), whole=False)
    assert found.own is not None
    assert (found.own.tolist(), found.terms) == ([2, 2, 1], {})


@pytest.mark.parametrize(
    "compute",
    [
        lambda: of.divide(polynomial(0, b=3), polynomial(2), whole=True),
        lambda: of.divide(polynomial(-5, b=4), polynomial(4), whole=True),
        lambda: of.divide(polynomial(1), polynomial(0, n=1), whole=True),
        lambda: of.remainder(polynomial(0, b=1), polynomial(0, n=1)),
        lambda: of.remainder(polynomial(0, b=1), polynomial(3)),
        lambda: of.multiply(of.between(0, 4), polynomial(0, b=1)),
        lambda: of.either(polynomial(0, b=1), polynomial(0, n=1)),
    ],
)
def test_what_is_no_polynomial_is_not_decided(compute: Callable[[], AffineNumbers]) -> None:
    with pytest.raises(UndecidedError):
        compute()
