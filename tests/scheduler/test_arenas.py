"""The arena pool on real, sparse shared memory."""

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from gangway.scheduler.arenas import PAGE_BYTES, ArenaPool


@dataclass
class Memory:
    fd: int
    memory: mmap.mmap

    def resident_bytes(self) -> int:
        return os.fstat(self.fd).st_blocks * 512


@pytest.fixture
def segment() -> Iterator[Memory]:
    fd = os.memfd_create("arenas")
    os.ftruncate(fd, 64 * PAGE_BYTES)
    with mmap.mmap(fd, 64 * PAGE_BYTES) as memory:
        yield Memory(fd, memory)
    os.close(fd)


def test_bounded_reused_and_committed_by_rows(segment: Memory) -> None:
    pool = ArenaPool(segment)
    pool.add_model(1, row_bytes=PAGE_BYTES, max_rows=8, count=2)
    assert segment.resident_bytes() == 0
    first = pool.acquire(1, rows=2)
    assert first is not None and segment.resident_bytes() == 2 * PAGE_BYTES
    second = pool.acquire(1, rows=8)
    assert second is not None and abs(second - first) >= 8 * PAGE_BYTES
    assert pool.acquire(1, rows=1) is None
    pool.release(1, first)
    assert pool.acquire(1, rows=1) == first


def test_a_model_finds_zeros_and_unloading_gives_memory_back(segment: Memory) -> None:
    segment.memory[:] = b"\xff" * len(segment.memory)
    pool = ArenaPool(segment)
    assert segment.resident_bytes() == 0
    for model_id in range(3):
        pool.add_model(model_id, row_bytes=30 * PAGE_BYTES, max_rows=1, count=2)
        offset = pool.acquire(model_id, rows=1)
        assert offset is not None
        assert segment.memory[offset : offset + 30 * PAGE_BYTES] == bytes(30 * PAGE_BYTES)
        segment.memory[offset : offset + 30 * PAGE_BYTES] = b"\x01" * 30 * PAGE_BYTES
        pool.release(model_id, offset)
        pool.remove_model(model_id)
        assert segment.resident_bytes() == 0


def test_too_large_a_model_reserves_nothing(segment: Memory) -> None:
    pool = ArenaPool(segment)
    with pytest.raises(MemoryError, match=r"3 arenas of 122880 bytes do not fit: 262144 bytes are free"):
        pool.add_model(1, row_bytes=30 * PAGE_BYTES, max_rows=1, count=3)
    pool.add_model(2, row_bytes=32 * PAGE_BYTES, max_rows=1, count=2)


def test_a_model_without_activations_still_has_distinct_arenas(segment: Memory) -> None:
    pool = ArenaPool(segment)
    pool.add_model(1, row_bytes=0, max_rows=4, count=2)
    assert len({pool.acquire(1, 4), pool.acquire(1, 4)}) == 2
