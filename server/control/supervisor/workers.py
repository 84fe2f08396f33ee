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
from pathlib import Path
from typing import Final

from gangway.executor.instance_addresses import InstanceAddresses
from gangway.executor.launch import WorkerPlan, start_worker
from gangway.executor.messages import Exit
from gangway.server.control.supervisor.log import ServerLog
from gangway.server.control.supervisor.processes import Child, SupervisedProcess
from gangway.server.control.supervisor.regions import RegionRegistry
from gangway.server.control.supervisor.scheduler import SchedulerControl
from gangway.server.control.supervisor.shared_memory import SharedMemory

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
        cores: tuple[int, ...],
        cache_dir: Path,
        scheduler: SchedulerControl,
        log: ServerLog,
        regions: RegionRegistry,
        instances: InstanceAddresses,
    ) -> None:
        self._memory = memory
        self._log = log
        self._scheduler = scheduler
        self._regions = regions
        self._plans = [
            WorkerPlan(
                index,
                core,
                memory.control.segment.fd,
                memory.arenas.fd,
                memory.io_fds,
                cache_dir,
                instances_fd=instances.fd,
                bell_fds=memory.bell_fds,
            )
            for index, core in enumerate(cores)
        ]
        self._kept = [self._keep(index) for index in range(len(cores))]
        self._cores = list(cores)  # where the running ones are
        self._stuck: set[int] = set()  # processes that were killed because they made no progress
        self._stopping = False

    def start(self) -> None:
        """Start all of them. Raises OSError."""
        for kept in self._kept:
            kept.start()

    @property
    def pids(self) -> list[int]:
        """Process ids by worker."""
        return [kept.pid for kept in self._kept]

    def kill(self, index: int, pid: int) -> None:
        """Kill a worker that hangs, unless it is dead already."""
        if self._kept[index].pid == pid:
            _log.error("worker %d (process %d) makes no progress; it is killed and replaced", index, pid)
            self._stuck.add(pid)
            self._kept[index].kill()

    def follow_cores(self) -> None:
        """End the workers whose core has been taken away, or is another one from now on."""
        for index, kept in enumerate(self._kept):
            if kept.is_running and (core := self._core_of(index)) != self._cores[index]:
                gone = f"core {self._cores[index]} is not available any more"
                _log.warning("%s: worker %d %s", gone, index, "ends" if core is None else f"moves to core {core}")
                kept.kill()

    def expect_exits(self) -> None:
        """From now on workers are not replaced: they were told to exit."""
        self._stopping = True
        for kept in self._kept:
            kept.stop_restarting()

    async def wait(self, timeout_seconds: float) -> None:
        """Wait until all have ended; kill those that take too long. The scheduler has ended.

        It has told them to exit, but a worker that was only starting then has dropped that with all that was meant for
        its predecessor. So they are told again.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_seconds
        while (left := self._alive()) and loop.time() < end:
            for index in left:
                self._memory.control.command(index, Exit().pack())
            await asyncio.sleep(EXIT_AGAIN_SECONDS)
        for kept in self._kept:
            if kept.child is not None:
                await kept.child.wait(0.0)

    def _alive(self) -> list[int]:
        return [index for index, kept in enumerate(self._kept) if kept.is_running]

    def _keep(self, index: int) -> SupervisedProcess:
        return SupervisedProcess(
            f"worker {index}",
            lambda: self._launch(index),
            lambda child: self._ended(index, child),
            begun=lambda: self._scheduler.worker_started(index),
            missing=lambda: self._missing(index),
            needed=True,
        )

    def _launch(self, index: int) -> "subprocess.Popen[bytes]":
        core = self._core_of(index)
        if core is None:
            raise OSError(errno.ENODEV, f"core {self._plans[index].core} is not available any more")
        with self._regions.worker(index) as regions, self._log.of_child(f"worker {index}") as stderr:
            plan = replace(self._plans[index], core=core, regions_fd=regions.fileno())
            process = start_worker(plan, stderr=stderr)
        self._cores[index] = core
        return process

    def _core_of(self, index: int) -> int | None:
        """Return the core that a worker is for at this moment, None if there is none."""
        available = os.sched_getaffinity(0)
        core = self._plans[index].core
        if core in available:
            return core
        if any(plan.core in available for plan in self._plans):
            return None
        return dict(enumerate(sorted(available))).get(index)

    def _ended(self, index: int, child: Child) -> None:
        if self._stopping:
            return
        control = self._memory.control
        state, status = control.status(index), child.returncode or 0
        lease = state.lease
        if state.pid == child.pid:
            self._kept[index].has_become_ready()
        # A library that calls exit() while it computes ends the process as surely as a signal does.
        crashed = child.pid in self._stuck or -status in CRASHES or (status > 0 and lease is not None)
        self._stuck.discard(child.pid)
        lease = lease if crashed else None
        control.server_block.worker_restarted(index)
        control.forget_worker(index)
        self._scheduler.worker_died(index, child.pid, crashed, lease)

    def _missing(self, index: int) -> None:
        self._scheduler.worker_missing(index)
        self._regions.worker_missing(index)
