"""Cases in processes of their own: one that ends before its answer is the failure of the case it had."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.conformance.children import Task, run_in_children
from benchmarks.conformance.runner import CaseRunner
from benchmarks.fuzz.differential.cases import Case
from benchmarks.fuzz.differential.judge import Verdict, judge

CRASHED, LONGEST_S = "crashed", 120.0


def run(cases: Iterator[Case], jobs: int, progress: Callable[[Verdict], None], until_s: float = float("inf")) -> None:
    """Judge all cases, or those begun before a time of the monotonic clock, in `jobs` processes."""
    run_in_children(Task(_serve, _failed, LONGEST_S), cases, jobs, progress, until_s)


def _failed(case: Case, stage: str, why: str) -> Verdict:
    return Verdict(case, CRASHED, f"{stage or 'ours'}: {why}")


def _serve(pipe: Connection, folder: Path, core: int) -> None:
    for stream in (1, 2):  # both sides tell a lot
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    with CaseRunner(folder, core) as runner, suppress(EOFError):
        while case := pipe.recv():
            try:
                verdict = judge(case, runner, pipe.send)
            except Exception as error:
                verdict = Verdict(case, CRASHED, f"{type(error).__name__}: {error}"[:300])
            pipe.send(verdict)
