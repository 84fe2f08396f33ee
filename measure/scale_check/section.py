"""What a part of the check has found: a table, conclusions, and what to do about bad ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

WHOLE: Final = 1000.0
_MARKS: Final = {True: "good: ", False: "LOOK HERE: ", None: ""}

Row = Mapping[str, str | int | float]
"""A line of a table, by column. All lines of a section have the same columns."""


@dataclass(frozen=True)
class Finding:
    """A conclusion. `good` None: nothing to judge."""

    text: str
    good: bool | None = None

    def __str__(self) -> str:
        return _MARKS[self.good] + self.text


@dataclass(frozen=True)
class Curve:
    """Points of a picture, by x. `predicted`: they are not measured."""

    label: str
    points: tuple[tuple[float, float], ...]
    predicted: bool = False


@dataclass(frozen=True)
class Chart:
    """A picture: the names of its axes, units included, and its curves."""

    x: str
    y: str
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class Section:
    """One part. `figures`: its numbers by name, with units in the names. `meaning`: of a bad figure. `action`: then."""

    name: str
    title: str
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]
    figures: Mapping[str, float]
    meaning: str
    action: str
    chart: Chart | None = None


def apart(predicted: float, measured: float) -> float:
    """Return by what share a prediction is above what was measured; below it is negative."""
    return predicted / measured - 1


def cell_text(value: str | int | float) -> str:
    """Return a cell as text: a float has four digits, or all of its whole number."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= WHOLE else f"{value:.4g}"
