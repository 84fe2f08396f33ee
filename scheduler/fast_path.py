"""Requests that need no decision: while nobody waits, those that can use one core only begin on the first free one.

Every decision costs a turn of Python, several times what such a request computes. So while nothing is to be decided the
scheduler waits in native code, which begins these requests itself (`executor/fast_path.py`). Afterwards they are
counted, and those that are still under way become gangs like all others. A policy says that it would decide so
(`Policy.walk_ins`); what is traced is decided one by one.
"""

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter

from gangway.executor.control import ControlSegment
from gangway.executor.fast_path import MAX_COMPLETED, NO_LEASE, WORKER_SLOTS, Completed, InFlight, Reception
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
    """A model whose requests may walk in. `arenas`: of the desks, worker after worker; None: it is to get one."""

    spec: LoadModel
    expected_us: int
    arenas: list[int | None]


class WalkIns:
    """Opens models for walk-ins, waits while these are all that comes, and takes over what is under way then."""

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
        self._reception = Reception(control, tables, RANKS_WAIT_US)
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

    def may_come(self) -> bool:
        """Whether requests may begin without a decision now; nobody waits."""
        execution = self._execution
        if not self._workers.free or execution.could_grow or execution.gangs.any_ending:
            return False
        if self._reviewed != (self._models.changes, self._workers.in_service):
            self._review()
        return bool(self._open) and execution.gangs.free >= self._reception.desks + LEASES_LEFT

    def attend(self, letters: int, spin_us: int, timeout_us: int, watch_us: int) -> None:
        """Wait, and begin what may begin meanwhile (`Reception.attend`); return `watch_us` after the first at last."""
        leases: Sequence[int] | None = self._leases()
        end_ns = None
        while True:
            all_gone, all_present = self._reception.attend(leases, letters, spin_us, timeout_us, watch_us)
            for gone in all_gone:
                self._count(gone)
            now_ns = time.monotonic_ns()
            if end_ns is None:
                end_ns = now_ns + watch_us * 1000
            if len(all_gone) < MAX_COMPLETED or now_ns >= end_ns:
                break
            leases = None  # all others stay where they are
        for present in sorted(all_present, key=attrgetter("begun_ns")):  # so a worker has last what it will do last
            self._take_over(present)
        for model_id in {present.model_id for present in all_present}:
            self._furnish(self._open[model_id])

    def close(self, model_id: int) -> None:
        """Let no request of a model walk in any more, and give back what its desks have."""
        known = self._open.pop(model_id, None)
        if known is not None:
            self._reception.close(model_id)
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
                known = _Open(spec, int(profile.rows_us(1, 1)), [None] * self._reception.desks)
                self._open[spec.model_id] = known
                self._furnish(known)

    def _suits(self, spec: LoadModel, profile: ModelProfile) -> bool:
        """Whether there is nothing to decide about a lone request but where it begins: one core, one version."""
        one_way = min(profile.max_ranks, profile.cores) == 1 and all(len(times) == 1 for times in profile.latency_us)
        held = self._former is not None and self._former.may_delay(spec.model_id, self._workers.in_service)
        return one_way and not spec.limits and not held

    def _furnish(self, known: _Open) -> None:
        """Let each desk have an arena for a model. If there is none the model is closed, until something changes."""
        spec = known.spec
        known.arenas = [self._arena(spec) if offset is None else offset for offset in known.arenas]
        arenas = [offset for offset in known.arenas if offset is not None]
        if len(arenas) < self._reception.desks:
            self.close(spec.model_id)
        else:
            self._reception.open(spec.model_id, spec.layers, known.expected_us, spec.arena_bytes, arenas)

    def _arena(self, spec: LoadModel) -> int | None:
        try:
            return self._arenas.set_aside(spec.model_id)
        except OSError as error:
            _log.error("%s: there is no memory for a request that a front end starts itself: %s", spec.name, error)
            return None

    # -- requests

    def _leases(self) -> list[int]:
        """Return a lease for each desk of the free workers."""
        leases = [NO_LEASE] * self._reception.desks
        spare = self._execution.gangs.spare(self._reception.desks)
        for worker in self._workers.free:
            desks = slice(worker * WORKER_SLOTS, (worker + 1) * WORKER_SLOTS)
            leases[desks] = spare[desks]
        return leases

    def _count(self, gone: Completed) -> None:
        """Note what is noted of others, too."""
        deadline_us = gone.deadline_ns / 1e3 if gone.deadline_ns else None
        number = self._requests.next_id()
        query = Query(number, gone.model_id, 1, gone.arrival_ns / 1e3, deadline_us, gone.priority)
        if self._former is not None:
            self._former.arrived(query)
        self._execution.walked_through(query, self._open[gone.model_id].spec, gone)

    def _take_over(self, present: InFlight) -> None:
        """Let a gang have what is under way, with its arena; the desk gets another one."""
        known, desk = self._open[present.model_id], present.worker * WORKER_SLOTS + present.desk
        request = self._requests.take_over(present)
        if self._former is not None:
            self._former.arrived(request.query)
        offset, known.arenas[desk] = known.arenas[desk], None
        assert offset is not None, "a desk without an arena is not used"
        self._arenas.put_to_use(present.model_id, offset)
        self._execution.take_over(request.units[0], present, offset)
