"""Arenas: where a query under way keeps its activations. A model owns as many as there are leases."""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field

from gangway.executor.segment import Segment
from gangway.scheduler.extents import Extents

PAGE_BYTES = mmap.PAGESIZE
REST_US = 10e6  # unused for so long, an arena gives its memory back: what comes that seldom can wait for new memory


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
    aside: set[int] = field(default_factory=set)  # of those that are busy: nobody uses them yet


@dataclass(frozen=True)
class ArenaUsage:
    """Arenas of one model that queries have, and the memory of all its arenas."""

    in_use: int
    size_bytes: int


class ArenaPool:
    """Hands out arenas by model. An arena is zero when a model gets it, and no other model has it before an unload.

    Kernels rely on it: halos are zero at first and each model keeps its own zero. The pool is sparse: an arena costs
    memory from its first use on, for as many rows as were ever asked of it, and up to the next power of two of them: so
    batches of ever other sizes soon find arenas. The smallest that suffices is used again first, of equal ones the last
    one used: so batches of all sizes do not make every arena one for the largest.
    Beyond `kept_bytes` in all, idle arenas give their memory back before another one takes more: those first that were
    used longest ago. Those in use may be more than that. `tend`, called now and then, gives back what is long idle.
    """

    def __init__(self, segment: Segment, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._committed_bytes = 0
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

    @property
    def in_use(self) -> bool:
        """Whether any query has an arena."""
        return any(len(model.busy) > len(model.aside) for model in self._models.values())

    def usage(self, model_id: int) -> ArenaUsage:
        """Return what a model has now; nothing if it is not there."""
        model = self._models.get(model_id)
        if model is None:
            return ArenaUsage(0, 0)
        arenas = (*model.idle, *model.busy.values())
        return ArenaUsage(len(model.busy) - len(model.aside), sum(arena.committed_bytes for arena in arenas))

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
        rows = 1 << (rows - 1).bit_length()
        needed = min(-(-model.row_bytes * rows // PAGE_BYTES) * PAGE_BYTES, model.arena_bytes)
        arena = _fitting(model.idle, needed)
        if needed > arena.committed_bytes:
            self._make_room(needed - arena.committed_bytes, arena)
            self._commit(arena, needed)
        self._idle.pop(arena.offset, None)
        model.idle.remove(arena)
        model.busy[arena.offset] = arena
        return arena.offset

    def set_aside(self, model_id: int) -> int | None:
        """Acquire an arena for one row, for a query that is to come; until then it is in use by nobody."""
        offset = self.acquire(model_id, 1)
        if offset is not None:
            self._models[model_id].aside.add(offset)
        return offset

    def put_to_use(self, model_id: int, offset: int) -> None:
        """A query has come for an arena that was set aside."""
        self._models[model_id].aside.discard(offset)

    def release(self, model_id: int, offset: int) -> None:
        """Take back what `acquire` returned; nobody uses it any more."""
        model = self._models[model_id]
        arena = model.busy.pop(offset)
        model.aside.discard(offset)
        model.idle.append(arena)
        arena.idle_since_us = self._now_us
        self._idle[offset] = arena

    def tend(self, now_us: float) -> None:
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
