"""How answers agree, and which layers stay in fp32: what the numbers say, without any kernel."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gangway.compiler.comparison.agreement import cosine, layers_to_keep, rounded, top1

LOST = st.dictionaries(st.text("abc", min_size=1, max_size=3), st.floats(0, 1), min_size=1, max_size=20)


@given(LOST, st.floats(0, 2))
def test_the_fewest_layers_stay(lost: dict[str, float], allowed: float) -> None:
    kept = layers_to_keep(lost, allowed)
    left = sum(each for name, each in lost.items() if name not in kept)
    assert kept and (left <= allowed + 1e-9 or len(kept) == len(lost))
    if len(kept) > 1:  # one less would be too few
        assert left + lost[kept[-1]] > allowed - 1e-9
    assert all(lost[name] >= lost[other] for name in kept for other in lost.keys() - set(kept))


def test_cosine() -> None:
    a = np.array([[3.0, 4.0]], np.float32)
    assert cosine(a, a) == 1.0
    assert cosine(a, -a) == pytest.approx(-1)
    assert cosine(a, np.array([[-4.0, 3.0]])) == pytest.approx(0)
    zeros = np.zeros(3)
    assert cosine(zeros, zeros) == 1.0 and cosine(np.ones(3), zeros) == 0.0
    with_infinity = np.array([1.0, -np.inf])
    assert cosine(with_infinity, with_infinity) == 1.0
    assert cosine(np.array([1.0, 2.0]), with_infinity) == -1.0
    assert cosine(np.array([np.nan, 1.0]), np.array([1.0, 1.0])) == -1.0


def test_largest_elements() -> None:
    wanted = np.array([[1, 2, 3], [3, 2, 1]])
    assert top1(wanted, wanted) == 1.0
    assert top1(np.array([[1, 2, 3], [1, 2, 3]]), wanted) == 0.5
    assert top1(np.array([5.0]), np.array([7.0])) == 1.0  # one element has no rival


@given(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**126), max_value=2.0**126))
def test_rounding_to_the_nearest_number_of_bf16(number: float) -> None:
    given_number = np.array([number], np.float32)
    result = rounded(given_number).view(np.float32)
    bits = int(result.view(np.uint32)[0])
    assert bits & 0xFFFF == 0
    below, above = (
        np.array([(int(given_number.view(np.uint32)[0]) & 0xFFFF0000) + step], np.uint32).view(np.float32)
        for step in (0, 0x10000)
    )
    nearest = min(abs(float(each[0]) - number) for each in (below, above))
    assert abs(float(result[0]) - number) == nearest
