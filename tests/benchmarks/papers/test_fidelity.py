"""The page of the papers' figures follows from their data."""

import re
from pathlib import Path

import pytest

from benchmarks.papers.fidelity import Results, page_text
from benchmarks.papers.veltair_rates import MACHINES

ROOT = Path(__file__).parents[3]
FIGURES = ROOT / "docs" / "measurements" / "figures"
PAGE = ROOT / "docs" / "measurements" / "papers.md"
COMMAND = "python -m benchmarks.papers fidelity -o docs/measurements/figures --page docs/measurements/papers.md"


def undated(text: str) -> str:
    return re.sub(r"generated, \d{4}-\d\d-\d\d", "generated", text)


def test_the_page_is_that_of_the_figures() -> None:
    assert undated(PAGE.read_text()) == undated(page_text(FIGURES, PAGE.parent)), f"run {COMMAND}"


@pytest.mark.parametrize("machine", MACHINES)
def test_nothing_is_left_out(machine: str) -> None:
    """Both readings of the threshold, both goals, and five seeds behind each rate."""
    results = Results(FIGURES)
    for goal in ("all", "each"):
        found = results.of(machine, "light", goal)
        assert {"gangway", "planaria", "veltair", "veltair:use"} <= set(found)
        assert all(len(one.rates_per_s) == 5 for one in found.values())
