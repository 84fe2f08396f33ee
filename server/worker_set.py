"""The worker processes: one per core, each replaced when it dies."""

import logging
from dataclasses import replace
from pathlib import Path

from gangway.executor.launch import WorkerPlan, start_worker
from gangway.server.children import Child, DeathLimit
from gangway.server.control import SchedulerControl
from gangway.server.in_place.keeper import MappingKeeper
from gangway.server.logs.server_log import ServerLog
from gangway.server.shared_memory import SharedMemory

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
        """Wait until all have ended; kill those that take too long."""
        for child in list(self._children.values()):
            await child.wait(timeout_seconds)

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
