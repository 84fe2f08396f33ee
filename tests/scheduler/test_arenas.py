"""The arena pool on real, sparse shared memory."""

import os
from collections.abc import Iterator

import pytest

from gangway.base.host_limits import MemoryLimit
from gangway.base.memory_budget import MemoryBudget, MemoryFullError
from gangway.executor import segment as segments
from gangway.executor.segment import Segment
from gangway.scheduler.resources import PAGE_BYTES, REST_US, ArenaPool


@pytest.fixture
def segment() -> Iterator[Segment]:
    segment = Segment.create(64 * PAGE_BYTES, "arenas")
    yield segment
    segment.close()


def resident_bytes(segment: Segment) -> int:
    return os.fstat(segment.fd).st_blocks * 512


def test_bounded_reused_and_committed_by_rows(segment: Segment) -> None:
    pool = ArenaPool(segment, 64 * PAGE_BYTES)
    pool.add_model(1, row_bytes=PAGE_BYTES, max_rows=8, count=2)
    assert resident_bytes(segment) == 0
    first = pool.acquire(1, rows=2)
    assert first is not None and resident_bytes(segment) == 2 * PAGE_BYTES
    second = pool.acquire(1, rows=8)
    assert second is not None and abs(second - first) >= 8 * PAGE_BYTES
    assert pool.acquire(1, rows=1) is None
    pool.release(1, first)
    assert pool.acquire(1, rows=1) == first


def test_memory_is_for_the_next_power_of_two_of_rows_but_not_for_more_than_there_can_be(segment: Segment) -> None:
    pool = ArenaPool(segment, 64 * PAGE_BYTES)
    pool.add_model(1, row_bytes=PAGE_BYTES, max_rows=6, count=1)
    for rows, pages in ((1, 1), (2, 2), (3, 4), (4, 4), (5, 6), (6, 6)):
        offset = pool.acquire(1, rows)
        assert offset is not None and resident_bytes(segment) == pages * PAGE_BYTES
        pool.release(1, offset)


def test_a_model_finds_zeros_and_unloading_gives_memory_back(segment: Segment) -> None:
    segment.view[:] = b"\xff" * segment.size_bytes
    pool = ArenaPool(segment, 64 * PAGE_BYTES)
    assert resident_bytes(segment) == 0
    for model_id in range(3):
        pool.add_model(model_id, row_bytes=30 * PAGE_BYTES, max_rows=1, count=2)
        offset = pool.acquire(model_id, rows=1)
        assert offset is not None
        assert segment.view[offset : offset + 30 * PAGE_BYTES] == bytes(30 * PAGE_BYTES)
        segment.view[offset : offset + 30 * PAGE_BYTES] = b"\x01" * 30 * PAGE_BYTES
        pool.release(model_id, offset)
        pool.remove_model(model_id)
        assert resident_bytes(segment) == 0


def test_too_large_a_model_reserves_nothing(segment: Segment) -> None:
    pool = ArenaPool(segment, 64 * PAGE_BYTES)
    with pytest.raises(MemoryError, match=r"3 arenas of 122880 bytes do not fit: 262144 bytes are free"):
        pool.add_model(1, row_bytes=30 * PAGE_BYTES, max_rows=1, count=3)
    pool.add_model(2, row_bytes=32 * PAGE_BYTES, max_rows=1, count=2)


def test_a_model_without_activations_still_has_distinct_arenas(segment: Segment) -> None:
    pool = ArenaPool(segment, 64 * PAGE_BYTES)
    pool.add_model(1, row_bytes=0, max_rows=4, count=2)
    assert len({pool.acquire(1, 4), pool.acquire(1, 4)}) == 2


def test_idle_arenas_give_memory_back_when_others_need_it(segment: Segment) -> None:
    pool = ArenaPool(segment, kept_bytes=4 * PAGE_BYTES)
    for model_id in (1, 2):
        pool.add_model(model_id, row_bytes=2 * PAGE_BYTES, max_rows=1, count=3)
    first = [pool.acquire(1, 1) for _ in range(3)]
    assert resident_bytes(segment) == 6 * PAGE_BYTES, "what is in use may be more"
    for offset in first:
        assert offset is not None
        segment.view[offset] = 1
        pool.release(1, offset)
    assert resident_bytes(segment) == 6 * PAGE_BYTES
    second = pool.acquire(2, 1)
    assert second is not None and resident_bytes(segment) == 4 * PAGE_BYTES
    assert [pool.acquire(1, 1) for _ in range(3)] == list(reversed(first))
    values = [segment.view[offset] for offset in first if offset is not None]
    assert values == [0, 0, 1], "what was given back is zero again"
    for offset in first:
        assert offset is not None
        pool.release(1, offset)
    pool.release(2, second)
    for model_id in (1, 2):
        pool.remove_model(model_id)
    assert resident_bytes(segment) == 0


def test_idle_arenas_give_memory_back_where_there_is_no_other(
    segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_bytes = 1 << 30
    budget = MemoryBudget(MemoryLimit(1 << 30, "a test's"), lambda: free_bytes - resident_bytes(segment), lambda: 0.0)
    monkeypatch.setattr(segments, "memory_budget", lambda: budget)
    pool = ArenaPool(segment, 64 * PAGE_BYTES)
    for model_id in (1, 2):
        pool.add_model(model_id, row_bytes=20 * PAGE_BYTES, max_rows=1, count=1)
    first = pool.acquire(1, 1)
    assert first is not None
    free_bytes = budget.reserve_bytes + 30 * PAGE_BYTES
    budget.room_bytes()
    with pytest.raises(MemoryFullError, match="81920 bytes are asked for, 40960 are left of 1024 MiB"):
        pool.acquire(2, 1)
    assert resident_bytes(segment) == 20 * PAGE_BYTES
    assert not pool.can_never_hold(2, 1), "another query has an arena"
    pool.release(1, first)
    assert pool.acquire(2, 1) is not None and resident_bytes(segment) == 20 * PAGE_BYTES


def test_only_what_was_never_had_is_too_large(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    free_bytes = 1 << 30
    budget = MemoryBudget(MemoryLimit(1 << 30, "a test's"), lambda: free_bytes, lambda: 0.0)
    monkeypatch.setattr(segments, "memory_budget", lambda: budget)
    pool = ArenaPool(segment, 64 * PAGE_BYTES)
    pool.add_model(1, row_bytes=PAGE_BYTES, max_rows=16, count=2)
    first = pool.acquire(1, 4)
    assert first is not None
    pool.release(1, first)
    free_bytes = 0  # messages that are being read have it
    budget.room_bytes()
    with pytest.raises(MemoryFullError):
        pool.acquire(1, 16)
    assert pool.can_never_hold(1, 16) and pool.can_never_hold(1, 5)
    assert not pool.can_never_hold(1, 4), "four rows have been had"


def test_a_reserved_arena_is_in_use_when_a_query_uses_it(segment: Segment) -> None:
    pool = ArenaPool(segment, 64 * PAGE_BYTES)
    pool.add_model(1, row_bytes=PAGE_BYTES, max_rows=8, count=2)
    first, second = pool.reserve(1), pool.reserve(1)
    assert first is not None and second is not None
    assert pool.reserve(1) is None and pool.acquire(1, rows=1) is None
    assert pool.usage(1).in_use == 0 and pool.usage(1).size_bytes == 2 * PAGE_BYTES
    pool.use_reserved(1, first)
    assert pool.usage(1).in_use == 1
    pool.release(1, first)
    pool.release(1, second)
    assert pool.usage(1).in_use == 0
    pool.remove_model(1)


def test_small_batches_leave_the_large_arenas_to_large_ones(segment: Segment) -> None:
    pool = ArenaPool(segment, 64 * PAGE_BYTES)
    pool.add_model(1, row_bytes=PAGE_BYTES, max_rows=8, count=4)
    for _ in range(20):
        taken = [pool.acquire(1, rows) for rows in (1, 8, 2, 1)]
        for offset in taken:  # the large one is never the last
            assert offset is not None
            pool.release(1, offset)
        assert resident_bytes(segment) == (1 + 8 + 2 + 1) * PAGE_BYTES
    first = pool.acquire(1, 1)
    assert first == taken[3], "of equal ones that which was used last"


def test_what_has_long_been_idle_gives_its_memory_back_but_for_the_last_one_used(segment: Segment) -> None:
    pool = ArenaPool(segment, 64 * PAGE_BYTES)
    pool.add_model(1, row_bytes=PAGE_BYTES, max_rows=8, count=3)
    pool.reclaim(1e6)
    arenas = [pool.acquire(1, rows) for rows in (8, 4, 1)]
    for offset in arenas:
        assert offset is not None
        segment.view[offset] = 1
        pool.release(1, offset)
    for now_us, pages in ((1e6 + REST_US - 1, 13), (1e6 + REST_US, 5), (1e6 + REST_US, 1), (1e6 + 2 * REST_US, 1)):
        pool.reclaim(now_us)
        assert resident_bytes(segment) == pool.committed_bytes == pages * PAGE_BYTES
    again = pool.acquire(1, 8)
    assert again == arenas[2] and segment.view[again : again + 8 * PAGE_BYTES] == b"\1" + bytes(8 * PAGE_BYTES - 1)


def test_what_is_used_keeps_its_memory_and_others_beside_it_do_not(segment: Segment) -> None:
    pool = ArenaPool(segment, 64 * PAGE_BYTES)
    pool.add_model(1, row_bytes=PAGE_BYTES, max_rows=8, count=2)
    busy, idle = pool.acquire(1, 8), pool.acquire(1, 8)
    assert busy is not None and idle is not None
    pool.release(1, idle)
    for _ in range(2):
        pool.reclaim(2 * REST_US)
        assert resident_bytes(segment) == 8 * PAGE_BYTES
    pool.release(1, busy)
    pool.reclaim(2 * REST_US + 1)
    assert pool.acquire(1, 8) == busy and resident_bytes(segment) == 8 * PAGE_BYTES
