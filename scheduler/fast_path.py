"""Requests that need no decision: while nobody waits, those that can use one core only begin on the first free one.

Every decision costs a turn of Python, several times what such a request computes. So while nothing is to be decided the
scheduler waits in native code, which begins these requests itself (`executor/fast_path.py`). Afterwards they are
counted, and those that are still under way become gangs like all others. A policy says that it would decide so
(`Policy.fast_path`); what is traced is decided one by one.
"""

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter

from gangway.executor.control import ControlSegment
from gangway.executor.fast_path import MAX_COMPLETED, NO_LEASE, WORKER_SLOTS, Completed, FastPath, InFlight
from gangway.executor.slots import SlotTable
from gangway.scheduler.apply import Execution
from gangway.scheduler.batching.former import BatchFormer
from gangway.scheduler.gangs import RANKS_WAIT_US
from gangway.scheduler.messages import LoadModel
from gangway.scheduler.models import ModelTable
from gangway.scheduler.policy import Query
from gangway.scheduler.profiles import ModelProfile
from gangway.scheduler.requests import RequestTable
from gangway.scheduler.resources import ArenaPool, WorkerTable

LEASES_LEFT = 4  # at least, for queries that are decided about
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Open:
    """A model whose requests may begin. `arenas`: of the worker slots, worker after worker; None: to be reserved."""

    spec: LoadModel
    expected_us: int
    arenas: list[int | None]


class FastPathScheduler:
    """Opens models for the fast path, waits while it does all there is to do, and takes over what is under way then."""

    def __init__(
        self,
        control: ControlSegment,
        tables: Sequence[SlotTable],
        requests: RequestTable,
        workers: WorkerTable,
        models: ModelTable,
        arenas: ArenaPool,
        execution: Execution,
        former: BatchFormer | None,
    ) -> None:
        self._path = FastPath(control, tables, RANKS_WAIT_US)
        self._requests = requests
        self._workers = workers
        self._models = models
        self._arenas = arenas
        self._execution = execution
        self._former = former
        self._open: dict[int, _Open] = {}
        self._reviewed = (0, 0)  # when the models were looked at: their changes, and workers in service

    @property
    def models(self) -> Collection[int]:
        """Numbers of the models that are open."""
        return self._open.keys()

    def may_begin(self) -> bool:
        """Whether requests may begin without a decision now; nobody waits."""
        execution = self._execution
        if not self._workers.free or execution.could_grow or execution.gangs.any_ending:
            return False
        if self._reviewed != (self._models.changes, self._workers.in_service):
            self._review()
        return bool(self._open) and execution.gangs.free >= self._path.worker_slots + LEASES_LEFT

    def poll(self, control_seq: int, spin_us: int, timeout_us: int, watch_us: int) -> None:
        """Poll the rings and start eligible requests. Return at the latest `watch_us` after the first one."""
        leases: Sequence[int] | None = self._leases()
        end_ns = None
        while True:
            completed, in_flight = self._path.poll(leases, control_seq, spin_us, timeout_us, watch_us)
            for request in completed:
                self._count(request)
            now_ns = time.monotonic_ns()
            if end_ns is None:
                end_ns = now_ns + watch_us * 1000
            if len(completed) < MAX_COMPLETED or now_ns >= end_ns:
                break
            leases = None  # all others stay where they are
        for present in sorted(in_flight, key=attrgetter("begun_ns")):  # so a worker has last what it will do last
            self._take_over(present)
        for model_id in {present.model_id for present in in_flight}:
            self._reserve_arenas(self._open[model_id])

    def close(self, model_id: int) -> None:
        """Let no request of a model begin here any more, and give back its arenas."""
        known = self._open.pop(model_id, None)
        if known is not None:
            self._path.close(model_id)
            for offset in known.arenas:
                if offset is not None:
                    self._arenas.release(model_id, offset)

    # -- models

    def _review(self) -> None:
        self._reviewed = (self._models.changes, self._workers.in_service)
        for spec in self._models.specs():
            self.close(spec.model_id)
            profile = self._models.profiles.get(spec.model_id)
            if profile is not None and self._suits(spec, profile):
                known = _Open(spec, int(profile.rows_us(1, 1)), [None] * self._path.worker_slots)
                self._open[spec.model_id] = known
                self._reserve_arenas(known)

    def _suits(self, spec: LoadModel, profile: ModelProfile) -> bool:
        """Whether there is nothing to decide about a lone request but where it begins: one core, one version."""
        one_way = min(profile.max_ranks, profile.cores) == 1 and all(len(times) == 1 for times in profile.latency_us)
        held = self._former is not None and self._former.may_delay(spec.model_id, self._workers.in_service)
        return one_way and not spec.limits and not held

    def _reserve_arenas(self, known: _Open) -> None:
        """Let each worker slot have an arena for a model. Without one the model is closed until something changes."""
        spec = known.spec
        known.arenas = [self._arena(spec) if offset is None else offset for offset in known.arenas]
        arenas = [offset for offset in known.arenas if offset is not None]
        if len(arenas) < self._path.worker_slots:
            self.close(spec.model_id)
        else:
            self._path.open(spec.model_id, spec.layers, known.expected_us, spec.arena_bytes, arenas)

    def _arena(self, spec: LoadModel) -> int | None:
        try:
            return self._arenas.reserve(spec.model_id)
        except OSError as error:
            _log.error("%s: there is no memory for a request that a front end starts itself: %s", spec.name, error)
            return None

    # -- requests

    def _leases(self) -> list[int]:
        """Return a lease for each slot of the free workers."""
        leases = [NO_LEASE] * self._path.worker_slots
        spare = self._execution.gangs.spare(self._path.worker_slots)
        for worker in self._workers.free:
            slots = slice(worker * WORKER_SLOTS, (worker + 1) * WORKER_SLOTS)
            leases[slots] = spare[slots]
        return leases

    def _count(self, completed: Completed) -> None:
        """Note what is noted of others, too."""
        deadline_us = completed.deadline_ns / 1e3 if completed.deadline_ns else None
        number = self._requests.next_id()
        query = Query(number, completed.model_id, 1, completed.arrival_ns / 1e3, deadline_us, completed.priority)
        if self._former is not None:
            self._former.arrived(query)
        self._execution.completed_without_gang(query, self._open[completed.model_id].spec, completed)

    def _take_over(self, present: InFlight) -> None:
        """Let a gang have what is under way, with its arena; the worker slot gets another one."""
        known, place = self._open[present.model_id], present.worker * WORKER_SLOTS + present.worker_slot
        request = self._requests.take_over(present)
        if self._former is not None:
            self._former.arrived(request.query)
        offset, known.arenas[place] = known.arenas[place], None
        assert offset is not None, "a worker slot without an arena is not used"
        self._arenas.use_reserved(present.model_id, offset)
        self._execution.take_over(request.units[0], present, offset)
