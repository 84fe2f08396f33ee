"""Shared memory leaves nothing behind."""

import os
import subprocess
import sys

import pytest

from gangway.executor.segment import Segment


def test_it_lies_outside_of_dev_shm():
    segment = Segment.create(1 << 20, "test")
    assert os.stat("/dev/shm").st_dev != os.fstat(segment.fd).st_dev
    assert not os.get_inheritable(segment.fd)
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


@pytest.mark.parametrize(("offset", "size_bytes"), [(-1, 10), (0, 4097), (4096, 1), (0, -1)])
def test_range_outside_is_refused(offset, size_bytes):
    segment = Segment.create(4096, "test")
    with pytest.raises(ValueError, match="outside"):
        segment.zero(offset, size_bytes)
    segment.close()
