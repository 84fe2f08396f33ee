"""Executions that wait are given a core when they go on, and cost next to nothing until then."""

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gangway.python_backend.cpu_clock import CpuClock
from gangway.server.serving.inference.waiting_executions import MOST_POLL_S, WaitingExecutions
from gangway.server.serving.loop import ServingLoop

TIMEOUT_S = 20
WAIT_S = 1.0
MOST_WAKES = 20  # in that time: looks after 20, 40, 80, 160, 320, 570, 820 ms, and what others do
INSTANCE = """
import os, sys, time
def spin():
    while True: pass
def beat():  # one part in two hundred
    while True:
        time.sleep(0.02)
        end = time.thread_time() + 0.0001
        while time.thread_time() < end: pass
print(flush=True)
for line in sys.stdin:
    if line == "child\\n" and os.fork(): continue
    beat() if line == "beat\\n" else spin()
"""


@dataclass
class Execution:
    """One that waits, in a process of its own.

    `given`: how long it had computed each time that it was given a core, ns.
    """

    process: "subprocess.Popen[str]"
    given: "queue.SimpleQueue[int]" = field(default_factory=queue.SimpleQueue)
    execution: int = 1
    urgency: tuple[int, int] = 0, 0
    goes_on: bool = False

    @property
    def address(self) -> str:
        return f"instance {self.process.pid}"

    @property
    def pids(self) -> Sequence[int]:
        return (self.process.pid,)

    @property
    def kept(self) -> "Execution":
        return self

    async def give_core(self, patience_ms: int) -> Sequence[int]:
        """It ends with the core that it gets."""
        self.given.put(CpuClock(self.process.pid).read_ns())
        return ()

    def hold(self, who: object) -> None:
        """Nobody asks."""

    def drop(self, who: object) -> None:
        """Nobody asks."""

    def unwanted(self) -> "Execution":
        return self

    def does(self, what: str) -> None:
        """Have the process do something."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()


@pytest.fixture
def serving() -> Iterator[ServingLoop]:
    made = ServingLoop()
    made.start()
    yield made
    made.stop()


@pytest.fixture
def waits(serving: ServingLoop) -> Iterator[Execution]:
    command = [sys.executable, "-c", INSTANCE]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        made = Execution(process)
        executions = WaitingExecutions(serving.loop)
        serving.call(executions.watch, made, "client", lambda error: None)
        yield made
        os.killpg(process.pid, 9)


def wakes_of(serving: ServingLoop) -> int:
    """How often the loop's thread has been woken."""

    async def find() -> int:
        lines = Path(f"/proc/self/task/{threading.get_native_id()}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))

    return serving.run(find(), TIMEOUT_S)


@pytest.mark.parametrize("what", ["spin", "child"])
def test_what_goes_on_is_given_a_core(waits: Execution, what: str) -> None:
    """Also if it is a process that it has started while it waited."""
    waits.does(what)
    waits.given.get(timeout=TIMEOUT_S)


# Where cores are busy, a beat gets its core at a tick, at which the kernel looks at alarms: each one rings then.
@pytest.mark.parametrize("what", ["", pytest.param("beat", marks=pytest.mark.alone)])
def test_what_waits_is_hardly_looked_at(serving: ServingLoop, waits: Execution, what: str) -> None:
    """The loop's thread sleeps meanwhile. What computes next to nothing, as a heartbeat does, waits, too."""
    if what:
        waits.does(what)
    before = wakes_of(serving)
    with pytest.raises(queue.Empty):
        waits.given.get(timeout=WAIT_S)
    assert wakes_of(serving) - before <= MOST_WAKES


def test_a_long_wait_is_no_reason_to_come_late(waits: Execution) -> None:
    """The next look would come too late: the kernel tells when it has computed."""
    with pytest.raises(queue.Empty):
        waits.given.get(timeout=2 * MOST_POLL_S)
    before_ns = CpuClock(waits.process.pid).read_ns()
    waits.does("spin")
    assert waits.given.get(timeout=TIMEOUT_S) - before_ns < MOST_POLL_S / 2 * 1e9
