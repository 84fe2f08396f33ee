"""Threads of a model beside those of its instance; this process is the instance."""

import mmap
import os
import subprocess
import threading
from collections.abc import Iterator

import pytest

from gangway.python_backend.cpu_clock import CpuClock
from gangway.python_backend.messages import WAITING_NICE
from gangway.python_backend.model_threads import ModelThreads, Status
from testing.waiting import until

LOWEST_NICE = 19


@pytest.fixture
def status() -> Iterator[Status]:
    descriptor = os.memfd_create("status")
    os.ftruncate(descriptor, mmap.PAGESIZE)
    own = Status(descriptor, is_own=True)
    seen = Status(descriptor, is_own=False)
    own.load = 3
    assert seen.load == 3
    own.rests = True
    assert seen.rests
    own.rests = False
    own.own_threads = {5, 70_000}
    assert seen.own_threads == {5, 70_000}
    yield own
    os.close(descriptor)


class Spinner:
    """A thread that computes until it is told to end."""

    def __init__(self) -> None:
        self.is_over = False
        self._thread = threading.Thread(target=self._spin)
        self._thread.start()
        self.number = self._thread.native_id or 0

    def _spin(self) -> None:
        while not self.is_over:
            pass

    def end(self) -> None:
        self.is_over = True
        self._thread.join()


def rests(threads: ModelThreads, thread: int) -> bool:
    """Look at it, and let others compute meanwhile."""
    threads.rest(looks=True)
    return os.sched_getscheduler(thread) == os.SCHED_IDLE or os.getpriority(os.PRIO_PROCESS, thread) == LOWEST_NICE


@pytest.fixture
def alone() -> Iterator[int]:
    """A process that has started no others."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


def test_they_have_the_cores_and_the_weight_of_their_instance(status: Status, alone: int) -> None:
    nice, cores = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)
    may_raise = os.geteuid() == 0
    own = {thread.native_id or 0 for thread in threading.enumerate()} | set(map(int, os.listdir("/proc/self/task")))
    threads = ModelThreads(status, own, nice, may_raise, CpuClock(alone))
    spinner = Spinner()
    thread, core = spinner.number, min(cores)
    try:
        threads.place(core)
        assert os.sched_getaffinity(thread) == {core}
        assert os.getpriority(os.PRIO_PROCESS, thread) == nice
        threads.place(None)
        assert os.sched_getaffinity(thread) == cores
        assert os.getpriority(os.PRIO_PROCESS, thread) == nice + WAITING_NICE * may_raise
        until(lambda: rests(threads, thread))
        assert status.rests == may_raise
        assert (os.sched_getscheduler(thread) == os.SCHED_IDLE) == may_raise
        threads.place(core)
        assert not status.rests
        assert os.sched_getscheduler(thread) == os.SCHED_OTHER
        assert os.sched_getaffinity(thread) == {core}
        assert os.sched_getaffinity(0) == cores, "it is not the model's"
    finally:
        spinner.end()


def test_threads_that_come_and_go_are_not_the_model_s(status: Status, alone: int) -> None:
    threads = ModelThreads(status, {1, 2}, 0, False, CpuClock(alone))
    threads.begin_own(7)
    assert status.own_threads == threads.own == {1, 2, 7}
    threads.end_own(1)
    assert status.own_threads == threads.own == {2, 7}
