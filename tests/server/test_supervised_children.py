"""Children: real processes, watched by the event loop."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest
from gangway.server.children import Child, DeathLimit, TooManyDeathsError


def sleeper(seconds: float = 60) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", f"import time; time.sleep({seconds})"])


def test_a_killed_child_is_reported_once_and_leaks_no_descriptor() -> None:
    async def scenario() -> None:
        ended: list[Child] = []
        child = Child("sleeper", sleeper(), ended.append)
        os.kill(child.pid, signal.SIGKILL)
        await child.wait(10)
        assert ended == [child]
        assert (child.returncode, child.fate()) == (-9, "was killed by SIGKILL")

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(scenario())
    assert len(os.listdir("/proc/self/fd")) == before


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
        assert child.fate() == "exited with status 3"

    asyncio.run(scenario())


def test_death_limit_counts_within_its_window() -> None:
    limit = DeathLimit("worker", deaths=3, window_seconds=10)
    for now in (0.0, 1.0, 2.0, 11.5, 12.5):
        limit.count(now)
    with pytest.raises(TooManyDeathsError, match="the worker died 4 times within 10 seconds"):
        for now in (13.0, 13.0):
            limit.count(now)
