"""Models are loaded and unloaded by a thread of their own, while the worker goes on running leases.

Opening a model takes a millisecond or, in onnxruntime, seconds; a gang whose rank was away for so long would stand
still. The thread gets the worker's core only when nobody else wants it; a hundredth of it if that takes too long, or if
queries for onnxruntime might need the interpreter meanwhile. A worker that no gang can have before gives way to nobody.
Only the thread that runs leases touches the worker itself: results come to it by a nudge.
"""

import os
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gangway.artifact.reader import ArtifactError
from gangway.executor import _native
from gangway.executor.complain import complain
from gangway.executor.messages import Load, Loaded, Unload, Unloaded
from gangway.executor.process import as_before, give_way, give_way_less, return_freed_memory
from gangway.executor.program import load_program

NICE: Final = 15  # a hundredth of a core that a gang wants, too
PATIENCE_SECONDS: Final = 2.0  # with a core that is never free
SWITCH_SECONDS: Final = 0.0005  # how long it may hold the interpreter, which queries for onnxruntime need


@dataclass(frozen=True)
class _Done:
    answer: Loaded | Unloaded
    program: _native.Program | None


class ModelJobs:
    """Everything public is for the thread that calls `worker.loop`; `pending` jobs are not answered yet."""

    def __init__(self, worker: _native.Worker, cache_dir: Path) -> None:
        self._worker = worker
        self._cache_dir = cache_dir
        self._done: queue.SimpleQueue[_Done] = queue.SimpleQueue()
        self._programs: dict[
            int, _native.Program
        ] = {}  # a second reference: what an unload frees is freed by the thread
        self._last: threading.Thread | None = None
        self.pending = 0

    def give(self, job: Load | Unload) -> None:
        """Begin with a job; those before it are done first."""
        sys.setswitchinterval(SWITCH_SECONDS)
        if isinstance(job, Unload):
            self._worker.set_program(job.model_id, None)
        self.pending += 1
        thread = threading.Thread(target=self._work, args=(job, self._last), name="models", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread can be started: better a gang that stands still for a while than no model
            self._work(job, self._last, gives_way=False)
        else:
            self._last = thread

    def answer(self) -> None:
        """Take over what has been loaded, and tell the scheduler what has been done."""
        while not self._done.empty():
            done = self._done.get()
            self.pending -= 1
            self._worker.set_program(done.answer.model_id, done.program)
            self._worker.send(done.answer.pack())

    def _work(self, job: Load | Unload, before: threading.Thread | None, gives_way: bool = True) -> None:
        """Do one job after the one before. A thread for each: not everywhere may one come back that has given way."""
        try:
            if before is not None:
                before.join()
            at_once = isinstance(job, Load) and job.at_once
            with _in_the_background() if gives_way and not at_once else nullcontext():
                done = self._load(job) if isinstance(job, Load) else self._unload(job)
            self._done.put(done)
            del done
            self._worker.nudge()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)  # as whenever a worker fails: it is replaced

    def _load(self, job: Load) -> _Done:
        folder = self._cache_dir / job.key
        try:
            program = load_program(folder)
        except (ArtifactError, OSError, ValueError) as error:
            complain(f"cannot load {folder}: {error}")
            return _Done(Loaded(job.model_id, False, str(error).replace(f"{folder}/", "")), None)
        self._programs[job.model_id] = program
        return _Done(Loaded(job.model_id, True), program)

    def _unload(self, job: Unload) -> _Done:
        self._programs.pop(job.model_id, None)  # unmaps weights and kernels, or ends onnxruntime's session
        return_freed_memory()
        return _Done(Unloaded(job.model_id), None)


@contextmanager
def _in_the_background() -> Iterator[None]:
    """Let the calling thread give way for the block."""
    thread = threading.get_native_id()
    with as_before():
        if "onnxruntime" in sys.modules:
            give_way_less(thread, NICE)
            yield
            return
        patience = threading.Timer(PATIENCE_SECONDS, give_way_less, (thread, NICE))
        give_way(alone=True)  # the timer's thread must not wait as this one does
        try:
            patience.start()
        except RuntimeError:  # no thread can be started: nobody would end its patience
            give_way_less(thread, NICE)
            yield
            return
        try:
            yield
        finally:
            patience.cancel()
            patience.join()
