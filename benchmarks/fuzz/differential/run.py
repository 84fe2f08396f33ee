"""Cases in processes of their own: one that ends before its answer is the failure of the case it had."""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path

from benchmarks.conformance.runner import CaseRunner
from benchmarks.fuzz.differential.cases import Case
from benchmarks.fuzz.differential.judge import Verdict, judge
from gangway.executor.launch import available_cores

CRASHED, LONGEST_S = "crashed", 120.0
_STOP_S = 5.0


def run(cases: Iterator[Case], jobs: int, progress: Callable[[Verdict], None], until_s: float = float("inf")) -> None:
    """Judge all cases, or those begun before a time of the monotonic clock, in `jobs` processes."""
    cores = available_cores()
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gangway-differential-")))
        children = [_Child(root, cores[index % len(cores)]) for index in range(jobs)]
        for child in children:
            stack.callback(child.end)
        while True:
            for child in children:
                if child.case is None and time.monotonic() < until_s and (case := next(cases, None)):
                    child.give(case)
            busy = [child for child in children if child.case]
            if not busy:
                return
            ready = wait([child.pipe for child in busy], timeout=1)
            for child in busy:
                if verdict := child.answer(child.pipe in ready):
                    progress(verdict)


class _Child:
    """A process that judges one case after the other."""

    def __init__(self, root: Path, core: int) -> None:
        self._root, self._core = root, core
        self.case: Case | None = None
        self._count = 0
        self._start()

    def _start(self) -> None:
        self._count += 1
        self._stage = "ours"
        self.pipe, theirs = multiprocessing.Pipe()
        folder = self._root / f"{id(self)}.{self._count}"
        folder.mkdir()
        self._process = multiprocessing.get_context("fork").Process(target=_serve, args=(theirs, folder, self._core))
        self._process.start()
        theirs.close()

    def give(self, case: Case) -> None:
        """Begin a case."""
        self.case, self._since_s, self._stage = case, time.monotonic(), "ours"
        self.pipe.send(case)

    def answer(self, ready: bool) -> Verdict | None:
        """Return how the case went, if that is known."""
        assert self.case
        if ready:
            try:
                message: Verdict | str = self.pipe.recv()
            except (EOFError, ConnectionResetError):
                self._process.join()
                return self._failed(f"the process ended with {self._process.exitcode}")
            if isinstance(message, str):
                self._stage = message
                return None
            self.case = None
            return message
        if time.monotonic() - self._since_s > LONGEST_S:
            return self._failed(f"no answer within {LONGEST_S:.0f} s")
        return None

    def _failed(self, why: str) -> Verdict:
        assert self.case
        verdict, self.case = Verdict(self.case, CRASHED, f"{self._stage}: {why}"), None
        self.end()
        self._start()
        return verdict

    def end(self) -> None:
        """Stop the process."""
        with suppress(OSError):
            self.pipe.send(None)
        self._process.join(_STOP_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self.pipe.close()


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
