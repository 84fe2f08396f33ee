"""Summaries of hand-made runs."""

import numpy as np
import pytest

from gangway.workload.outcomes import Outcomes, summarise

# Six queries in a second: a answers after 1, 2, 3 and 10 ms, b after 8 ms and, with an error, after 1 ms.
RUN = Outcomes(
    names=("a", "b"),
    models=np.array([0, 0, 0, 0, 1, 1]),
    scheduled_us=np.array([0, 200_000, 400_000, 600_000, 800_000, 992_000], dtype=float),
    latency_us=np.array([1000, 2000, 3000, 10_000, 8000, 1000], dtype=float),
    status=np.array([0, 0, 0, 0, 0, 2]),
    statuses=("OK", "INTERNAL", "UNAVAILABLE"),
)


def test_a_row_per_model_and_one_in_total():
    summary = summarise(RUN, {"tight": (3000, 7000), "wide": (10_000, 8000)}, isolated_us=(1000, 4000))
    a, b = summary.models
    assert (a.name, a.queries, a.mean_us, a.p50_us, a.errors) == ("a", 4, 4000, 2500, {})
    assert a.p95_us == pytest.approx(3000 + 0.85 * 7000)  # rank 0.95 * 3 = 2.85
    assert a.p99_us == pytest.approx(3000 + 0.97 * 7000)
    assert a.over_isolated == 4.0
    assert a.satisfied == {"tight": 0.75, "wide": 1.0}
    assert (b.queries, b.mean_us, b.p99_us, b.errors) == (2, 8000, 8000, {"UNAVAILABLE": 1})
    assert (b.satisfied, b.over_isolated) == ({"tight": 0.0, "wide": 0.5}, 2.0)
    total = summary.total
    assert (total.queries, total.mean_us, total.errors) == (6, 4800, {"UNAVAILABLE": 1})
    assert total.satisfied == pytest.approx({"tight": 3 / 6, "wide": 5 / 6})
    assert total.over_isolated == pytest.approx((1 + 2 + 3 + 10 + 2) / 5)
    assert (summary.least_satisfied("tight"), summary.least_satisfied("wide")) == (0.0, 0.5)


def test_rates_count_answers_over_the_run():
    summary = summarise(RUN, {})
    assert summary.total.qps == pytest.approx(5 / 0.993)  # from 0 to 992 + 1 ms
    assert [row.qps for row in summarise(RUN, {}, seconds=2).models] == [2.0, 0.5]


def test_best_effort_counts_for_no_share():
    summary = summarise(RUN, {"t": (2000, None)})
    assert [row.satisfied["t"] for row in (*summary.models, summary.total)] == [0.5, None, 0.5]
    assert summary.least_satisfied("t") == 0.5


def test_a_model_that_was_not_asked_has_no_numbers_and_spoils_no_share():
    summary = summarise(RUN.select(RUN.models == 0), {"t": (20_000, 1)})
    b = summary.models[1]
    assert (b.queries, b.qps, b.mean_us, b.p99_us, b.satisfied) == (0, 0.0, None, None, {"t": None})
    assert summary.least_satisfied("t") == 1.0


def test_warm_up_is_left_out():
    assert summarise(RUN.since(600_000), {}).total.queries == 3


def test_no_queries_at_all():
    total = summarise(RUN.since(1e9), {"t": (1, 1)}).total
    assert (total.queries, total.qps, total.satisfied) == (0, 0.0, {"t": None})
