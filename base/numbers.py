"""Numbers on command lines: read as `type` of argparse's arguments, which shows what was expected, and written."""

import argparse
import math
from collections.abc import Callable
from typing import Final

INT32_MAX: Final = (1 << 31) - 1


def number(
    text: str, expected: str, above: float = -math.inf, least: float = -math.inf, most: float = math.inf
) -> float:
    """Return a finite number above one bound, from another up to a third.

    Raises ArgumentTypeError that names what was expected.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and above < value and least <= value <= most):
        raise argparse.ArgumentTypeError(f"{expected} was expected, not {text!r}")
    return value


def positive(text: str) -> float:
    """Return a number above 0."""
    return number(text, "a positive number", above=0.0)


def seconds(text: str) -> float:
    """Return a number of seconds above 0, up to a million."""
    return number(text, "a positive number of seconds", above=0.0, most=1e6)


def percent(text: str) -> float:
    """Return a number above 0 and up to 100."""
    return number(text, "a number above 0 and up to 100", above=0.0, most=100.0)


def share(text: str) -> float:
    """Return a number above 0 and up to 1."""
    return number(text, "a share above 0 and up to 1", above=0.0, most=1.0)


def count(text: str) -> int:
    """Return a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 was expected, not {text!r}")
    return int(text)


def integer(low: int, high: int = INT32_MAX) -> Callable[[str], int]:
    """Return a type for whole numbers from `low` to `high`."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"{number} is not from {low} to {high}")
        return number

    return parse


def counted(count: int, thing: str) -> str:
    """Return "1 layer" or "3 layers"."""
    return f"{count} {thing}{'s' * (count != 1)}"
