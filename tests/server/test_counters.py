"""Counters in shared memory: several processes count, one of them dies, everything is added up."""

import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from gangway.executor import _native
from gangway.executor.segment import Segment
from gangway.executor.slots import SlotCounts
from gangway.protos import StatusCode
from gangway.server import statistics as counters
from gangway.server.messages import ModelReady
from gangway.server.models.served import Models, ServedModel
from gangway.server.requests.admission import AdmissionController
from gangway.server.serving.inference.response_cache import ENTRY_BYTES, Key, ResponseCache
from gangway.server.statistics import TIME_BOUNDS_NS, RequestTimes, Statistics, StatisticsTable

MODEL = 5
TIMES = RequestTimes(total=4_000_000, queue=1_000_000, compute_input=2, compute_infer=3_000_000, compute_output=1)
# Counts without end, in the place of front end 1; says when it has begun.
COUNTER = """
import sys
from gangway.executor.slots import SlotCounts
from gangway.server.statistics import StatisticsTable
from gangway.server.statistics import TIME_BOUNDS_NS
from gangway.server.statistics import RequestTimes
statistics = StatisticsTable.attach(int(sys.argv[1])).statistics(1, int(sys.argv[2]), TIME_BOUNDS_NS)
times, counts = RequestTimes(4_000_000, 1_000_000, 2, 3_000_000, 1), SlotCounts(2, 0, 0, 1)
statistics.succeeded(3, times, True, counts)
print("begun", flush=True)
while True:
    statistics.succeeded(3, times, True, counts)
"""


@pytest.fixture
def table() -> Iterator[StatisticsTable]:
    made = StatisticsTable.create(2)
    made.begin(MODEL)
    yield made


def statistics_of(table: StatisticsTable, front_end: int) -> Statistics:
    return table.statistics(front_end, MODEL, TIME_BOUNDS_NS)


def counted(statistics: Statistics, rows: int = 1, times: int = 1) -> None:
    for _ in range(times):
        statistics.succeeded(rows, TIMES, None, SlotCounts())


def test_what_front_ends_count_adds_up_whoever_is_asked(table: StatisticsTable) -> None:
    first, second = (statistics_of(table, front_end) for front_end in range(2))
    counted(first, rows=2)
    counted(first, rows=4)
    counted(second, rows=1)
    counted(second, rows=4, times=2)
    second.failed(7, StatusCode.UNAVAILABLE, had_target=True)
    figures = first.figures()
    assert figures == second.figures() == table.figures(MODEL)
    assert (figures.success.count, figures.success.ns, figures.inferences) == (5, 5 * TIMES.total, 15)
    assert {rows: batch.compute_infer.count for rows, batch in figures.batches.items()} == {1: 1, 2: 1, 4: 3}
    assert figures.batches[4].compute_input.ns == 3 * TIMES.compute_input
    assert sum(figures.request_counts) == sum(figures.row_counts) == 5
    assert (figures.failures["REJECTED"], figures.own["qos_missed"]) == (1, 1)


def test_a_batch_whose_requests_came_to_several_front_ends(table: StatisticsTable) -> None:
    first, second = (statistics_of(table, front_end) for front_end in range(2))
    second.succeeded(2, TIMES, None, SlotCounts(), batch_rows=3, leads=False)
    first.succeeded(1, TIMES, None, SlotCounts(), batch_rows=3, leads=True)
    figures = table.figures(MODEL)
    assert (figures.success.count, figures.executions, figures.inferences, figures.batch_rows) == (2, 1, 3, 3)
    assert {rows: batch.compute_infer.count for rows, batch in figures.batches.items()} == {3: 1}
    assert sum(figures.row_counts) == 1


def test_a_successor_goes_on_where_its_predecessor_was_killed(table: StatisticsTable) -> None:
    fd = table.segment.fd
    process = subprocess.Popen(
        [sys.executable, "-c", COUNTER, str(fd), str(MODEL)], pass_fds=[fd], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        seen = 0
        for _ in range(200):  # while it counts: nothing is torn, nothing goes backwards
            figures = table.figures(MODEL)
            count = figures.success.count
            assert count >= seen
            seen = count
            assert figures.executions == count == sum(figures.request_counts) == figures.own["qos_met"]
            assert (figures.inferences, figures.success.ns) == (3 * count, TIMES.total * count)
            assert figures.batches[3].compute_infer.ns == 3_000_000 * count
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    left = table.figures(MODEL).success.count
    successor = statistics_of(StatisticsTable.attach(os.dup(fd)), 1)
    counted(successor, rows=3)
    figures = table.figures(MODEL)
    assert figures.success.count == left + 1
    assert list(figures.batches) == [3]


def test_a_writer_that_died_in_the_middle(table: StatisticsTable) -> None:
    """Its row says that it is being written, and perhaps a batch size has been written that does not count yet."""
    counted(statistics_of(table, 1), rows=8)
    offset = counters.row_offset(1, MODEL)
    words = table.segment.view[offset : offset + counters.ROW_BYTES].cast("Q")
    words[counters.SEQUENCE] |= 1
    words[counters.batch_offset(1)] = 77
    assert table.figures(MODEL).success.count == 1
    counted(statistics_of(table, 1), rows=16)
    assert not words[counters.SEQUENCE] & 1
    assert {rows: batch.compute_infer.count for rows, batch in table.figures(MODEL).batches.items()} == {8: 1, 16: 1}


def test_rows_begin_at_zero_and_give_their_memory_back(table: StatisticsTable) -> None:
    counted(statistics_of(table, 0))
    table.begin(MODEL + 1)
    blocks = os.fstat(table.segment.fd).st_blocks
    table.end(MODEL)
    assert (blocks - os.fstat(table.segment.fd).st_blocks) * 512 == 2 * counters.ROW_BYTES
    table.begin(MODEL)
    assert os.fstat(table.segment.fd).st_blocks == blocks
    figures = table.figures(MODEL)
    assert (figures.success.count, figures.last_inference_ms, figures.batches) == (0, 0, {})
    assert counters.row_offset(0, MODEL) % counters.PAGE_BYTES == 0


def test_more_batch_sizes_than_there_is_room_for(table: StatisticsTable) -> None:
    statistics = statistics_of(table, 0)
    for rows in range(1, counters.MAX_BATCHES + 11):
        counted(statistics, rows, times=2)
    figures = table.figures(MODEL)
    assert list(figures.batches) == list(range(1, counters.MAX_BATCHES + 1))
    assert figures.executions == sum(figures.row_counts) == 2 * (counters.MAX_BATCHES + 10)
    assert figures.inferences == 2 * sum(range(1, counters.MAX_BATCHES + 11))
    assert figures.compute("compute_input").ns == figures.executions * TIMES.compute_input


def test_threads_of_one_process_count_everything() -> None:
    statistics, threads, times = Statistics(), 8, 500
    begin = threading.Barrier(threads)

    def run(number: int) -> None:
        begin.wait()
        for step in range(times):
            counted(statistics, rows=1 + (number + step) % 20)

    running = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    figures = statistics.figures()
    assert figures.success.count == sum(figures.queue_counts) == threads * times
    assert {batch.compute_infer.count for batch in figures.batches.values()} == {threads * times // 20}


def test_versions_of_kernels() -> None:
    statistics = Statistics()
    for mask in (0b1, 0b101, 0b10000, 1 << 40):
        statistics.succeeded(1, TIMES, None, SlotCounts(versions=mask))
    own = statistics.figures().own
    assert {key: count for key, count in own.items() if key.startswith("version")} == {
        "version_0": 2,
        "version_2": 1,
        "version_4": 1,
    }


def test_another_layout_is_refused(table: StatisticsTable) -> None:
    table.segment.view[4] += 1
    with pytest.raises(ValueError, match=f"statistics have layout {counters.VERSION + 1} of {counters.MODELS} models"):
        StatisticsTable.attach(os.dup(table.segment.fd))
    with pytest.raises(ValueError, match="is not a segment of statistics"):
        StatisticsTable.attach(os.dup(Segment.create(counters.PAGE_BYTES, "test-other").fd))


@pytest.mark.parametrize("pair", [(0, 1), (1, 1), (16, 1), (-1, 1), (2,), (2, "x")])
def test_no_word_is_written_that_is_no_counter(pair: tuple[int, ...]) -> None:
    view = memoryview(bytearray(16 * 8))
    with pytest.raises((ValueError, TypeError, OverflowError)):
        _native.counters_add(view, 0, 16, 1, 3, 1, *pair)
    assert not any(view)
    with pytest.raises(ValueError, match="not inside a buffer"):
        _native.counters_add(view, 8, 16, 1, 3, 1)
    _native.counters_add(view, 0, 16, 9, 15, 2, 15, 1 << 63, 2, -1)
    words = view.cast("Q")
    assert (words[0], words[1], words[2], words[15]) == (2, 9, 2**64 - 1, (1 << 63) + 2)


def test_the_heap_of_each_front_end(table: StatisticsTable) -> None:
    table.set_heap_bytes(1, 1 << 40)
    other = StatisticsTable.attach(os.dup(table.segment.fd))
    assert [other.heap_bytes(front_end) for front_end in range(2)] == [0, 1 << 40]
    assert [other.refused_unread(front_end) for front_end in range(2)] == [0, 0]


def test_who_is_refused_unread_is_counted_for_all_front_ends_and_on_after_a_death(table: StatisticsTable) -> None:
    for front_end in (0, 1, 1):
        admission = AdmissionController(1, lambda: 1.0, lambda: 1.0)
        admission.count_in(table.refused_unread_word(front_end))
        admission.enter()
        assert not admission.admits()
    other = StatisticsTable.attach(os.dup(table.segment.fd))
    assert [other.refused_unread(front_end) for front_end in range(2)] == [1, 2]
    assert admission.refused == 2
    assert [table.heap_bytes(front_end) for front_end in range(2)] == [0, 0]


def test_the_response_caches_of_all_front_ends(table: StatisticsTable) -> None:
    for front_end, count in ((0, 1), (1, 10)):
        cache = ResponseCache(1 << 20)
        cache.count_in(table.cache_words(front_end))
        for number in range(count):
            key = Key(1, bytes([number]) * 32)
            cache.put(key, b"answer")
            assert cache.get(key) == b"answer"
    found = StatisticsTable.attach(os.dup(table.segment.fd)).cache()
    assert found[:6] == (2 << 20, 11 * (ENTRY_BYTES + 6), 11, 11, 0, 0)
    assert [table.heap_bytes(front_end) for front_end in range(2)] == [0, 0]
    assert [table.refused_unread(front_end) for front_end in range(2)] == [0, 0]


def test_a_successor_of_a_model_keeps_its_counts_and_has_met_no_target() -> None:
    def following(models: Models, number: int) -> tuple[Models, Statistics]:
        ready = ModelReady(number, "m", 1, b"", (), (), 0, 1, True, statistics_row=MODEL)
        after = models.updated(ready)
        (entry,) = after.entries.values()
        assert isinstance(entry, ServedModel)
        return after, entry.statistics

    models, first = following(Models(), 1)
    first.least_met_us = 250.0
    _, second = following(models, 2)
    assert second is first
    assert second.least_met_us == math.inf
