"""The page of the papers' figures follows from their data."""

import itertools
import re
from functools import cache
from pathlib import Path

import pytest

from benchmarks.papers.fidelity import headline, page_text
from benchmarks.papers.results import Results
from benchmarks.papers.veltair_latency import LOADS
from benchmarks.papers.veltair_numbers import LATENCY_OVER_ISOLATED
from benchmarks.papers.veltair_pictures import SHOWN
from benchmarks.papers.veltair_rates import DEFAULT, GOALS, MACHINES, MIXES, RATES, SHARE, read_rows, scenario_of
from benchmarks.scheduling.decisions import highest_rates
from gangway.simulator.rates import QUERIES, capacity_bound

ROOT = Path(__file__).parents[3]
FIGURES = ROOT / "docs" / "measurements" / "figures"
PAGE = ROOT / "docs" / "measurements" / "papers.md"
OVERVIEW = ROOT / "docs" / "measurements" / "overview.md"
COMMAND = "python -m benchmarks.papers fidelity -o docs/measurements/figures --page docs/measurements/papers.md"


@cache
def bound(machine: str, mix: str) -> float:
    return capacity_bound(scenario_of(machine, mix))


def undated(text: str) -> str:
    return re.sub(r"generated, \d{4}-\d\d-\d\d", "generated", text)


def test_the_page_is_that_of_the_figures() -> None:
    assert undated(PAGE.read_text()) == undated(page_text(FIGURES, PAGE.parent)), f"run {COMMAND}"


@pytest.mark.parametrize("mix", MIXES)
def test_nothing_is_left_out(mix: str) -> None:
    """Each kind of policy on the measured machine; the default one and another with versions on the contended one."""
    results = Results(FIGURES)
    for goal in GOALS:
        assert {*SHOWN} <= set(results.of("measured", mix, goal))
        assert {DEFAULT, "protean"} <= set(results.of("contended", mix, goal))


def test_rates_are_of_loads_that_last_and_within_the_machine() -> None:
    """A burst of 60 queries had been carried at 113 % of what all cores can do."""
    for row in read_rows(FIGURES, RATES):
        assert int(row["queries"]) >= QUERIES, row
        bound_per_s = bound(row["machine"], row["mix"])
        assert float(row["bound_per_s"]) == pytest.approx(bound_per_s, rel=1e-4), f"the machine has changed: {COMMAND}"
        assert all(float(row[f"{goal}_per_s"]) <= bound_per_s for goal in GOALS), row


def test_rows_say_of_which_commit_their_policy_is() -> None:
    """One policy in all mixes: whoever changes the default one searches all its rates anew."""
    runs = read_rows(FIGURES, RATES)
    assert all(re.fullmatch("[0-9a-f]{7,40}", row["commit"]) for row in runs), "the files differed from the commit"
    assert len({row["commit"] for row in runs if row["policy"] == DEFAULT}) == 1


def test_a_rate_is_the_highest_that_its_search_tried_and_found_in_time() -> None:
    for row in read_rows(FIGURES, RATES):
        tried = [tuple(map(float, probe.split(":"))) for probe in row["tried"].split()]
        best_per_s = max((rate for rate, share in tried if share >= SHARE), default=0.0)
        assert float(row["all_per_s"]) == pytest.approx(best_per_s, rel=1e-3), row


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("mix", MIXES)
def test_the_default_meets_veltairs_latency_over_the_gang_that_the_target_needs(mix: str, load: float) -> None:
    ours = Results(FIGURES).below_the_rate(mix, DEFAULT, load, "over_gang")
    assert ours.mean_per_s <= LATENCY_OVER_ISOLATED["veltair"]


def test_pages_say_the_same_of_a_rate() -> None:
    """The page of the figures, the overview, and the load that decisions are measured at."""
    results, page = Results(FIGURES), PAGE.read_text()
    assert headline(results) in OVERVIEW.read_text(), f"docs/measurements/overview.md: {headline(results)}"
    for machine, mix in itertools.product(MACHINES, MIXES):
        both = ", ".join(str(results.of(machine, mix, goal)[DEFAULT]) for goal in GOALS)
        assert both in page
    for mix, rates in highest_rates().items():
        assert rates == results.of("measured", mix, "all")[DEFAULT]
