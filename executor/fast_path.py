"""The fast path: requests that begin without a decision while the scheduler waits. native/fast_path.c does it."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from gangway.executor import _native
from gangway.executor.control import ControlSegment
from gangway.executor.slots import SlotTable

WORKER_SLOTS: Final = 2  # of a worker: it computes for one query while the next one is written down
NO_LEASE: Final = -1
MAX_COMPLETED: Final = _native.MAX_COMPLETED


class Completed(NamedTuple):
    """A request that began and was answered. Times are microseconds on CLOCK_MONOTONIC."""

    model_id: int
    priority: int
    arrival_us: float
    deadline_us: float | None
    joined_us: float  # a worker began with it
    end_us: float  # its last layer ended


class InFlight(NamedTuple):
    """A request that is under way on the gang of a worker slot: all layers, alone in a lease.

    Its slot is not to be asked about it: it may have been answered, and be in use again.
    """

    cores: tuple[int, ...]  # workers, by rank
    inside: tuple[int, ...]  # ranks that have not left
    ended: bool  # all is done: ranks that have not left do so at once
    lease: int
    lease_generation: int
    arena: int  # its number, of those that were given to `open`
    model_id: int
    front_end: int
    slot: int
    slot_generation: int
    priority: int
    arrival_ns: int
    deadline_ns: int  # 0: none, as of the next two
    limit_ns: int
    join_key: int
    begun_ns: int
    joined_ns: int  # the first of the ranks that have left; 0: none has


class OpenModel(NamedTuple):
    """A model whose requests of one row begin without a decision, each on the first free workers, if there are enough.

    `expected_us`: what a request takes, roughly. A worker that has little to do is given more before it is done, if a
    request needs no other. `min_slack_us`: a request with less time until its deadline is left to the caller; 0: none
    is. `may_grow`: while a request computes, all others are left to the caller: it may want the cores that are free.
    `versions`: of each layer; empty: the default ones.
    """

    model_id: int
    layers: int
    expected_us: int
    ranks: int
    min_slack_us: int
    may_grow: bool
    arena_stride: int
    arenas: tuple[int, ...]  # offsets: as many requests may be under way
    versions: bytes = b""


class FastPath:
    """Begins requests for models that are open. For the scheduler's process.

    `lease_timeout_us`: as in LeaseSpec. A worker slot is a lease, given for each call.
    """

    def __init__(self, control: ControlSegment, tables: Sequence[SlotTable], lease_timeout_us: int) -> None:
        layout = control.layout
        self.worker_slots = layout.workers * WORKER_SLOTS
        self._native = _native.FastPath(
            control.segment.view,
            layout.scheduler_bell,
            tuple((table.view, table.slots, layout.submit_ring(index)) for index, table in enumerate(tables)),
            tuple(
                (layout.worker(rank), layout.command_ring(rank), layout.completion_ring(rank))
                for rank in range(layout.workers)
            ),
            layout.lease_table,
            layout.leases,
            lease_timeout_us,
            WORKER_SLOTS,
        )

    def open(self, model: OpenModel) -> None:
        """Let this model's requests begin. What was under way of it keeps its arena, which is not one of the new ones.

        Raises ValueError for what leads outside of the layout.
        """
        self._native.open(*model)

    def close(self, model_id: int) -> None:
        """Leave the model's requests to the caller."""
        self._native.close(model_id)

    def poll(
        self, leases: Sequence[int] | None, control_seq: int, spin_us: int, timeout_us: int, watch_us: int
    ) -> tuple[list[Completed], list[InFlight]]:
        """Begin what comes until there is something else to do; return what has ended, and what is under way.

        `leases`: of each worker slot, worker after worker; NO_LEASE: not to be used. None: go on with what is under
        way. Otherwise whatever was under way after the last call is the caller's, as are the messages in the rings; its
        models have been opened again, or closed. It returns, too, when MAX_COMPLETED have ended, when the bell's
        `control_seq` is another, after `timeout_us`, and `watch_us` to twice that after the first request has come, if
        possible when nothing is under way.
        """
        given = None if leases is None else tuple(leases)
        completed, in_flight = self._native.poll(given, control_seq, spin_us, timeout_us, watch_us)
        return [
            Completed(model_id, priority, arrival / 1e3, deadline / 1e3 if deadline else None, joined / 1e3, end / 1e3)
            for model_id, priority, arrival, deadline, joined, end in completed
        ], list(map(InFlight._make, in_flight))
