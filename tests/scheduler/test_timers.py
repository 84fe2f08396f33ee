"""Timers of queries: order, changes of mind, and a size that does not grow with the past."""

import random
import tracemalloc

from gangway.scheduler.waiting import MIN_STALE, Timers


def test_the_first_is_due_first_and_may_be_set_again_meanwhile() -> None:
    timers = Timers()
    assert timers.next_us is None
    for query_id, at_us in ((1, 30.0), (2, 10.0), (3, 20.0)):
        timers.set(query_id, at_us)
    assert timers.next_us == 10.0
    seen = []
    for query_id in timers.due(25.0):
        seen.append(query_id)
        if len(seen) == 1:
            timers.set(2, 22.0)
        elif len(seen) == 3:
            timers.set(2, 28.0)
    assert seen == [2, 3, 2]
    assert [list(timers.due(29.0)), list(timers.due(30.0)), list(timers.due(31.0))] == [[2], [], [1]]
    assert timers.next_us is None


def test_a_timer_that_was_moved_or_discarded_is_not_due_at_its_old_time() -> None:
    timers = Timers()
    for query_id in range(4):
        timers.set(query_id, 10.0 + query_id)
    timers.set(0, 40.0)
    timers.discard(1)
    timers.discard(99)
    assert timers.next_us == 12.0
    assert list(timers.due(20.0)) == [2, 3]
    assert list(timers.due(50.0)) == [0]


def test_the_past_takes_no_memory() -> None:
    timers, generator = Timers(), random.Random(1)
    times_us = [generator.uniform(1e6, 2e6) for _ in range(10_000)]
    tracemalloc.start()
    for query_id, at_us in enumerate(times_us):
        timers.set(query_id, at_us)
        timers.discard(query_id - 10)
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(timers) == 10
    assert held_bytes < 200 * (2 * 11 + MIN_STALE)
    assert list(timers.due(3e6)) == sorted(range(9990, 10_000), key=times_us.__getitem__)
