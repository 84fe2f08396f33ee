"""The worker processes: one per core, each replaced when it dies.

A core may be taken from the server while it runs (a cpuset is made smaller): its worker is ended, and started again
when the core is back. Of cores that are all others than at the start the first ones are used.
"""

import asyncio
import errno
import logging
import os
import signal
import subprocess
from dataclasses import replace
from typing import Final

from gangway.executor.instance_addresses import InstanceAddresses
from gangway.executor.launch import WorkerPlan, start_worker
from gangway.executor.messages import Exit
from gangway.scheduler.messages import WorkerDied
from gangway.server.control.supervisor.log import ServerLog
from gangway.server.control.supervisor.processes import Child, SupervisedProcess
from gangway.server.control.supervisor.regions import RegionRegistry
from gangway.server.control.supervisor.scheduler import SchedulerControl
from gangway.server.control.supervisor.shared_memory import SharedMemory
from gangway.server.options.server import GeneralOptions

EXIT_AGAIN_SECONDS: Final = 0.01
# How a process ends by what it computes. SIGKILL comes from outside, also where memory runs out.
CRASHES: Final = frozenset(
    {signal.SIGSEGV, signal.SIGFPE, signal.SIGILL, signal.SIGBUS, signal.SIGABRT, signal.SIGSYS, signal.SIGTRAP}
)
_log = logging.getLogger(__name__)


class WorkerSet:
    """Worker i serves core `cores[i]`. `instances`: those of Python models."""

    def __init__(
        self,
        memory: SharedMemory,
        options: GeneralOptions,
        scheduler: SchedulerControl,
        log: ServerLog,
        regions: RegionRegistry,
        instances: InstanceAddresses,
    ) -> None:
        self.memory, self.scheduler, self.log, self.regions = memory, scheduler, log, regions
        self.cores, cache_dir = options.cores, options.cache_dir
        fds = (memory.control.segment.fd, memory.arenas.fd, memory.io_fds)
        self._workers = [
            WorkerProcess(
                self, WorkerPlan(index, core, *fds, cache_dir, instances_fd=instances.fd, bell_fds=memory.bell_fds)
            )
            for index, core in enumerate(self.cores)
        ]

    def start(self) -> None:
        """Start all of them. Raises OSError."""
        for worker in self._workers:
            worker.start()

    def kill(self, index: int, pid: int) -> None:
        """Kill a worker that hangs, unless it is dead already."""
        if self._workers[index].pid == pid:
            _log.error("worker %d (process %d) makes no progress; it is killed and replaced", index, pid)
            self._workers[index].stuck_pid = pid
            self._workers[index].kill()

    def follow_cores(self) -> None:
        """End the workers whose core has been taken away, or is another one from now on."""
        for index, worker in enumerate(self._workers):
            if worker.is_running and (core := worker.wanted_core()) != worker.core:
                gone = f"core {worker.core} is not available any more"
                _log.warning("%s: worker %d %s", gone, index, "ends" if core is None else f"moves to core {core}")
                worker.kill()

    def expect_exits(self) -> None:
        """From now on workers are not replaced: they were told to exit."""
        for worker in self._workers:
            worker.stop_restarting()

    async def wait(self, timeout_seconds: float) -> None:
        """Wait until all have ended; kill those that take too long. The scheduler has ended.

        It has told them to exit, but a worker that was only starting then has dropped that with all that was meant for
        its predecessor. So they are told again.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_seconds
        while (left := [each for each in self._workers if each.is_running]) and loop.time() < end:
            for worker in left:
                self.memory.control.command(worker.index, Exit().pack())
            await asyncio.sleep(EXIT_AGAIN_SECONDS)
        for worker in self._workers:
            await worker.wait(0.0)


class WorkerProcess(SupervisedProcess):
    """One of a set. `core`: where the running process is. `stuck_pid`: which one was killed as it made no progress."""

    def __init__(self, workers: WorkerSet, plan: WorkerPlan) -> None:
        super().__init__(f"worker {plan.rank}", needed=True)
        self._set = workers
        self._plan = plan
        self.index = plan.rank
        self.core = plan.core
        self.stuck_pid = 0

    def launch(self) -> "subprocess.Popen[bytes]":
        """Start a process. Raises OSError."""
        core = self.wanted_core()
        if core is None:
            raise OSError(errno.ENODEV, f"core {self._plan.core} is not available any more")
        with self._set.regions.worker(self.index) as regions, self._set.log.of_child(self.name) as stderr:
            plan = replace(self._plan, core=core, regions_fd=regions.fileno())
            process = start_worker(plan, stderr=stderr)
        self.core = core
        return process

    def begun(self) -> None:
        """Have the scheduler know that there is a process."""
        self._set.scheduler.worker_started(self.index)

    def missing(self) -> None:
        """Have nobody wait for it."""
        self._set.scheduler.worker_missing(self.index)
        self._set.regions.worker_missing(self.index)

    def wanted_core(self) -> int | None:
        """Return the core that it is for at this moment, None if there is none."""
        available = os.sched_getaffinity(0)
        if self._plan.core in available:
            return self._plan.core
        if available.intersection(self._set.cores):
            return None
        return dict(enumerate(sorted(available))).get(self.index)

    def ended(self, child: Child) -> None:
        """Tell the scheduler, and whether it has ended by what it computed."""
        if self.is_stopping:
            return
        control = self._set.memory.control
        state, status = control.status(self.index), child.returncode or 0
        lease = state.lease
        if state.pid == child.pid:
            self.has_become_ready()
        # A library that calls exit() while it computes ends the process as surely as a signal does.
        crashed = child.pid == self.stuck_pid or -status in CRASHES or (status > 0 and lease is not None)
        self.stuck_pid = 0  # another process may get the number
        control.server_block.worker_restarted(self.index)
        control.forget_worker(self.index)
        blamed = lease if crashed and lease is not None else -1
        self._set.scheduler.send(WorkerDied(self.index, child.pid, crashed, blamed))
