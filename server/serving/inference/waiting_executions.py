"""Executions of Python models that wait without a core, for whatever it is, until they compute again.

The worker of an execution has seen by the CPU clock of its instance that it waits, and has ended the run as left. The
instance goes on by itself, with little weight. Here its clock is looked at every few milliseconds. When it advances, a
run is submitted that gives the instance a core, with deadline and priority of the request, until the instance waits
again. All of it happens on the loop's thread.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from gangway.executor.logs import OFTEN
from gangway.executor.python_instance import PATIENCE_MS
from gangway.python_backend.cpu_clock import CpuClock
from gangway.server.errors import RequestError, fault
from gangway.server.serving.pending import drive

_log = logging.getLogger(__name__)

# Of an instance that waits for long the clock is read less often: the core is late by a small part of the wait.
LOOK_S: Final = 0.004
MOST_LOOK_S: Final = 0.01
LOOKS_OF_WAIT: Final = 4
# What an instance computes in its wait is for its threads that beat, poll and answer us, if it is less than this share.
IDLE_SHARE: Final = 0.05
COMPUTED_NS: Final = 500_000  # beyond that: it goes on
LEAST_NS: Final = 100_000  # what it computes to answer us is less
WANTED_LOOKS: Final = 2  # or where so many looks find that it would compute if others did not keep it from that
# A wait is short if it takes less than so many times a worker's patience: that is longer, then, the next time.
SHORT_WAITS: Final = 8
MOST_PATIENCE_MS: Final = 64
FIND_S: Final = 0.05  # from one search for processes that the instance has started to the next
PAUSE_S: Final = 0.05  # until an instance that has a core by other means is looked at again
PROBE_S: Final = 1.0  # until an execution that nobody wants is asked whether it has ended


class Wanted(Protocol):
    """An execution that waits, and for whom it goes on."""

    @property
    def left(self) -> "Place":
        """Where it is."""
        ...

    @property
    def urgency(self) -> tuple[int, int]:
        """The least is the first to have a core."""
        ...

    async def give_core(self, patience_ms: int) -> Sequence[int]:
        """Have a worker give it a core until it has computed little for so long; return when that has ended.

        Returns the instance's processes if it waits, else none. Raises RequestError.
        """
        ...

    def hold(self, who: object) -> None:
        """Somebody sees to its end."""

    def drop(self, who: object) -> None:
        """He sees to it no more."""

    def unwanted(self) -> "Wanted":
        """Return the same execution without a client's deadline."""
        ...


class Place(Protocol):
    """An execution of an instance. `pids`: the instance's process and those that it has started."""

    @property
    def address(self) -> str:
        """The instance's."""
        ...

    @property
    def execution(self) -> int:
        """Its number there."""
        ...

    @property
    def pids(self) -> Sequence[int]:
        """The processes."""
        ...


@dataclass
class _Execution:
    """One that waits. `failed`: of those who want its responses, by who they are."""

    wanted: Wanted
    failed: dict[object, Callable[[RequestError], None]] = field(default_factory=dict)


class _Instance:
    """One instance, and its executions that wait."""

    def __init__(self, pids: Sequence[int]) -> None:
        """Make it. `pids`: its process, and those that it has started. Raises OSError when it has ended."""
        self._clock = CpuClock(pids[0], pids[1:])
        self.executions: dict[int, _Execution] = {}
        self.has_core = False
        self.patience_ms = PATIENCE_MS
        self.wait()

    def wait(self, pause_s: float = 0.0) -> None:
        """It waits, from now on."""
        self._began_s = self._looked_s = time.monotonic()
        self._find_s = self._began_s + FIND_S
        self._due_s = self._began_s + max(LOOK_S, pause_s)
        self._probe_s = self._began_s + PROBE_S
        self._computed_ns, self._excess_ns = self._clock.read_ns(), 0.0
        self._wanted_looks = 0

    @property
    def waited_s(self) -> float:
        """How long it has waited."""
        return time.monotonic() - self._began_s

    def leave_out(self, threads: Sequence[int]) -> None:
        """Look no more at these threads."""
        self._clock.leave_out(threads)

    def look(self, now_s: float) -> _Execution | None:
        """Return what is to have a core, if it goes on. Raises OSError when its process has ended."""
        if self.has_core or now_s < self._due_s:
            return None
        if now_s > self._find_s:
            self._find_s = now_s + FIND_S
            self._clock.find_others()
        computed_ns, passed_ns = self._clock.read_ns(), (now_s - self._looked_s) * 1e9
        if computed_ns - self._computed_ns > LEAST_NS:
            self._wanted_looks = self._wanted_looks + 1 if self._clock.is_runnable() else 0
        self._excess_ns = max(0.0, self._excess_ns + computed_ns - self._computed_ns - IDLE_SHARE * passed_ns)
        self._computed_ns, self._looked_s = computed_ns, now_s
        self._due_s = now_s + min(MOST_LOOK_S, max(LOOK_S, (now_s - self._began_s) / LOOKS_OF_WAIT))
        if self._excess_ns > COMPUTED_NS or self._wanted_looks >= WANTED_LOOKS:
            return min(self.executions.values(), key=lambda each: each.wanted.urgency)
        if now_s > self._probe_s:
            self._probe_s = now_s + (now_s - self._began_s)
            return next((each for each in self.executions.values() if not each.failed), None)
        return None

    def note_switch(self) -> None:
        """Have the worker be more patient with waits that are short."""
        if self.waited_s * 1000 < SHORT_WAITS * self.patience_ms:
            self.patience_ms = min(2 * self.patience_ms, MOST_PATIENCE_MS)
        else:
            self.patience_ms = max(self.patience_ms // 2, PATIENCE_MS)


class WaitingExecutions:
    """All executions of a front end's requests that wait. For the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._instances: dict[str, _Instance] = {}  # by address
        self._is_looking = False

    def watch(self, wanted: Wanted, who: object = None, failed: Callable[[RequestError], None] | None = None) -> None:
        """Look after an execution that waits. `failed` is called if it cannot go on. None: nobody wants it any more.

        It goes on all the same, as the instance can execute nothing else until then.
        """
        left = wanted.left
        try:
            if left.address not in self._instances:
                self._instances[left.address] = _Instance(left.pids)
        except OSError:  # its process has ended
            return
        executions = self._instances[left.address].executions
        if left.execution not in executions:
            executions[left.execution] = _Execution(wanted)
            wanted.hold(executions[left.execution])
        execution = executions[left.execution]
        if failed is not None:
            execution.failed[who] = failed
        elif not execution.failed:
            execution.wanted = wanted.unwanted()
        self._look_soon()

    def leave_out(self, left: Place, threads: Sequence[int]) -> None:
        """Look no more at these threads of an instance, which are none of its model's."""
        instance = self._instances.get(left.address)
        if instance is not None and threads:
            instance.leave_out(threads)

    def forget(self, left: Place) -> None:
        """An execution asks for a core itself."""
        instance = self._instances.get(left.address)
        if instance is not None and left.execution in instance.executions:
            self._forget(instance, instance.executions[left.execution])

    def leave(self, left: Place, who: object, is_over: bool) -> None:
        """Somebody wants no further responses. `is_over`: all of them are there."""
        instance = self._instances.get(left.address)
        execution = instance.executions.get(left.execution) if instance is not None else None
        if instance is None or execution is None or execution.failed.pop(who, None) is None or execution.failed:
            return
        if not is_over:
            execution.wanted = execution.wanted.unwanted()
        elif not instance.has_core:
            self._forget(instance, execution)

    def _look_soon(self) -> None:
        if not self._is_looking:
            self._is_looking = True
            self._loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._is_looking = False
        now_s = time.monotonic()
        for instance in list(self._instances.values()):
            try:
                execution = instance.look(now_s)
            except OSError:
                for ended in list(instance.executions.values()):
                    self._forget(instance, ended)
                continue
            if execution is not None:
                instance.has_core = True
                drive(self._give_core(instance, execution))
        if any(not instance.has_core for instance in self._instances.values()):
            self._look_soon()

    async def _give_core(self, instance: _Instance, execution: _Execution) -> None:
        instance.note_switch()
        begin_s = time.monotonic()
        try:
            waits = bool(await execution.wanted.give_core(instance.patience_ms))
        except RequestError as error:  # the end of its client's time is not that of the execution
            waits = True
            self._fail(execution, error)
        except Exception:
            _log.exception("a Python model could not go on: a fault of the server", extra=OFTEN)
            waits = False
            self._fail(execution, fault())
        instance.has_core = False
        try:
            instance.wait(PAUSE_S if time.monotonic() - begin_s < PATIENCE_MS / 2000 else 0.0)
        except OSError:
            waits = False
        if waits:
            self._look_soon()
        else:
            self._forget(instance, execution)

    @staticmethod
    def _fail(execution: _Execution, error: RequestError) -> None:
        failed, execution.failed = list(execution.failed.values()), {}
        for each in failed:
            each(error)
        execution.wanted = execution.wanted.unwanted()

    def _forget(self, instance: _Instance, execution: _Execution) -> None:
        left = execution.wanted.left
        execution.wanted.drop(execution)
        instance.executions.pop(left.execution, None)
        if not instance.executions and self._instances.get(left.address) is instance:
            del self._instances[left.address]
