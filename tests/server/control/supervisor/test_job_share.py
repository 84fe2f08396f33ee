"""Jobs in the background beside busy processes: real ones, on one core, judged by the CPU time that they get."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from gangway.server.control.supervisor.job_share import (
    LEAST_SHARE,
    CoreTime,
    WaitLog,
    core_time,
    is_starved,
    keep_share,
)
from tests.helpers.busy_core import SPIN

CORE = min(os.sched_getaffinity(0))
# A job with a child, as a linker is one.
IDLE_SPIN = f"""
import os
from gangway.base.process import die_with_parent
os.sched_setaffinity(0, {{{CORE}}})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
if os.fork():
    print(flush=True)
    os.wait()
die_with_parent()
{SPIN}
"""
NEEDS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="nobody else may leave SCHED_IDLE")


async def shared(job: int, other: int, cores: int, seconds: float) -> tuple[float, float]:
    """What a job and another process get of so many seconds that they have together, while the job's share is kept."""
    keep = asyncio.get_running_loop().create_task(keep_share(WaitLog("spinning"), job, cores))
    await asyncio.sleep(0.6)  # until its waits have been seen
    begin = core_time(job).used_s, core_time(other).used_s
    got = 0.0, 0.0
    while sum(got) < seconds:
        await asyncio.sleep(0.1)
        got = core_time(job).used_s - begin[0], core_time(other).used_s - begin[1]
    keep.cancel()
    with suppress(asyncio.CancelledError):
        await keep
    return got


def spinning() -> "subprocess.Popen[bytes]":
    process = subprocess.Popen([sys.executable, "-c", IDLE_SPIN], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"
    return process


@contextmanager
def stranger() -> Iterator[int]:
    """A busy process of ordinary priority on the same core that is no child of this one."""
    command = f"taskset -c {CORE} {sys.executable} -c '{SPIN}' >/dev/null & echo $!"
    done = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, check=True)
    try:
        yield int(done.stdout)
    finally:
        os.kill(int(done.stdout), signal.SIGKILL)


@NEEDS_ROOT
@pytest.mark.alone
@pytest.mark.long
def test_a_job_gets_a_quarter_of_a_core_beside_a_busy_process(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    job = spinning()
    try:
        with stranger() as other:
            used_s, others_s = asyncio.run(shared(job.pid, other, os.cpu_count() or 1, 8.0))
    finally:
        job.kill()
        job.communicate()
    assert used_s >= LEAST_SHARE * (used_s + others_s)
    assert caplog.text.count("spinning waits for cores, which other processes have: it had") == 1


def test_who_has_the_cores_decides() -> None:
    starved, fine, idle = CoreTime(0.01, 0.9), CoreTime(0.3, 0.7), CoreTime(0.01, 0.0)
    assert is_starved(starved, 0.0, 1.0, 2)
    assert not is_starved(starved, 1.5, 1.0, 2), "requests have them"
    assert not is_starved(fine, 0.0, 1.0, 2)
    assert not is_starved(idle, 0.0, 1.0, 2), "it wants none"


def test_the_log_says_once_that_a_job_waits_and_once_that_it_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    waits = WaitLog("compiling")
    for share, times in ((1.0, 40), (0.25, 400), (0.625, 100), (0.8125, 400), (0.0625, 100)):
        for _ in range(times):
            waits.add(CoreTime(share / 4, (1 - share) / 4), "requests")
    assert [record.getMessage() for record in caplog.records] == [
        "compiling waits for cores, which requests have: it had 1.2 s of CPU time and waited for 3.8 s",
        "compiling goes on: it had 44.7 s of CPU time and waited for 85.3 s",
        "compiling waits for cores, which requests have: it had 0.3 s of CPU time and waited for 4.7 s",
    ]
