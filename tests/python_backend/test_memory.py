"""What errors say of the limit of an instance's memory."""

import errno
import resource
from collections.abc import Iterator

import pytest

from gangway.python_backend import memory

MIB = 1 << 50 >> 20  # more than there is


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MIB << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "mmap"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("std::bad_alloc"),
        ValueError("Cannot allocate memory (os error 12)"),
    ],
)
def test_an_error_for_want_of_memory_names_the_setting(error: Exception) -> None:
    assert f"{MIB} MiB of data; the model's parameter gangway_python_memory_mib" in memory.about(error)


@pytest.mark.parametrize("error", [ValueError("no weights"), OSError(errno.ENOENT, "file"), KeyError("memory_bytes")])
def test_other_errors_do_not(error: Exception) -> None:
    assert not memory.about(error)


def test_nothing_is_said_where_there_is_no_limit() -> None:
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    assert not memory.about(MemoryError())
