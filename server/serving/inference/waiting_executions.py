"""Executions of Python models that wait without a core, for whatever it is, until they compute again.

The worker of an execution has seen by the CPU clock of its instance that it waits, and has ended the run; the instance
keeps the request, and goes on by itself with little weight. Here an alarm rings when it has computed for a moment. When
its clock has then advanced enough, a run is submitted that gives the instance a core, with deadline and priority of the
request, until the instance waits again. All of it happens on the loop's thread. One that has lost its core to others,
while it computes, is given one at once.

Beside that its clock is looked at now and then, the less often the longer it waits. So processes are found that it has
started meanwhile, and executions that nobody wants.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from gangway.base.logs import OFTEN
from gangway.executor.python_instance import PATIENCE_MS
from gangway.python_backend.cpu_clock import CpuClock, is_runnable
from gangway.server.errors import RequestError, fault
from gangway.server.serving.inference.cpu_alarms import CpuAlarm, CpuAlarms
from gangway.server.serving.pending import drive

_log = logging.getLogger(__name__)

FIRST_POLL_S: Final = 0.02  # after its wait has begun; the next polls are after twice the time, each
MOST_POLL_S: Final = 0.25
POLL_S: Final = 0.004  # after it has computed something, but not enough
ALARM_NS: Final = 100_000  # of computing; what it computes to answer us is less
# What an instance computes in its wait is for its threads that beat, poll and answer us, if it is less than this share.
IDLE_SHARE: Final = 0.05
COMPUTED_NS: Final = 500_000  # beyond that: it goes on
WANTED_POLLS: Final = 2  # or where so many polls find that it would compute if others did not keep it from that
# A wait is short if it takes less than so many times a worker's patience: that is longer, then, the next time.
SHORT_WAITS: Final = 8
MOST_PATIENCE_MS: Final = 64
PAUSE_S: Final = 0.05  # until an instance that has a core by other means is looked at again
PROBE_S: Final = 1.0  # until an execution that nobody wants is asked whether it has ended


class Wanted(Protocol):
    """An execution that waits, and for whom it goes on."""

    @property
    def kept(self) -> "InstanceExecution":
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


class InstanceExecution(Protocol):
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

    @property
    def goes_on(self) -> bool:
        """Whether it computes, and has lost the core to others."""
        ...


@dataclass
class _Execution:
    """One that waits. `failed`: of those who want its responses, by who they are."""

    wanted: Wanted
    failed: dict[object, Callable[[RequestError], None]] = field(default_factory=dict)


class _Instance:
    """One instance, and its executions that wait."""

    def __init__(self, pids: Sequence[int], alarm: CpuAlarm) -> None:
        """Make it. `pids`: its process, and those that it has started. Raises OSError when it has ended."""
        self._clock, self.alarm = CpuClock(pids[0], pids[1:]), alarm
        self.executions: dict[int, _Execution] = {}
        self.has_core = False
        self.patience_ms = PATIENCE_MS
        self.next_poll: asyncio.TimerHandle | None = None
        self.wait()

    def wait(self) -> None:
        """It waits, from now on. Raises OSError when it has ended."""
        self._began_s = self._polled_s = time.monotonic()
        self._probe_s = self._began_s + PROBE_S
        self._computed_ns, self._excess_ns = self._clock.read_ns(), 0.0
        self._wanted_polls = 0

    @property
    def waited_s(self) -> float:
        """How long it has waited."""
        return time.monotonic() - self._began_s

    def leave_out(self, threads: Sequence[int]) -> None:
        """Look no more at these threads."""
        self._clock.leave_out(threads)

    def set_alarm(self) -> None:
        """Have it ring when one of its processes has computed."""
        self.alarm.set(self._clock.pids, ALARM_NS)

    def poll(self, has_rung: bool) -> tuple[_Execution | None, float]:
        """Return what is to have a core, if it goes on, and after how many seconds to look again.

        `has_rung`: so the alarm says. Raises OSError when its process has ended.
        """
        if not has_rung:
            self._clock.find_others()
        now_s = time.monotonic()
        new_ns, passed_ns = self._clock.read_ns() - self._computed_ns, (now_s - self._polled_s) * 1e9
        has_computed = new_ns >= ALARM_NS
        self._excess_ns = max(0.0, self._excess_ns + new_ns - IDLE_SHARE * passed_ns)
        self._computed_ns, self._polled_s = self._computed_ns + new_ns, now_s
        if has_computed and self._excess_ns <= COMPUTED_NS:
            self._wanted_polls = self._wanted_polls + 1 if is_runnable(self._clock.threads()) else 0
        again_s = POLL_S if has_computed else min(max(FIRST_POLL_S, now_s - self._began_s), MOST_POLL_S)
        if self._excess_ns > COMPUTED_NS or self._wanted_polls >= WANTED_POLLS:
            return min(self.executions.values(), key=lambda each: each.wanted.urgency), again_s
        if now_s > self._probe_s:
            self._probe_s = now_s + (now_s - self._began_s)
            return next((each for each in self.executions.values() if not each.failed), None), again_s
        return None, again_s

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
        self._alarms = CpuAlarms(loop)

    def watch(self, wanted: Wanted, who: object = None, failed: Callable[[RequestError], None] | None = None) -> None:
        """Look after an execution that waits. `failed` is called if it cannot go on. None: nobody wants it any more.

        It goes on all the same, as the instance can execute nothing else until then.
        """
        kept = wanted.kept
        if kept.address not in self._instances and not self._begin(kept):
            return
        executions = self._instances[kept.address].executions
        if kept.execution not in executions:
            executions[kept.execution] = _Execution(wanted)
            wanted.hold(executions[kept.execution])
        execution = executions[kept.execution]
        if failed is not None:
            execution.failed[who] = failed
        elif not execution.failed:
            execution.wanted = wanted.unwanted()
        if kept.goes_on:
            self._begin_to_give(self._instances[kept.address], executions[kept.execution])

    def leave_out(self, kept: InstanceExecution, threads: Sequence[int]) -> None:
        """Look no more at these threads of an instance, which are none of its model's."""
        instance = self._instances.get(kept.address)
        if instance is not None and threads:
            instance.leave_out(threads)

    def forget(self, kept: InstanceExecution) -> None:
        """An execution asks for a core itself."""
        instance = self._instances.get(kept.address)
        if instance is not None and kept.execution in instance.executions:
            self._forget(instance, instance.executions[kept.execution])

    def leave(self, kept: InstanceExecution, who: object, is_over: bool) -> None:
        """Somebody wants no further responses. `is_over`: all of them are there."""
        instance = self._instances.get(kept.address)
        execution = instance.executions.get(kept.execution) if instance is not None else None
        if instance is None or execution is None or execution.failed.pop(who, None) is None or execution.failed:
            return
        if not is_over:
            execution.wanted = execution.wanted.unwanted()
        elif not instance.has_core:
            self._forget(instance, execution)

    def _begin(self, kept: InstanceExecution) -> bool:
        """Begin to look at an instance; return whether its process is there."""
        alarm = self._alarms.make(lambda: self._poll(instance, has_rung=True))
        try:
            instance = self._instances[kept.address] = _Instance(kept.pids, alarm)
        except OSError:
            alarm.close()
            return False
        self._expect(instance, FIRST_POLL_S)
        return True

    def _expect(self, instance: _Instance, poll_s: float, has_alarm: bool = True) -> None:
        """Look at an instance when its alarm rings, and after this time."""
        if instance.next_poll is not None:
            instance.next_poll.cancel()
        instance.next_poll = self._loop.call_later(poll_s, self._poll, instance)
        if has_alarm:
            instance.set_alarm()

    def _poll(self, instance: _Instance, has_rung: bool = False) -> None:
        if instance.has_core or not instance.executions:
            return
        try:
            execution, again_s = instance.poll(has_rung)
        except OSError:
            for ended in list(instance.executions.values()):
                self._forget(instance, ended)
            return
        if execution is None:
            self._expect(instance, again_s)
        else:
            instance.note_switch()
            self._begin_to_give(instance, execution)

    def _begin_to_give(self, instance: _Instance, execution: _Execution) -> None:
        if not instance.has_core:
            instance.has_core = True
            drive(self._give_core(instance, execution))

    async def _give_core(self, instance: _Instance, execution: _Execution) -> None:
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
            instance.wait()
        except OSError:
            waits = False
        if not waits:
            self._forget(instance, execution)
        if instance.executions:
            has_other = time.monotonic() - begin_s < PATIENCE_MS / 2000  # core
            self._expect(instance, PAUSE_S if has_other else FIRST_POLL_S, has_alarm=not has_other)

    @staticmethod
    def _fail(execution: _Execution, error: RequestError) -> None:
        failed, execution.failed = list(execution.failed.values()), {}
        for each in failed:
            each(error)
        execution.wanted = execution.wanted.unwanted()

    def _forget(self, instance: _Instance, execution: _Execution) -> None:
        kept = execution.wanted.kept
        execution.wanted.drop(execution)
        instance.executions.pop(kept.execution, None)
        if not instance.executions and self._instances.get(kept.address) is instance:
            del self._instances[kept.address]
            instance.alarm.close()
            if instance.next_poll is not None:
                instance.next_poll.cancel()
