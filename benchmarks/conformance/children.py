"""Pieces of work in processes that may die: one that ends or hangs is replaced, and its piece has failed."""

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Generic, TypeVar

from gangway.executor.launch import available_cores

STOP_TIMEOUT_S = 5.0
WorkT = TypeVar("WorkT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Task(Generic[WorkT, ResultT]):
    """How pieces are done.

    `serve(pipe, folder, core)` is what a process does: it answers each piece that it receives, until it receives None.
    A text in place of an answer says what it is about to do. `failed(piece, about, why)` answers for a process.
    """

    serve: Callable[[Connection, Path, int], None]
    failed: Callable[[WorkT, str, str], ResultT]
    timeout_s: float


def run_in_children(
    task: Task[WorkT, ResultT],
    pieces: Iterator[WorkT],
    jobs: int,
    done: Callable[[ResultT], None],
    until_s: float = float("inf"),
) -> None:
    """Do all pieces, or those begun before a time of the monotonic clock, in so many processes; tell of each answer."""
    cores = available_cores()
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gangway-children-")))
        children = [_Child(task, root / str(index), cores[index % len(cores)]) for index in range(jobs)]
        for child in children:
            stack.callback(child.end)
        while True:
            for child in children:
                if child.piece is None and time.monotonic() < until_s:
                    child.give(next(pieces, None))
            busy = [child for child in children if child.piece is not None]
            if not busy:
                return
            ready = wait([child.pipe for child in busy], timeout=1)
            for child in busy:
                result = child.answer(child.pipe in ready)
                if result is not None:
                    done(result)


class _Child(Generic[WorkT, ResultT]):
    """A process that does one piece at a time."""

    def __init__(self, task: Task[WorkT, ResultT], root: Path, core: int) -> None:
        self._task, self._root, self._core = task, root, core
        self.piece: WorkT | None = None
        self._count = 0
        self._start()

    def _start(self) -> None:
        self._count += 1
        self.pipe, theirs = multiprocessing.Pipe()
        folder = self._root / str(self._count)
        folder.mkdir(parents=True)
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=self._task.serve, args=(theirs, folder, self._core))
        self._process.start()
        theirs.close()

    def give(self, piece: WorkT | None) -> None:
        """Begin a piece, if there is one."""
        self.piece, self._since_s, self._about = piece, time.monotonic(), ""
        if piece is not None:
            self.pipe.send(piece)

    def answer(self, ready: bool) -> ResultT | None:
        """Return the answer to the piece under way, if it is there or will never be."""
        if ready:
            try:
                message: ResultT | str = self.pipe.recv()
            except (EOFError, ConnectionResetError):
                self._process.join()
                return self._failed(f"the process ended with {self._process.exitcode}")
            if isinstance(message, str):
                self._about = message
                return None
            self.piece = None
            return message
        if time.monotonic() - self._since_s > self._task.timeout_s:
            return self._failed(f"no answer within {self._task.timeout_s:.0f} s")
        return None

    def _failed(self, why: str) -> ResultT:
        assert self.piece is not None
        result, self.piece = self._task.failed(self.piece, self._about, why), None
        self.end()
        self._start()
        return result

    def end(self) -> None:
        """Stop the process."""
        with suppress(OSError):
            self.pipe.send(None)
        self._process.join(STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self.pipe.close()
