"""The core of an instance: executions have it from workers, give it back, and wait for one.

The main thread and the threads of the model are on the core that an execution has. Without one they go on where there
is room, with little weight.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from gangway.python_backend.calls import ATTACH_SECONDS
from gangway.python_backend.cpu_clock import CpuClock
from gangway.python_backend.executions import Execution
from gangway.python_backend.messages import WAITING_NICE, Connection
from gangway.python_backend.model_threads import ModelThreads, Status
from gangway.python_backend.open_executions import OpenExecutions
from gangway.python_backend.supervisor_link import THREAD_NAME

LOOK_SECONDS = 1.0


class Core:
    """Which core an instance's threads have. `nice`: their value with one; `cores`: all that are possible.

    `threads`: of the model. `has_since`: when the main thread was given one, of `time.monotonic`.
    """

    def __init__(self, executions: OpenExecutions, status: Status) -> None:
        self._executions = executions
        self.has_since = 0.0
        self.cores = os.sched_getaffinity(0)
        self._main = os.getpid()  # Python 3.11's main_thread().native_id is that of the process that forked this one
        self.nice = os.getpriority(os.PRIO_PROCESS, self._main)
        self._core = -1
        self._is_light = False  # the main thread has little weight
        self._may_raise = _may_raise(self.nice)
        own = [each.native_id or 0 for each in threading.enumerate() if each.name == THREAD_NAME]
        self.threads = ModelThreads(status, (self._main, *own), self.nice, self._may_raise, CpuClock(self._main))

    @property
    def waiting_threads(self) -> list[int]:
        """The threads that only wait, but for this one."""
        return list(self.threads.own - {self._main, threading.get_native_id()})

    def start_thread(self, work: Callable[..., None], *arguments: Any) -> None:
        """Start a thread that is none of the model's."""

        def run() -> None:
            with self._executions.lock:
                self.threads.begin_own(threading.get_native_id())
            try:
                work(*arguments)
            finally:
                with self._executions.lock:
                    self.threads.end_own(threading.get_native_id())

        threading.Thread(target=run, name=THREAD_NAME, daemon=True).start()

    # -- who has it

    def release(self, execution: Execution, goes_on: bool) -> None:
        """Give the core back; what remains goes to the front ends. `goes_on`: without a core, as what waits does."""
        with self._executions.lock:
            if execution.is_answering:
                return  # the main thread gives it back
            worker, execution.worker = execution.worker, None
            was_run, execution.is_run = execution.is_run, False
            if goes_on and self._executions.having_core() is None:
                self.unpin()
            self.settle_threads()
        if was_run:
            place = (os.getpid(),) if goes_on else (), execution.is_begun
            outcomes = [{"left": [execution.number, index, *place]} for index in range(len(execution.responders))]
            tell(worker, {"done": outcomes, "memory_bytes": 0}, execution.ask)
            execution.leave()
        else:
            tell(worker, {"stopped": True, "waits": goes_on}, execution.ask)

    def release_all(self, executions: Iterable[Execution], goes_on: bool = False) -> bool:
        """Give the cores of these back; return whether there was any."""
        having = [each for each in executions if each.worker is not None]
        for each in having:
            self.release(each, goes_on)
        return bool(having)

    def acquire(self) -> None:
        """Wait until one of the open executions, or one that can begin, has a core, or nobody waits for any of them."""
        executions = self._executions
        asked: tuple[Execution, Connection] | None = None
        with executions.lock:
            while (having := executions.having_core()) is None:
                # A worker that has come may have gone again before this thread has seen it.
                if asked is None or asked[1] not in asked[0].attached or not asked[0].wants_core:
                    executions.note(is_computing=False)  # a run that begins now brings a core
                    if asked is not None:
                        asked[0].wants_core = False
                    asked = next(((each, each.attached[0]) for each in executions.open if each.attached), None)
                    if asked is not None:
                        asked[0].wants_core = True
                        tell(asked[1], {"grant": asked[0].number})
                if asked is None and all(each.is_abandoned(ATTACH_SECONDS) for each in executions.open):
                    break
                executions.changed.wait(LOOK_SECONDS)
                self.has_since = time.monotonic()
            if asked is not None:
                asked[0].wants_core = False
            executions.note(is_computing=True)
            if having is None:
                self.unpin()
        if having is not None:
            self.pin(having.core)

    def end_beside(self, execution: Execution) -> None:
        """The last response to a request is there, or its client has gone."""
        with self._executions.lock:
            if not execution.is_beside or not (execution.is_answered or execution.was_wanted):
                return
            execution.is_beside = False
            worker, execution.worker = execution.worker, None
            if self._executions.having_core() is None:
                self.threads.place(None)
            self.settle_threads()
        tell(worker, {"stopped": True}, execution.ask)

    # -- where the threads are

    def pin(self, core: int) -> None:
        """Let the main thread have one core."""
        self.weigh(is_light=False)
        if core != self._core:
            try:
                os.sched_setaffinity(self._main, {core})
                self._core = core
            except OSError:
                pass  # it has been taken from us
        if self._executions.beside_with_core() is None:
            self.threads.place(core)

    def unpin(self) -> None:
        """Let the main thread go on where there is room for it; the lock is held."""
        self._core = -1
        with suppress(OSError):
            os.sched_setaffinity(self._main, self.cores)
        self.weigh(is_light=True)

    def unpin_unused(self) -> None:
        """Let the main thread go on where there is room for it, if it is pinned and nothing has a core."""
        if self._core >= 0:
            with self._executions.lock:
                if self._executions.having_core() is None:
                    self.unpin()

    def weigh(self, is_light: bool) -> None:
        """Have the main thread little weight, where it can have more again, or as much as with a core."""
        is_light = is_light and self._may_raise
        if is_light != self._is_light:
            self._is_light = is_light
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._main, self.nice + WAITING_NICE * is_light)

    def settle_threads(self) -> None:
        """Have the model's threads the core that there is for them; with none, little weight, or let them rest.

        The lock is held.
        """
        having = self._executions.beside_with_core() or self._executions.having_core()
        if having is not None:
            self.threads.place(having.core)
        elif self._executions.is_wanted:
            self.threads.place(None)
        else:
            self.threads.rest(looks=False)


def tell(connection: Connection | None, header: Mapping[str, Any] | bytes, number: int | None = None) -> None:
    """Send a worker or front end a message, if it is there. `number`: which of its messages it answers."""
    try:
        if connection is not None:
            connection.send(header, () if number is None else (b"%d" % number,))
    except OSError:
        pass  # the thread that receives finds the end


def _may_raise(nice: int) -> bool:
    """Whether a thread may have this nice value again after a larger one."""
    found = []

    def find_out() -> None:
        thread = threading.get_native_id()
        try:
            os.setpriority(os.PRIO_PROCESS, thread, nice + 1)
            os.setpriority(os.PRIO_PROCESS, thread, nice)
            found.append(True)
        except OSError:
            pass

    trial = threading.Thread(target=find_out)
    trial.start()
    trial.join()
    return bool(found)
