"""When a query is certain to be late, by hand."""

from dataclasses import replace

import pytest

from gangway.scheduler.admission import certain_from_us, certain_to_be_late
from gangway.scheduler.policy import Query
from gangway.scheduler.profiles import ModelProfile

# Three layers of two versions, for one and two cores: the best of each are 60, 90 (on one core) and 30 us.
MODEL = ModelProfile(
    model_id=0,
    name="m",
    layers=3,
    max_ranks=2,
    latency_us=(((100.0, 60.0), (120.0, 80.0)), ((90.0, 95.0), (99.0, 99.0)), ((50.0, 40.0), (45.0, 30.0))),
    rows_factor=((1.0, 3.0), (1.0, 2.5)),
    batches=(1, 3),
    measured=True,
)
QUERY = Query(1, 0, rows=1, arrival_us=1000.0, deadline_us=2000.0)


@pytest.mark.parametrize(
    ("next_layer", "cores", "rows", "rest_us"),
    [(0, 2, 1, 180.0), (1, 2, 1, 120.0), (3, 2, 1, 0.0), (0, 1, 1, 235.0), (0, 64, 1, 180.0), (0, 2, 3, 450.0)],
)
def test_certain_from_the_deadline_less_the_fastest_rest(
    next_layer: int, cores: int, rows: int, rest_us: float
) -> None:
    query = replace(QUERY, next_layer=next_layer, rows=rows)
    assert certain_from_us(query, MODEL, cores) == pytest.approx(2000.0 - rest_us)
    assert not certain_to_be_late(query, MODEL, 2000.0 - rest_us - 1, cores)
    assert certain_to_be_late(query, MODEL, 2000.0 - rest_us + 1, cores)


def test_batches_that_were_not_measured_count_as_one_row() -> None:
    assert certain_from_us(replace(QUERY, rows=3), replace(MODEL, rows_factor=(), batches=(1,)), 2) == 1820.0


def test_the_layer_being_executed_may_end_at_once() -> None:
    assert certain_from_us(QUERY, MODEL, 2, layer=1) == 1970.0
    assert certain_from_us(QUERY, MODEL, 2, layer=2) == 2000.0
    assert certain_from_us(QUERY, MODEL, 2, layer=3) == 2000.0  # a gang at its end


def test_best_effort_is_never_late() -> None:
    query = replace(QUERY, deadline_us=None)
    assert certain_from_us(query, MODEL, 2) is None
    assert not certain_to_be_late(query, MODEL, 1e12, 2)


@pytest.mark.parametrize(
    "unknown", [replace(MODEL, latency_us=()), replace(MODEL, varies=True), replace(MODEL, measured=False)]
)
def test_what_takes_nobody_knows_how_long_is_late_at_its_deadline(unknown: ModelProfile) -> None:
    assert certain_from_us(QUERY, unknown, 2) == 2000.0
