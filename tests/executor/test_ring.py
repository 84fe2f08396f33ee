"""Rings and bells between threads and processes."""

import struct
import subprocess
import sys
import threading
import time

import pytest

from gangway.executor.messages import BELL_BYTES, Bell, Ring, ring_bytes
from gangway.executor.segment import BELL, Segment
from testing.waiting import until


@pytest.fixture
def segment():
    made = Segment.create(1 << 16, "ring")
    yield made
    made.close()


def message(number):
    return struct.pack("<I60x", number)


def test_order_capacity_and_discard(segment):
    ring = Ring(segment, 64)
    ring.init(4)
    for lap in range(5):
        assert [ring.send(message(lap * 10 + i)) for i in range(5)] == [True] * 4 + [False]
        assert ring.pending() == 4
        assert [ring.receive() for _ in range(5)] == [message(lap * 10 + i) for i in range(4)] + [None]
    ring.send(message(1))
    ring.discard()
    assert ring.receive() is None


@pytest.mark.parametrize("capacity", [0, 3, 1 << 20])
def test_bad_capacity(segment, capacity):
    with pytest.raises(ValueError):
        Ring(segment, 0).init(capacity)


@pytest.mark.parametrize("offset", [-64, 4, 1 << 16, 1 << 40])
def test_bad_offset(segment, offset):
    with pytest.raises(ValueError):
        Ring(segment, offset).init(4)


def test_ring_that_was_never_made_and_message_of_wrong_size(segment):
    with pytest.raises(ValueError, match="initialised"):
        Ring(segment, 0).send(message(1))
    Ring(segment, 0).init(4)
    with pytest.raises(ValueError, match="64 bytes"):
        Ring(segment, 0).send(b"short")


ECHO = """
import sys
from gangway.executor.messages import Bell, Ring
from gangway.executor.segment import Segment
segment = Segment.attach(int(sys.argv[1]))
inbox, outbox = Ring(segment, 1024), Ring(segment, 8192)
mine, theirs = Bell(segment, 0), Bell(segment, 64)
while True:
    seen = mine.seen()
    raw = inbox.receive()
    if raw is None:
        mine.wait(seen, 0, 10_000_000)
        continue
    outbox.send(raw)
    theirs.ring()
    if raw[0] == 255:
        break
"""


def test_nothing_is_lost_between_processes_that_sleep(segment):
    assert BELL_BYTES == 64
    assert 1024 + ring_bytes(16) <= 8192
    inbox, outbox = Ring(segment, 1024), Ring(segment, 8192)
    inbox.init(16)
    outbox.init(16)
    mine, theirs = Bell(segment, 64), Bell(segment, 0)
    child = subprocess.Popen([sys.executable, "-c", ECHO, str(segment.fd)], pass_fds=[segment.fd])
    for number in range(2000):
        sent = bytes([255 if number == 1999 else number % 255]) + struct.pack("<I59x", number)
        seen = mine.seen()
        assert inbox.send(sent)
        theirs.ring()
        while (raw := outbox.receive()) is None:
            seen = mine.wait(seen, 0, 10_000_000)
        assert raw == sent
    assert child.wait(10) == 0


def test_best_effort_requests_wake_nobody_who_skips_them(segment):
    bell = Bell(segment, 0)
    words = {name: BELL.offset(name) for name in ("sleeping", "skip_best_effort_wakeups")}
    seen = bell.seen()
    bell.ring_for_best_effort()
    assert bell.wait(seen, 0, 20_000_000, skip_best_effort_wakeups=True) == seen + 1, "it was rung before"
    waiter = threading.Thread(
        target=bell.wait, args=(seen + 1, 0, 20_000_000), kwargs={"skip_best_effort_wakeups": True}
    )
    waiter.start()
    until(lambda: [struct.unpack_from("<I", segment.view, at) for at in words.values()] == [(1,)] * 2)
    bell.ring_for_best_effort()
    assert bell.seen() == seen + 1
    bell.ring()
    waiter.join(10)
    assert not waiter.is_alive()
    assert struct.unpack_from("<I", segment.view, words["skip_best_effort_wakeups"]) == (0,), "only as long as it waits"


def test_wait_ends_with_the_time_and_releases_the_gil(segment):
    bell = Bell(segment, 0)
    begin = time.monotonic()
    assert bell.wait(bell.seen(), 0, 50_000) == bell.seen()
    assert 0.045 < time.monotonic() - begin < 5
    seen = bell.seen()
    waiter = threading.Thread(target=bell.wait, args=(seen, 0, 20_000_000))
    waiter.start()
    bell.ring()
    waiter.join(10)
    assert not waiter.is_alive()
