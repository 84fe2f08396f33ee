"""Memory of a long queue goes back to the system, that of an ordinary one stays."""

import os
import subprocess
import sys

from gangway.server.memory_keeper import WORTH_BYTES, MemoryKeeper

LONG_QUEUE = f"""
import os
from gangway.server.memory_keeper import MemoryKeeper
from gangway.server.process import keep_freed_memory

def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * {os.sysconf("SC_PAGE_SIZE")}

keep_freed_memory()
pairs = [(b"1" * 600_000, b"1" * 5_000) for _ in range(600)]
held, pins = [list(column) for column in zip(*pairs)]  # pins stay, so that freeing the others does not shorten the heap
del pairs
keeper = MemoryKeeper(lambda: 600_000 * len(held), lambda: None)
assert not keeper.look()
held.clear()
before = resident_bytes()
assert keeper.look()
assert resident_bytes() < before - 200_000_000, (before, resident_bytes())
"""


def test_the_memory_of_a_long_queue_goes_back() -> None:
    subprocess.run([sys.executable, "-c", LONG_QUEUE], check=True)


def test_it_is_returned_once_and_only_if_it_is_much() -> None:
    in_flight = 0
    keeper = MemoryKeeper(lambda: in_flight, lambda: None)
    in_flight = WORTH_BYTES - 1
    assert not keeper.look()
    in_flight = 0
    assert not keeper.look()
    in_flight = 2 * WORTH_BYTES
    assert not keeper.look()
    in_flight = WORTH_BYTES
    assert not keeper.look()
    in_flight = 0
    assert [keeper.look(), keeper.look()] == [True, False]
