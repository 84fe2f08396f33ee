"""Workers without a server: the smallest thing that can run a gang. For tests, benchmarks and profiling."""

import os
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from gangway.executor.control import ControlLayout, ControlSegment
from gangway.executor.launch import WorkerPlan, start_worker
from gangway.executor.leases import Lease, LeaseSpec
from gangway.executor.messages import Exit, Left, Load, Loaded, Message, Ready, Run, Unload, Unloaded, unpack
from gangway.executor.segment import Segment
from gangway.executor.slots import SlotRequest, SlotTable

START_TIMEOUT_S = 10.0
MessageT = TypeVar("MessageT", bound=Message)


class LocalExecutor:
    """One worker per core of `cores`, one io segment, and the caller as the scheduler. A context manager.

    Everything public is meant to be used: `control`, `arena`, `io`, `slots`, `workers` (processes), `leases`.
    """

    def __init__(
        self,
        cache_dir: Path,
        cores: Sequence[int],
        arena_bytes: int = 1 << 26,
        io_bytes: int = 1 << 26,
        slots: int = 16,
        leases: int = 4,
        spin_us: int = 20,
    ) -> None:
        self.control = ControlSegment.create(ControlLayout(workers=len(cores), front_ends=1, leases=leases))
        self.arena = Segment.create(arena_bytes, "arena")
        self.io = Segment.create(io_bytes, "io")
        self.slots = SlotTable(self.io, slots)
        self.slots.init()
        self.leases = self.control.leases
        self._messages: list[deque[Message]] = [deque() for _ in cores]
        self._plans = [
            WorkerPlan(rank, core, self.control.segment.fd, self.arena.fd, (self.io.fd,), cache_dir, spin_us)
            for rank, core in enumerate(cores)
        ]
        self.workers = [start_worker(plan) for plan in self._plans]

    def __enter__(self) -> Self:
        for worker in range(len(self.workers)):
            self.expect(worker, Ready)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self.workers:
            process.kill()
            process.wait()
        for segment in (self.control.segment, self.arena, self.io):
            os.close(segment.fd)  # mapped memory goes when the last view of it does

    def restart(self, worker: int) -> None:
        """Replace a worker's process (killed if it still runs) and wait until the new one is ready."""
        self.workers[worker].kill()
        self.workers[worker].wait()
        self.control.forget_worker(worker)
        self.workers[worker] = start_worker(self._plans[worker])
        self.expect(worker, Ready)

    def load(
        self, model_id: int, key: str, workers: Sequence[int] | None = None, in_the_background: bool = False
    ) -> None:
        """Load an artifact into all workers (or those given). Raises RuntimeError with the worker's reason.

        `in_the_background`: as workers in service do, who give way to whatever else wants their cores.
        """
        chosen = range(len(self.workers)) if workers is None else workers
        for worker in chosen:
            self.control.command(worker, Load(model_id, key, at_once=not in_the_background).pack())
        for worker in chosen:
            answer = self.expect(worker, Loaded)
            if not answer.ok:
                raise RuntimeError(f"worker {worker}: {answer.error}")

    def unload(self, model_id: int) -> None:
        """Make all workers forget a model."""
        for worker in range(len(self.workers)):
            self.control.command(worker, Unload(model_id).pack())
        for worker in range(len(self.workers)):
            self.expect(worker, Unloaded)

    def begin(self, request: SlotRequest, parts: int = 1) -> tuple[int, int]:
        """Take a slot, fill it and make it RUNNING, in so many parts; return slot and sequence.

        Raises RuntimeError if no slot is free.
        """
        slot = self.slots.acquire()
        if slot is None:
            raise RuntimeError("no free slot")
        self.slots.fill(slot, request)
        sequence = self.slots.submit(slot)
        self.slots.start(slot, sequence, parts)
        return slot, sequence

    def start(self, lease: int, spec: LeaseSpec, workers: Sequence[int]) -> int:
        """Initialise a lease and send Run to these workers, as ranks 0, 1, ...; return the term."""
        term = self.leases[lease].initialise(spec)
        for rank, worker in enumerate(workers):
            self.join(lease, rank, worker)
        return term

    def join(self, lease: int, rank: int, worker: int) -> None:
        """Send one worker into a lease."""
        self.control.command(worker, Run(lease, rank, self.lease(lease).term()).pack())

    def lease(self, index: int) -> Lease:
        """Return a lease."""
        return self.leases[index]

    def expect(self, worker: int, kind: type[MessageT], timeout_s: float = START_TIMEOUT_S) -> MessageT:
        """Return the worker's next message. Raises TimeoutError, or RuntimeError if it is not of this kind."""
        message = self.receive(worker, timeout_s)
        if not isinstance(message, kind):
            raise RuntimeError(f"worker {worker} sent {message} instead of {kind.__name__}")
        return message

    def left(self, workers: Sequence[int], timeout_s: float = START_TIMEOUT_S) -> list[Left]:
        """Wait for one Left of each of these workers."""
        return [self.expect(worker, Left, timeout_s) for worker in workers]

    def receive(self, worker: int, timeout_s: float = START_TIMEOUT_S, spin_us: int = 0) -> Message:
        """Return the worker's next message. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        bell = self.control.scheduler_bell
        while not self._messages[worker]:
            seen = bell.seen()
            if not self._collect():
                left_us = int((deadline - time.monotonic()) * 1e6)
                if left_us <= 0:
                    raise TimeoutError(f"no message from worker {worker} within {timeout_s} s")
                bell.wait(seen, spin_us, left_us)
        return self._messages[worker].popleft()

    def stop(self, timeout_s: float = START_TIMEOUT_S) -> list[int]:
        """Send Exit to all workers; return their exit statuses."""
        for worker in range(len(self.workers)):
            self.control.command(worker, Exit().pack())
        return [process.wait(timeout_s) for process in self.workers]

    def _collect(self) -> bool:
        found = False
        for ring, messages in zip(self.control.completion_rings, self._messages, strict=True):
            while (raw := ring.receive()) is not None:
                messages.append(unpack(raw))
                found = True
        return found
