"""Limits of cgroups, both versions, and rlimits are found."""

import os
import resource
from concurrent.futures import ThreadPoolExecutor

import pytest

from gangway.base.host_limits import (
    FreeMemory,
    allocated_by,
    cpu_quota,
    idle_seconds,
    memory_limit,
    memory_limit_bytes,
)

MACHINE_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def group(tmp_path, files):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("files", "membership", "quota"),
    [
        ({}, "0::/", None),
        ({"cpu.max": "max 100000\n"}, "0::/", None),
        ({"cpu.max": "150000 100000\n"}, "0::/", 1.5),
        ({"a/cpu.max": "400000 100000\n", "a/b/cpu.max": "max 100000\n"}, "0::/a/b", 4.0),
        ({"cpu.max": "50000 100000\n"}, "0::/outside/of/this/mount", 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, "3:cpu,cpuacct:/", None),
        (
            {"cpu,cpuacct/x/cpu.cfs_quota_us": "250000", "cpu,cpuacct/x/cpu.cfs_period_us": "100000"},
            "3:cpu,cpuacct:/x",
            2.5,
        ),
        ({"cpuset/cpu.cfs_quota_us": "1", "cpuset/cpu.cfs_period_us": "1"}, "3:cpuset:/", None),
    ],
)
def test_quota(tmp_path, files, membership, quota):
    assert cpu_quota(group(tmp_path, files), membership) == quota


@pytest.mark.parametrize(
    ("files", "membership", "limit"),
    [
        ({}, "0::/", MACHINE_BYTES),
        ({"memory.max": "max\n"}, "0::/", MACHINE_BYTES),
        ({"a/memory.max": "3000000\n", "a/b/memory.max": "5000000\n"}, "0::/a/b", 3000000),
        ({"memory/x/memory.limit_in_bytes": "4000000\n"}, "4:memory:/x", 4000000),
        ({"memory/memory.limit_in_bytes": "9223372036854771712\n"}, "4:memory:/", MACHINE_BYTES),
        ({"memory/memory.limit_in_bytes": "6000000\n"}, "4:memory:/outside/of/this/mount", 6000000),
    ],
)
def test_memory_limit(tmp_path, files, membership, limit):
    assert memory_limit_bytes(group(tmp_path, files), membership) == limit


def test_memory_limit_says_what_it_is(tmp_path):
    assert str(memory_limit(group(tmp_path, {"memory.max": "440401920\n"}), "0::/")) == (
        "420 MiB of memory (memory.max of the cgroup)"
    )
    assert memory_limit(tmp_path / "none", "0::/").name == "the machine's"


@pytest.mark.parametrize(
    ("files", "membership", "free"),
    [
        ({}, "0::/", 7000 * 1024),
        ({"memory.max": "5000000", "memory.stat": "anon 1000000\nfile 3000000\nshmem 500000\n"}, "0::/", 3500000),
        (
            {
                "memory/memory.limit_in_bytes": "5000000",
                "memory/memory.stat": "rss 1\ntotal_cache 4000000\ntotal_rss 2000000\ntotal_shmem 100000\n",
            },
            "4:memory:/outside",
            2900000,
        ),
        ({"a/memory.max": "4000000", "a/memory.stat": "anon 4500000"}, "0::/a", 0),
    ],
)
def test_free_memory(tmp_path, files, membership, free):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    7000 kB\n")
    groups = group(tmp_path, files)
    assert FreeMemory(groups, membership, tmp_path / "proc").measure() == free


def test_address_space_bounds_memory(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MACHINE_BYTES // 2, before[1]))
        assert memory_limit_bytes(tmp_path, "0::/") == MACHINE_BYTES // 2
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_cores_have_idled_for_the_time_that_they_did_not_work_or_be_taken(tmp_path):
    ticks = os.sysconf("SC_CLK_TCK")
    lines = ("cpu  9 9 9 9 9 9 9 9 0 0", f"cpu0 1 2 3 {4 * ticks} {ticks} 6 7 8 0 0", f"cpu2 0 0 0 {ticks} 0 0 0 9 0 0")
    group(tmp_path, {"stat": "\n".join((*lines, "intr 0 0", "ctxt 1"))})
    assert idle_seconds((2, 0), tmp_path) == (1.0, 5.0)
    assert idle_seconds((0, 1), tmp_path) is None, "the container's system does not show this core"
    assert idle_seconds((0,), tmp_path / "absent") is None


def test_what_is_allocated_of_pages_that_the_process_has() -> None:
    """A thread keeps its last freed pages, and malloc gives them out again: resident memory does not grow then."""
    mib = 1 << 20

    def allocate() -> int:
        bytes(30 * mib)  # from now on, malloc takes smaller blocks from the thread's own pages
        held = [b"1" * mib for _ in range(40)]
        garbage: list[object] = [b"1" * (4 * mib)]
        garbage.append(garbage)
        del held, garbage
        _, allocated_bytes = allocated_by(lambda: ([b"2" * mib for _ in range(16)], [[] for _ in range(10_000)]))
        return allocated_bytes

    with ThreadPoolExecutor(1) as thread:
        assert 16 * mib <= thread.submit(allocate).result() < 18 * mib
