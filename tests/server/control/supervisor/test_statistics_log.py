"""What the log says about a model."""

from gangway.executor.slots import SlotCounts
from gangway.protos import StatusCode
from gangway.server.control.supervisor.log import describe
from gangway.server.statistics import RequestTimes, Statistics

TIMES = RequestTimes(total=4_000_000, queue=1_000_000, compute_input=0, compute_infer=3_000_000, compute_output=0)


def test_a_line_of_a_busy_model() -> None:
    statistics = Statistics()
    statistics.succeeded(1, TIMES, True, SlotCounts(blocks=2, conflicts=1, preemptions=0, versions=0b1))
    statistics.succeeded(2, TIMES, False, SlotCounts(blocks=1, conflicts=0, preemptions=1, versions=0b100))
    before = statistics.figures()
    statistics.failed(1, StatusCode.UNAVAILABLE, had_target=True)
    statistics.failed(1, StatusCode.CANCELLED, had_target=True)
    figures = statistics.figures()
    assert describe(figures) == (
        "2 answered, 1 refused, 1 failed; latency targets met 1, missed 2 (33.3% met);"
        " mean 4.00 ms (queue 1.00, compute 3.00); 1.5 blocks, 0.5 conflicts, 0.5 preemptions per request;"
        " 1.5 rows per batch; versions 0, 2"
    )
    assert (
        describe(figures.since(before)) == "0 answered, 1 refused, 1 failed; latency targets met 0, missed 1 (0.0% met)"
    )


def test_a_line_of_best_effort() -> None:
    statistics = Statistics()
    statistics.succeeded(1, TIMES, None, SlotCounts())
    assert "QoS" not in describe(statistics.figures())
    assert describe(statistics.figures()).endswith("versions -")
