"""Servers whose workers stand still, so that a test decides what comes before the next task."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gangway.executor.control import ControlSegment
from testing.live_server import LiveServer
from testing.processes import command_of

TIMEOUT_S = 30


@contextmanager
def stopped_workers(server: LiveServer) -> Iterator[None]:
    """Let no worker do anything while the block lasts; front end, scheduler and supervisor go on.

    Begins when no worker has anything to do. To be left within seconds: the workers of a gang that does not get on for
    10 s (`scheduler/watchdog.py`) are killed.
    """
    _await(server, lambda: _are_quiet(server))
    pids = server.pids()["worker"]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        _await(server, lambda: all(_is_stopped(pid) for pid in pids))
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):  # the test has killed it
                os.kill(pid, signal.SIGCONT)


def _await(server: LiveServer, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end, server.log.read_text()
        time.sleep(0.001)


def _are_quiet(server: LiveServer) -> bool:
    """Whether no worker is in a gang or has been told to be, as a new scheduler sees it."""
    pid = server.pids()["worker"][0]
    found = re.search(r"--control-fd=(\d+)", command_of(pid))
    assert found
    control = ControlSegment.attach(os.open(f"/proc/{pid}/fd/{found[1]}", os.O_RDWR))
    try:
        return all(control.quiet(rank) for rank in range(control.layout.workers))
    finally:
        control.segment.close()


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
