"""Shared memory leaves nothing behind."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import posix_ipc
import pytest
from gangway.executor.segment import Segment, sweep_stale


def names(pid):
    return {path.name for path in Path("/dev/shm").glob(f"gangway.{pid}.*")}


def test_name_is_gone_at_once():
    segment = Segment.create(1 << 20, "test")
    assert not names(os.getpid())
    assert segment.size_bytes == 1 << 20
    segment.close()


def test_child_sees_what_the_parent_writes_and_back():
    segment = Segment.create(4096, "test")
    segment.view[:5] = b"hello"
    program = (
        "import sys; from gangway.executor.segment import Segment; s = Segment.attach(int(sys.argv[1]));"
        "s.view[10:15] = bytes(s.view[:5]).upper()"
    )
    subprocess.run([sys.executable, "-c", program, str(segment.fd)], pass_fds=[segment.fd], check=True, timeout=30)
    assert bytes(segment.view[10:15]) == b"HELLO"
    segment.close()


def allocated_bytes(segment):
    return os.fstat(segment.fd).st_blocks * 512


def test_punch_returns_memory_and_zero_clears_it():
    segment = Segment.create(1 << 22, "test")
    assert allocated_bytes(segment) == 0
    segment.view[:] = b"\xff" * (1 << 22)
    assert allocated_bytes(segment) == 1 << 22
    segment.punch(0, 1 << 21)
    assert allocated_bytes(segment) == 1 << 21
    segment.zero((1 << 21) + 100, 5000)
    assert bytes(segment.view[(1 << 21) + 99 : (1 << 21) + 5101]) == b"\xff" + bytes(5000) + b"\xff"
    segment.allocate(0, 1 << 20)
    assert allocated_bytes(segment) == (1 << 21) + (1 << 20)
    assert not any(segment.view[: 1 << 21])
    segment.close()


def test_more_memory_than_there_is_raises_instead_of_killing():
    free = os.statvfs("/dev/shm")
    size_bytes = free.f_frsize * free.f_bavail + (1 << 30)
    segment = Segment.create(size_bytes, "test")
    with pytest.raises(OSError) as caught:
        segment.allocate(0, size_bytes)
    assert caught.value.errno == errno.ENOSPC
    segment.close()


@pytest.mark.parametrize(("offset", "size_bytes"), [(-1, 10), (0, 4097), (4096, 1), (0, -1)])
def test_range_outside_is_refused(offset, size_bytes):
    segment = Segment.create(4096, "test")
    with pytest.raises(ValueError, match="outside"):
        segment.zero(offset, size_bytes)
    segment.close()


@pytest.mark.alone  # servers that start sweep, too
def test_sweep_takes_the_dead_and_leaves_the_living():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(30)
    dead, living = f"/gangway.{child.pid}.control", f"/gangway.{os.getppid()}.control"
    for name in (dead, living):
        posix_ipc.SharedMemory(name, posix_ipc.O_CREX, size=4096).close_fd()
    try:
        assert dead[1:] in sweep_stale()
        assert not names(child.pid)
        assert living[1:] in names(os.getppid())
    finally:
        posix_ipc.unlink_shared_memory(living)
