"""Arenas and workers: the memory and the cores that gangs need."""

import mmap
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from gangway.executor.control import ControlSegment
from gangway.executor.messages import LoadArtifact, Unload
from gangway.executor.segment import Segment

PAGE_BYTES = mmap.PAGESIZE
REST_US = 10e6  # unused for so long, an arena gives its memory back: what comes that seldom can wait for new memory


class Extents:
    """First-fit allocation of the bytes [0, capacity). Free extents are sorted and never adjacent.

    Pure arithmetic; alignment is the caller's.
    """

    def __init__(self, capacity: int) -> None:
        self._free = [(0, capacity)] if capacity else []

    @property
    def free_bytes(self) -> int:
        """Sum of the free extents."""
        return sum(size for _, size in self._free)

    def take(self, size: int) -> int | None:
        """Return the offset of `size` bytes, None when no free extent is long enough."""
        for index, (offset, free) in enumerate(self._free):
            if free >= size:
                self._free[index : index + 1] = [(offset + size, free - size)] if free > size else []
                return offset
        return None

    def give_back(self, offset: int, size: int) -> None:
        """Return what `take` handed out; adjacent extents become one."""
        merged: list[tuple[int, int]] = []
        for begin, length in sorted([*self._free, (offset, size)]):
            if merged and sum(merged[-1]) == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((begin, length))
        self._free = merged


@dataclass(eq=False)
class _Arena:
    offset: int
    owner: "_ModelArenas"
    committed_bytes: int = 0  # from its start: pages that exist, so that a worker's store cannot fail with SIGBUS
    idle_since_us: float = 0.0


@dataclass
class _ModelArenas:
    row_bytes: int
    arena_bytes: int
    idle: list[_Arena] = field(default_factory=list)
    busy: dict[int, _Arena] = field(default_factory=dict)
    reserved: set[int] = field(default_factory=set)  # busy arenas that no query uses yet


@dataclass(frozen=True)
class ArenaUsage:
    """Arenas of one model that queries have, and the memory of all its arenas."""

    in_use: int
    size_bytes: int


class ArenaPool:
    """Hands out arenas, in which queries under way keep their activations. A model owns as many as there are leases.

    An arena is zero when a model gets it, and no other model has it before an unload. Kernels rely on it: halos are
    zero at first, and each model keeps its own zero. The pool is sparse: an arena costs memory from its first use on,
    for as many rows as were ever asked of it, rounded up to a power of two, so that batches of other sizes soon find
    arenas. The smallest arena that suffices is used again first, of equal ones the last one used, so that batches of
    all sizes do not make every arena one for the largest.

    Beyond `kept_bytes` in all, idle arenas give their memory back before another one takes more, the least recently
    used first. Arenas in use may exceed that. `reclaim`, called now and then, gives back what is idle for long.
    """

    def __init__(self, segment: Segment, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._committed_bytes = 0
        self._most_bytes = 0  # were committed at once since the last model came, which takes memory of its own
        self._now_us = 0.0  # of the last look
        self._idle: dict[int, _Arena] = {}  # with memory, by offset; used longest ago first
        self._segment = segment
        self._extents = Extents(segment.size_bytes // PAGE_BYTES * PAGE_BYTES)
        self._models: dict[int, _ModelArenas] = {}
        segment.punch(0, segment.size_bytes)  # a predecessor's models may have written anything

    @property
    def committed_bytes(self) -> int:
        """The memory of all arenas."""
        return self._committed_bytes

    def can_never_hold(self, model_id: int, rows: int) -> bool:
        """Whether memory for `rows` rows was not to be had although no query has an arena, and never was before.

        What has been had before is to be had again: now messages take it that front ends read.
        """
        in_use = any(len(model.busy) > len(model.reserved) for model in self._models.values())
        return not in_use and self._needed_bytes(self._models[model_id], rows) > self._most_bytes

    def usage(self, model_id: int) -> ArenaUsage:
        """Return what a model has now; nothing if it is not there."""
        model = self._models.get(model_id)
        if model is None:
            return ArenaUsage(0, 0)
        arenas = (*model.idle, *model.busy.values())
        return ArenaUsage(len(model.busy) - len(model.reserved), sum(arena.committed_bytes for arena in arenas))

    def add_model(self, model_id: int, row_bytes: int, max_rows: int, count: int) -> None:
        """Reserve `count` arenas of up to `max_rows` rows. Raises MemoryError, having reserved none."""
        arena_bytes = max(-(-row_bytes * max_rows // PAGE_BYTES), 1) * PAGE_BYTES
        model = _ModelArenas(row_bytes, arena_bytes)
        self._models[model_id] = model
        for _ in range(count):
            offset = self._extents.take(arena_bytes)
            if offset is None:
                self.remove_model(model_id)
                raise MemoryError(
                    f"{count} arenas of {arena_bytes} bytes do not fit: {self._extents.free_bytes} bytes are free"
                )
            model.idle.append(_Arena(offset, model))
        self._most_bytes = self._committed_bytes

    def remove_model(self, model_id: int) -> None:
        """Give the model's memory back to the machine. None of its arenas may be in use."""
        model = self._models.pop(model_id)
        assert not model.busy, "arena in use"
        for arena in model.idle:
            self._idle.pop(arena.offset, None)
            self._committed_bytes -= arena.committed_bytes
            if arena.committed_bytes:
                self._segment.punch(arena.offset, arena.committed_bytes)
            self._extents.give_back(arena.offset, model.arena_bytes)

    def acquire(self, model_id: int, rows: int) -> int | None:
        """Return the offset of an arena with memory for `rows` rows, None when all are in use.

        Raises OSError when there is no memory for it, although every idle arena but this one has given its own back.
        """
        model = self._models[model_id]
        if not model.idle:
            return None
        needed = self._needed_bytes(model, rows)
        arena = _fitting(model.idle, needed)
        if needed > arena.committed_bytes:
            self._make_room(needed - arena.committed_bytes, arena)
            self._commit(arena, needed)
        self._idle.pop(arena.offset, None)
        model.idle.remove(arena)
        model.busy[arena.offset] = arena
        return arena.offset

    def reserve(self, model_id: int) -> int | None:
        """Acquire an arena for one row of a query that is to come; until then no query uses it."""
        offset = self.acquire(model_id, 1)
        if offset is not None:
            self._models[model_id].reserved.add(offset)
        return offset

    def use_reserved(self, model_id: int, offset: int) -> None:
        """Note that a query uses an arena that was reserved."""
        self._models[model_id].reserved.discard(offset)

    def release(self, model_id: int, offset: int) -> None:
        """Take back what `acquire` returned; nobody uses it any more."""
        model = self._models[model_id]
        arena = model.busy.pop(offset)
        model.reserved.discard(offset)
        model.idle.append(arena)
        arena.idle_since_us = self._now_us
        self._idle[offset] = arena

    def reclaim(self, now_us: float) -> None:
        """Give back the memory of the arena that has been idle for longest, if that is long; one at a time.

        The last one that a model used stays unless another is in use: a model that is seldom asked need not wait for
        memory each time.
        """
        self._now_us = now_us
        for arena in self._idle.values():
            if arena.idle_since_us + REST_US > now_us:
                return
            if arena.owner.busy or arena is not arena.owner.idle[-1]:
                self._give_back(arena)
                return

    @staticmethod
    def _needed_bytes(model: _ModelArenas, rows: int) -> int:
        rows = 1 << (rows - 1).bit_length()
        return min(-(-model.row_bytes * rows // PAGE_BYTES) * PAGE_BYTES, model.arena_bytes)

    def _make_room(self, size_bytes: int, keep: _Arena) -> None:
        """Take memory from idle arenas, but from this one, until `size_bytes` more are within what is kept."""
        for arena in list(self._idle.values()):
            if self._committed_bytes + size_bytes <= self._kept_bytes:
                return
            if arena is not keep:
                self._give_back(arena)

    def _commit(self, arena: _Arena, needed_bytes: int) -> None:
        """Take memory for the first `needed_bytes` of an arena. Raises OSError, having taken none."""
        offset, size_bytes = arena.offset + arena.committed_bytes, needed_bytes - arena.committed_bytes
        for last in (False, True):
            try:
                self._segment.allocate(offset, size_bytes)
            except OSError:
                self._segment.punch(offset, size_bytes)
                if last:
                    raise
                self._make_room(self._kept_bytes, arena)  # all that is idle gives its memory back
            else:
                break
        self._committed_bytes += size_bytes
        self._most_bytes = max(self._most_bytes, self._committed_bytes)
        arena.committed_bytes = needed_bytes

    def _give_back(self, arena: _Arena) -> None:
        self._segment.punch(arena.offset, arena.committed_bytes)
        self._committed_bytes -= arena.committed_bytes
        arena.committed_bytes = 0
        del self._idle[arena.offset]


def _fitting(idle: Sequence[_Arena], needed_bytes: int) -> _Arena:
    """Return the smallest arena with enough memory, or else the one that lacks least; of equal ones the last."""
    last = idle[-1]
    if last.committed_bytes == needed_bytes:
        return last

    def rank(arena: _Arena) -> tuple[bool, int]:
        missing = needed_bytes - arena.committed_bytes
        return missing > 0, abs(missing)

    return min(reversed(idle), key=rank)


@dataclass(slots=True, eq=False)
class Worker:
    """One worker. `pid` 0: none is there.

    `lease`: on which it works; None already when it is sure to leave at once. `owed`: how many leases it has not left
    that it was told to run.
    """

    index: int
    pid: int = 0
    models: set[int] = field(default_factory=set)
    commands: deque[LoadArtifact | Unload] = field(default_factory=deque)  # the first one has been sent
    lease: int | None = None
    owed: int = 0
    in_service: bool = False


class WorkerTable:
    """All workers. One takes part in gangs (is in service) when it has every model that is being served.

    Loads and unloads go out one at a time per worker, so that no number of models overflows a ring.
    """

    def __init__(self, control: ControlSegment) -> None:
        self._control = control
        self.workers = [Worker(index) for index in range(control.layout.workers)]
        self._served: set[int] = set()
        self._missing: set[int] = set()  # dead, and nobody comes in their place for now
        self._free: tuple[int, ...] | None = ()  # None: to be found again
        self._in_service = 0

    def __getitem__(self, index: int) -> Worker:
        return self.workers[index]

    @property
    def free(self) -> tuple[int, ...]:
        """Indices of workers that can be given work now: also those that load a model, which they do beside it."""
        if self._free is None:
            idle = [worker for worker in self.workers if worker.in_service and worker.lease is None]
            self._free = tuple([worker.index for worker in idle])
        return self._free

    def are_free(self, cores: tuple[int, ...]) -> bool:
        """Return whether these are different cores, all of them free."""
        if len(cores) == 1:
            return cores[0] in self.free
        return len(set(cores)) == len(cores) and all(core in self.free for core in cores)

    @property
    def in_service(self) -> int:
        """How many workers take part in gangs."""
        return self._in_service

    def occupy(self, index: int, lease: int) -> None:
        """Note that a worker is told to run this lease."""
        worker = self.workers[index]
        worker.lease = lease
        worker.owed += 1
        self._free = None

    def left(self, index: int, lease: int) -> bool:
        """Note that a worker has left this lease; return whether it came free by that."""
        worker = self.workers[index]
        worker.owed = max(worker.owed - 1, 0)
        return self._release(worker, lease)

    def leaves(self, index: int, lease: int) -> bool:
        """Note that a worker leaves this lease at once; return whether it may be given work now.

        It is not given work twice before it has left, since it may hang.
        """
        worker = self.workers[index]
        return worker.owed == 1 and self._release(worker, lease)

    def start(self, index: int, pid: int, loads: Iterable[LoadArtifact]) -> None:
        """Note that a new process serves a core, which has no model yet, and give it these."""
        self._missing.discard(index)
        self.workers[index] = Worker(index, pid)
        self._review()
        worker = self.workers[index]
        for load in loads:
            self.order(worker, load)

    def lose(self, index: int) -> None:
        """Note that the process is gone."""
        self.workers[index] = Worker(index)
        self._review()

    def miss(self, index: int) -> None:
        """Note that no process takes the place of a dead worker for now."""
        if not self.workers[index].pid:
            self._missing.add(index)

    def order(self, worker: Worker, command: LoadArtifact | Unload) -> None:
        """Send a job now or after those before it."""
        if worker.pid:
            if isinstance(command, Unload):
                worker.models.discard(command.model_id)
            worker.commands.append(command)
            self._free = None
            if len(worker.commands) == 1:
                self._send_command(worker)

    def order_all(self, command: LoadArtifact | Unload) -> None:
        """Give every living worker a job."""
        for worker in self.workers:
            self.order(worker, command)

    def answer(self, index: int, model_id: int, has_model: bool) -> None:
        """Note that a worker has done its first job; send the next one."""
        worker = self.workers[index]
        if not worker.commands or worker.commands[0].model_id != model_id:
            return  # the answer to a job of a scheduler before this one
        worker.commands.popleft()
        (worker.models.add if has_model else worker.models.discard)(model_id)
        self._review()
        if worker.commands:
            self._send_command(worker)

    def all_have(self, model_id: int) -> bool:
        """Whether every worker has the model; a dead one's successor is waited for, unless it is missing."""
        present = [worker for worker in self.workers if worker.index not in self._missing]
        return bool(present) and all(model_id in worker.models for worker in present)

    def any_has(self, model_id: int) -> bool:
        """Whether there is a worker that has the model."""
        return any(model_id in worker.models for worker in self.workers)

    def none_has(self, model_id: int) -> bool:
        """Whether no worker has the model, or has yet to load it."""
        return not any(
            model_id in worker.models or any(command.model_id == model_id for command in worker.commands)
            for worker in self.workers
        )

    def serve(self, model_id: int, served: bool) -> None:
        """Note that a worker in service must have this model from now on, or need not."""
        (self._served.add if served else self._served.discard)(model_id)
        self._review()

    def _review(self) -> None:
        for worker in self.workers:
            worker.in_service = worker.pid != 0 and self._served <= worker.models
        self._in_service = sum(worker.in_service for worker in self.workers)
        self._free = None

    def _release(self, worker: Worker, lease: int) -> bool:
        if worker.lease != lease:
            return False
        worker.lease = None
        self._free = None
        return True

    def _send_command(self, worker: Worker) -> None:
        command = worker.commands[0]
        if isinstance(command, LoadArtifact):
            command = msgspec.structs.replace(command, at_once=command.at_once or not worker.in_service)
        if not self._control.command(worker.index, command.pack()):
            raise RuntimeError(f"the command ring of worker {worker.index} is full")
