"""Servers whose workers stand still, so that a test decides what comes before the next task."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gangway.executor.control import ControlSegment
from testing.live_server import LiveServer
from testing.processes import command_of
from testing.waiting import until

TIMEOUT_S = 30


@contextmanager
def stopped_workers(server: LiveServer) -> Iterator[None]:
    """Let no worker do anything while the block lasts; front end, scheduler and supervisor go on.

    Begins when no worker has anything to do. To be left within seconds: the workers of a gang that does not get on for
    10 s (`scheduler/watchdog.py`) are killed.
    """
    until(lambda: _are_quiet(server), server.log.read_text)
    pids = server.pids()["worker"]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: all(_is_stopped(pid) for pid in pids), server.log.read_text)
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):  # the test has killed it
                os.kill(pid, signal.SIGCONT)


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
