"""Integers and scales that products of float32 are made of are found again."""

import numpy as np
import pytest

from gangway.compiler.place.integers import integer_weights


@pytest.mark.parametrize("most", [127, 126])
def test_scales_are_those_of_the_file(most: int) -> None:
    """The largest product over its integer is rounded to the scale beside it in one of a hundred rows."""
    random = np.random.default_rng(2)
    scales = random.uniform(1e-3, 1e-1, 5000).astype(np.float32)
    integers = random.integers(-most, most + 1, (5000, 12)).astype(np.int8)
    integers[:, 0] = most
    found = integer_weights(integers * scales[:, None])
    assert found is not None
    np.testing.assert_array_equal(found[0], integers)
    np.testing.assert_array_equal(found[1], scales)


def test_other_numbers_have_no_scale() -> None:
    assert integer_weights(np.random.default_rng(3).standard_normal((4, 64)).astype(np.float32)) is None
