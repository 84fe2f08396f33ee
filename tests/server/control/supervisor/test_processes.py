"""Children: real processes, watched by the event loop."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise

import pytest

from gangway.base.backoff import Backoff
from gangway.server.control.supervisor import processes as children
from gangway.server.control.supervisor.processes import Child, SupervisedProcess
from testing.processes import open_descriptors
from testing.waiting import until


def sleeper(seconds: float = 60) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", f"import time; time.sleep({seconds})"])


def test_a_killed_child_is_reported_once_and_leaks_no_descriptor() -> None:
    async def scenario() -> None:
        ended: list[Child] = []
        child = Child("sleeper", sleeper(), ended.append)
        os.kill(child.pid, signal.SIGKILL)
        await child.wait(10)
        assert ended == [child]
        assert (child.returncode, child.exit_text()) == (-9, "was killed by SIGKILL")

    before = open_descriptors(os.getpid())
    asyncio.run(scenario())
    until(lambda: open_descriptors(os.getpid()) <= before)


def test_wait_kills_what_does_not_end() -> None:
    async def scenario() -> None:
        child = Child("sleeper", sleeper(), lambda _: None)
        begin = time.monotonic()
        await child.wait(0.05)
        assert child.returncode == -signal.SIGKILL
        assert time.monotonic() - begin < 5

    asyncio.run(scenario())


def test_exit_status() -> None:
    async def scenario() -> None:
        child = Child("short", subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(3)"]), lambda _: None)
        await child.wait(10)
        assert child.exit_text() == "exited with status 3"

    asyncio.run(scenario())


def test_a_process_is_started_again_also_where_that_fails_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sleeper dies at once, more often than pauses are spared, and then there is no process to be had."""
    monkeypatch.setattr(children, "LONGEST_PAUSE_SECONDS", 0.02)
    launches: list[float] = []
    told: list[str] = []

    class Sleeper(SupervisedProcess):
        def launch(self) -> subprocess.Popen[bytes]:
            launches.append(time.monotonic())
            if len(launches) in (25, 26):
                raise BlockingIOError(errno.EAGAIN, "no process to be had")
            return sleeper(0 if len(launches) < 25 else 60)

        def begun(self) -> None:
            told.append("begun")

        def ended(self, child: Child) -> None:
            told.append(child.exit_text())

        def missing(self) -> None:
            told.append("missing")

    async def scenario() -> None:
        kept = Sleeper("sleeper")
        kept.start()
        while len(launches) < 27:
            await asyncio.sleep(0.01)
        assert kept.is_running
        kept.stop_restarting()
        kept.kill()
        assert kept.child is not None
        await kept.child.wait(10)
        assert len(launches) == 27

    asyncio.run(asyncio.wait_for(scenario(), 20))
    dead = ["begun", "exited with status 0"]
    assert told == [*dead * 24, "missing", "missing", "begun", "was killed by SIGKILL"]
    assert min(late - early for early, late in pairwise(launches[24:])) >= 0.02


def test_pauses_grow_to_a_bound_and_begin_anew_after_a_quiet_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pauses = Backoff(0.5, 3.0, settled_seconds=10, free=2)
    pauses.works()
    assert [pauses.failed() for _ in range(7)] == [0, 0, 0.5, 1, 2, 3, 3]
    pauses.works()
    now = 9.0
    assert pauses.failed() == 3, "not quiet for long enough"
    pauses.works()
    now = 19.0
    assert pauses.failed() == 0
    assert [pauses.not_begun() for _ in range(3)] == [0.5, 1, 2], "what never begins costs a pause from the first time"
