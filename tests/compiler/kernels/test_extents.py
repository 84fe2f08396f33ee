"""Numbers that kernels read at run time: arithmetic as of integers, decisions as conditions."""

import math
from dataclasses import astuple

import pytest

from gangway.compiler.kernels.extents import Conditions, Extent, traced
from gangway.compiler.kernels.templates.tiling import TileSegment, segments


def tiles(width: int, most: int) -> tuple[int, int]:
    """What templates do: tiles of equal size, and what is left."""
    count = -(-width // most)
    return count, width % count


def known(tile: TileSegment) -> TileSegment:
    """The tile with the values of its numbers."""
    return TileSegment(*(number.value if isinstance(number, Extent) else number for number in astuple(tile)))


def test_arithmetic_is_that_of_integers() -> None:
    with traced((30, 7)) as trace:
        a, b = trace.extents
        results = [a + b, 3 + a, a - b, 40 - a, a * b, 2 * a, a // b, 100 // b, a % b, -a, math.prod([a, b]), a * 0]
    assert [result.value for result in results] == [37, 33, 23, 10, 210, 60, 4, 14, 2, -30, 210, 0]
    assert trace.conditions == Conditions()
    assert (a + 0) is a and (a * 1) is a and (a // 1) is a


def test_a_kernel_is_right_where_every_decision_is_the_same() -> None:
    with traced((30,)) as trace:
        count, rest = tiles(trace.extents[0], 14)
        assert isinstance(count, Extent) and not rest and count < 4
    met = {width for width in range(1, 80) if trace.conditions.met((width,))}
    assert met == {width for width in range(1, 80) if not tiles(width, 14)[1] and tiles(width, 14)[0] < 4}


@pytest.mark.parametrize("limit", [1, 2, 5, 14, 28])
def test_one_kernel_computes_every_pixel_of_all_longer_lines(limit: int) -> None:
    with traced((limit,)) as trace:
        segments(trace.extents[0], limit)
    for total in range(limit, 5 * limit):
        assert trace.conditions.met((total,))
        with traced((total,)) as other:
            tiles = segments(other.extents[0], limit)
        columns = [(tile.column(index), tile.width) for tile in map(known, tiles) for index in range(tile.count)]
        assert {column + i for column, width in columns for i in range(width)} == set(range(total))
        assert len(columns) == -(-total // limit)


def test_a_length_of_a_python_loop_is_fixed() -> None:
    with traced((5, 9)) as trace:
        assert len(range(trace.extents[0] + 1)) == 6
    assert [trace.conditions.met((5, other)) for other in (1, 9)] == [True, True]
    assert not trace.conditions.met((6, 9))


def test_conditions_are_data() -> None:
    with traced((30,)) as trace:
        assert max(trace.extents[0] // 4, 3).value == 7
    assert Conditions.from_json(trace.conditions.to_json()) == trace.conditions
    with pytest.raises(ValueError, match="Expecting"):
        Conditions.from_json(b"")


def test_nothing_looks_an_extent_up() -> None:
    with traced((30,)) as trace, pytest.raises(TypeError):
        {trace.extents[0]: 0}
