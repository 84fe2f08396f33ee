"""The worker processes: one per core, each replaced when it dies."""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Final

from gangway.executor.launch import WorkerPlan, start_worker
from gangway.executor.messages import Exit
from gangway.server.children import Child, DeathLimit
from gangway.server.control import SchedulerControl
from gangway.server.in_place.keeper import MappingKeeper
from gangway.server.logs.server_log import ServerLog
from gangway.server.shared_memory import SharedMemory

EXIT_AGAIN_SECONDS: Final = 0.01
_log = logging.getLogger(__name__)


class WorkerSet:
    """Worker i serves core `cores[i]`."""

    def __init__(
        self,
        memory: SharedMemory,
        cores: tuple[int, ...],
        cache_dir: Path,
        scheduler: SchedulerControl,
        log: ServerLog,
        mappings: MappingKeeper,
    ) -> None:
        self._memory = memory
        self._log = log
        self._scheduler = scheduler
        self._mappings = mappings
        self._plans = [
            WorkerPlan(index, core, memory.control.segment.fd, memory.arenas.fd, memory.io_fds, cache_dir)
            for index, core in enumerate(cores)
        ]
        self._limit = DeathLimit("worker")
        self._children: dict[int, Child] = {}
        self._stopping = False
        scheduler.on_worker_stuck = self.kill

    def start(self) -> None:
        """Start all of them."""
        for index in range(len(self._plans)):
            self._start(index)

    @property
    def pids(self) -> list[int]:
        """Process ids by worker."""
        return [self._children[index].pid for index in range(len(self._plans))]

    def kill(self, index: int, pid: int) -> None:
        """Kill a worker that hangs, unless it is dead already."""
        if self._children[index].pid == pid:
            _log.error("worker %d (process %d) makes no progress; killing it", index, pid)
            self._children[index].kill()

    def expect_exits(self) -> None:
        """From now on workers are not replaced: they were told to exit."""
        self._stopping = True

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
        for child in list(self._children.values()):
            await child.wait(0.0)

    def _alive(self) -> list[int]:
        return [index for index, child in self._children.items() if child.returncode is None]

    def _start(self, index: int) -> None:
        with self._mappings.worker(index) as regions, self._log.of_child(f"worker {index}") as stderr:
            plan = replace(self._plans[index], regions_fd=regions.fileno())
            process = start_worker(plan, stderr=stderr)
        self._children[index] = Child(f"worker {index}", process, lambda child: self._exited(index, child))

    def _exited(self, index: int, child: Child) -> None:
        if self._stopping:
            return
        _log.error("worker %d (process %d) %s; starting another", index, child.pid, child.fate())
        self._limit.count()
        self._memory.control.server_block.worker_restarted(index)
        self._memory.control.forget_worker(index)
        self._scheduler.worker_died(index, child.pid)
        self._start(index)
