"""What the benchmarks' numbers rest on: gaps between answers, /proc, verdicts."""

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.faults.__main__ import longest_gap_s
from testing.load import relative_error
from testing.processes import children_of, command_of, cpu_ns, descendants_of, file_mappings, memory_of, running_below
from testing.report import Report, format_cell

SECOND_NS = 1_000_000_000


def test_the_longest_gap_begins_before_the_end_and_lasts_until_the_next_answer() -> None:
    answers = [s * SECOND_NS for s in (1, 2, 5, 6, 16)]
    assert longest_gap_s(answers, begin_ns=0, end_ns=5 * SECOND_NS) == 3
    assert longest_gap_s(answers, begin_ns=3 * SECOND_NS, end_ns=5 * SECOND_NS) == 2
    assert longest_gap_s(answers, begin_ns=3 * SECOND_NS, end_ns=7 * SECOND_NS) == 10
    assert longest_gap_s(answers, begin_ns=5 * SECOND_NS, end_ns=17 * SECOND_NS) == float("inf")
    assert longest_gap_s(answers, begin_ns=17 * SECOND_NS, end_ns=18 * SECOND_NS) == float("inf")


def test_a_childs_cpu_time_and_command_are_seen() -> None:
    code = "import time; t = time.monotonic() + 0.3\nwhile time.monotonic() < t: pass\nprint(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin and child.stdout
        child.stdout.readline()
        assert child.pid in children_of(os.getpid())
        assert sys.executable in command_of(child.pid)
        assert 0.02e9 < cpu_ns(child.pid) < 5e9
        assert memory_of(child.pid).private_bytes > 1_000_000
        child.stdin.write(b"\n")


def test_what_a_process_has_forked_is_no_further_one() -> None:
    code = "import os; os.fork() or input(); print(flush=True); input()"
    shell = ["sh", "-c", '"$@"; exit', "sh"]  # one process more between it and this one
    with subprocess.Popen(
        [*shell, sys.executable, "-c", code, "marked words"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin and child.stdout
        child.stdout.readline()
        assert len(descendants_of(child.pid)) == 2
        assert running_below(os.getpid(), "marked words") == [child.pid]
        assert running_below(child.pid, "marked words") == children_of(child.pid)
        assert running_below(child.pid, "other words") == []
        child.stdin.write(b"\n\n")


def test_an_ended_process_costs_nothing_and_has_no_name() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert cpu_ns(child.pid) == 0
    assert command_of(child.pid) == ""
    assert children_of(child.pid) == []


def test_shares_of_a_mapped_file_add_up_to_its_size(tmp_path: Path) -> None:
    path = tmp_path / "shared-by-nobody.bin"
    path.write_bytes(os.urandom(1 << 20))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[::4096]) > 0  # touch every page
        (mapping,) = file_mappings(os.getpid(), "shared-by-nobody.bin")
    assert mapping.path == str(path)
    assert mapping.rss_bytes == mapping.pss_bytes == 1 << 20
    assert mapping.only_here_bytes == 1 << 20
    assert mapping.copied_bytes == 0


def test_errors_are_relative_to_the_largest_output() -> None:
    wanted = np.array([1.0, -10.0], dtype=np.float32)
    assert relative_error(np.array([1.5, -10.0], dtype=np.float32), wanted) == pytest.approx(0.05)


def test_a_missed_target_is_the_exit_status(tmp_path: Path) -> None:
    report = Report("title", {}, "command")
    report.target("kept", 1.0, 2.0)
    assert report.finish(None) == 0
    report.target("missed", 3.0, 2.0)
    assert report.finish(tmp_path / "report.json") == 1
    assert [t["measured"] for t in json.loads((tmp_path / "report.json").read_text())["targets"]] == [1.0, 3.0]
    report.target("not measured", float("nan"), 2.0)
    assert not report.targets[-1].met


@pytest.mark.parametrize(
    ("cell", "text"),
    [(1234.5, "1234"), (12.345, "12.3"), (0.12345, "0.123"), (1e-5, "1.00e-05"), (0.0, "0.00"), (7, "7"), ("x", "x")],
)
def test_numbers_have_three_digits(cell: float | str, text: str) -> None:
    assert format_cell(cell) == text
