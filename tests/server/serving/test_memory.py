"""Memory of a long queue goes back to the system, that of an ordinary one stays."""

import os
import subprocess
import sys

import pytest

from gangway.base.host_limits import MemoryLimit
from gangway.base.memory_budget import MemoryBudget, memory_budget
from gangway.server.control.supervisor.shared_memory import SharedMemory
from gangway.server.requests.data_plane import DataPlane
from gangway.server.serving.memory import WORTH_BYTES, MemoryGuard

LONG_QUEUE = f"""
import os
from gangway.base.memory_budget import memory_budget
from gangway.server.serving.memory import MemoryGuard
from gangway.server.system import keep_freed_memory

def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * {os.sysconf("SC_PAGE_SIZE")}

keep_freed_memory()
pairs = [(b"1" * 600_000, b"1" * 5_000) for _ in range(600)]
held, pins = [list(column) for column in zip(*pairs)]  # pins stay, so that freeing the others does not shorten the heap
del pairs
guard = MemoryGuard(lambda: 600_000 * len(held), None, memory_budget())
assert not guard.poll()
held.clear()
before = resident_bytes()
assert guard.poll()
assert resident_bytes() < before - 200_000_000, (before, resident_bytes())
"""


def test_the_memory_of_a_long_queue_goes_back() -> None:
    subprocess.run([sys.executable, "-c", LONG_QUEUE], check=True)


@pytest.fixture(scope="module")
def plane() -> DataPlane:
    return SharedMemory.create(1).own_data_plane()


def test_it_is_returned_once_and_only_if_it_is_much(plane: DataPlane) -> None:
    in_flight = 0
    guard = MemoryGuard(lambda: in_flight, plane, memory_budget())
    in_flight = WORTH_BYTES - 1
    assert not guard.poll()
    in_flight = 0
    assert not guard.poll()
    in_flight = 2 * WORTH_BYTES
    assert not guard.poll()
    in_flight = WORTH_BYTES
    assert not guard.poll()
    in_flight = 0
    assert [guard.poll(), guard.poll()] == [True, False]


def test_nobody_is_let_in_while_memory_is_full(plane: DataPlane) -> None:
    free_bytes, told = 1 << 30, []
    budget = MemoryBudget(MemoryLimit(1 << 30, "a test's"), lambda: free_bytes)
    guard = MemoryGuard(lambda: 0, plane, budget, lambda reason, is_full: bool(told.append(is_full)))
    kept = plane.take(1 << 20)
    plane.drop(kept)
    for is_full in (False, True, False):
        free_bytes = budget.reserve_bytes // 4 if is_full else 1 << 30
        guard.watch()
        assert plane.admission.admits() is not is_full
        assert ("1024 MiB of memory (a test's)" in plane.admission.refusal) is is_full
    assert told == [False, True, False]
