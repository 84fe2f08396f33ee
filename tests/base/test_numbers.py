"""Numbers on command lines: what is refused, that the reason names what was expected, and how many are written."""

from argparse import ArgumentTypeError
from collections.abc import Callable

import pytest

from gangway.base.numbers import count, counted, percent, positive, seconds, share


@pytest.mark.parametrize(
    ("read", "accepted", "refused"),
    [
        (positive, ("0.5", "1e9"), ("0", "-1", "nan", "inf", "fast", "")),
        (seconds, ("0.1", "1000000"), ("0", "1000001", "nan")),
        (percent, ("0.1", "100"), ("0", "100.1", "all")),
        (share, ("0.01", "1"), ("0", "1.5")),
        (count, ("1", "64"), ("0", "-1", "1.5", "two", "")),
    ],
)
def test_what_is_no_such_number_is_refused(
    read: Callable[[str], float], accepted: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    assert [read(text) for text in accepted] == [float(text) for text in accepted]
    for text in refused:
        with pytest.raises(ArgumentTypeError, match=f"expected, not '{text}'"):
            read(text)


def test_one_of_a_thing_is_singular() -> None:
    assert [counted(number, "layer") for number in (0, 1, 2)] == ["0 layers", "1 layer", "2 layers"]
