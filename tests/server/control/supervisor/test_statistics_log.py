"""What the log says about a model."""

import asyncio
import logging
from dataclasses import replace

import pytest

from gangway.executor.slots import SlotCounts
from gangway.protos import StatusCode
from gangway.server.control.supervisor.announcements import Announcements
from gangway.server.control.supervisor.log import StatisticsLog, describe
from gangway.server.messages import ModelReady, ModelUnavailable
from gangway.server.statistics import TIME_BOUNDS_NS, RequestTimes, Statistics, StatisticsTable

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


def test_each_request_is_in_one_line_whatever_becomes_of_its_model(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    table = StatisticsTable.create(1)
    known = Announcements(table, lambda _: None, lambda: ())
    log = StatisticsLog(known.counted, table.figures)

    def serve(number: int, continues: int | None = None) -> None:
        known.announce(ModelReady(number, "m", 1, b"", (), (), 0, 1, True), continues)

    def ask(times: int) -> None:
        ((model, _),) = known.counted()
        for _ in range(times):
            table.statistics(0, model.statistics_row, TIME_BOUNDS_NS).succeeded(1, TIMES, None, SlotCounts())

    def written() -> list[int]:
        caplog.clear()
        log.write_news()
        return [vars(record)["fields"]["answered"] for record in caplog.records]

    async def retire(number: int) -> None:
        known.begin_to_retire(number)
        assert await known.retired(number, 1.0)

    serve(1)
    ask(96)
    assert written() == [96]
    assert written() == []
    known.announce_target(replace(known.counted()[0][0], qos_us=1500.0, isolated_us=500.0))  # it has been measured
    assert known.counted()[0][0].qos_us == 1500.0
    ask(1)
    assert written() == [1]
    serve(2, continues=1)  # it has been compiled
    asyncio.run(retire(1))
    ask(2)
    assert written() == [2]
    row = known.counted()[0][0].statistics_row
    known.announce(ModelUnavailable("m", 1, "it is unloaded"))
    asyncio.run(retire(2))
    serve(3)
    assert known.counted()[0][0].statistics_row == row, "the counters begin at zero in the same place"
    ask(5)
    assert written() == [5]
