"""A bell whose consumer reads an eventfd, between threads under sanitizers (event_bell.c) and between processes."""

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gangway.executor.messages import Bell
from gangway.executor.segment import Segment
from tests.executor.sanitized import SANITIZERS, build

HERE = Path(__file__).parent
NATIVE = HERE.parent.parent / "executor" / "native"
SOURCES = [HERE / "event_bell.c", NATIVE / "ring.c"]
MESSAGES = 3000


@pytest.mark.parametrize("sanitizer", SANITIZERS)
@pytest.mark.parametrize("producers", [1, 4])
def test_every_message_is_found_and_no_ring_wakes_who_is_awake(programmes, sanitizer, producers):
    binary = build(programmes, SOURCES, "event_bell", sanitizer)
    command = [str(binary), str(MESSAGES), str(producers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    _, sleeps, _, wakes, _, unread = done.stdout.split()
    assert int(sleeps) >= MESSAGES // 3 // 2, "it has slept"
    assert int(wakes) + int(unread) <= producers * MESSAGES


@pytest.fixture
def bell() -> Iterator[Bell]:
    segment = Segment.create(4096, "bell")
    made = Bell(segment, 0)
    assert made.event_fd == 0
    made.make_event_fd()
    yield made
    os.close(made.event_fd)
    segment.close()


def is_readable(bell: Bell, timeout_s: float = 0.0) -> bool:
    poll = select.poll()  # which takes descriptors of any number
    poll.register(bell.event_fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def test_only_the_first_ring_after_arming_makes_it_readable(bell: Bell) -> None:
    bell.ring()
    assert not is_readable(bell), "nobody sleeps"
    bell.arm()
    for _ in range(3):
        bell.ring()
    assert is_readable(bell)
    assert os.eventfd_read(bell.event_fd) == 1
    bell.ring()
    assert not is_readable(bell)
    assert bell.seen() == 5


RING = """
import sys
from gangway.executor.messages import Bell
from gangway.executor.segment import Segment
Bell(Segment.attach(int(sys.argv[1])), 0).ring()
"""


def test_another_process_needs_nothing_but_the_descriptor() -> None:
    segment = Segment.create(4096, "bell")
    bell = Bell(segment, 0)
    bell.make_event_fd()
    bell.arm()
    subprocess.run([sys.executable, "-c", RING, str(segment.fd)], pass_fds=[segment.fd, bell.event_fd], check=True)
    assert is_readable(bell)
    os.close(bell.event_fd)
    segment.close()
