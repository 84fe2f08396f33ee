"""Requests that need no decision: while nobody waits, each begins on as many free cores as its policy always gives it.

Every decision costs a turn of Python, several times what a small request computes. So while nothing is to be decided
the scheduler waits in native code, which begins these requests itself (`executor/fast_path.py`). Afterwards they are
counted, and those that are still under way become gangs like all others. A policy says how it would begin them
(`Policy.lone_start`); what is traced is decided one by one.

A model is open from its first request on, until none has come for a while.
"""

import logging
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from gangway.executor.fast_path import (
    MAX_COMPLETED,
    NO_LEASE,
    WORKER_SLOTS,
    Completed,
    FastPath,
    InFlight,
    OpenModel,
)
from gangway.scheduler.apply import Execution
from gangway.scheduler.gangs import RANKS_WAIT_US
from gangway.scheduler.messages import LoadModel
from gangway.scheduler.policy import LoneStart, Query
from gangway.scheduler.prediction import query_level
from gangway.scheduler.profiles import ModelProfile
from gangway.scheduler.resources import REST_US
from gangway.scheduler.state import SchedulerState

HELD_REST_US = 1e6  # after which a model is opened again whose instances have waited: to open it takes time
LEASES_LEFT = 4  # at least, for queries that are decided about
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Open:
    """A model whose requests may begin, and how.

    `arenas`: for those under way; None: to be reserved. `limit`: how many may be under way; 0: any number. `is_dated`:
    `start` may be another by now.
    """

    spec: LoadModel
    profile: ModelProfile
    start: LoneStart
    level: float
    arenas: list[int | None]
    limit: int
    is_dated: bool = False


class FastPathScheduler:
    """Opens models for the fast path, waits while it does all there is to do, and takes over what is under way then."""

    def __init__(self, state: SchedulerState, execution: Execution) -> None:
        self._path = FastPath(state.control, state.requests.tables, RANKS_WAIT_US)
        self._requests = state.requests
        self._workers = state.workers
        self._models = state.models
        self._arenas = state.arenas
        self._execution = execution
        self._policy = state.policy
        self._former = state.former
        self._way_back_us = state.way_back_us
        self._open: dict[int, _Open] = {}
        self._asked_us: dict[int, float] = {}  # when a model was asked last
        self._held_us: dict[int, float] = {}  # when queries of a model have last held something without a run
        self._to_review: set[int] = set()  # models that may have to be opened or closed
        self._reviewed = (0, 0)  # when all were looked at: changes of models, and workers in service

    @property
    def models(self) -> Collection[int]:
        """Numbers of the models that are open."""
        return self._open.keys()

    def arrived(self, query: Query) -> None:
        """A request was decided about."""
        self._asked_us[query.model_id] = query.arrival_us
        self._to_review.add(query.model_id)

    def held(self, model_id: int) -> None:
        """Queries hold what a model needs without a run. For a while such a model is not opened again."""
        self._held_us[model_id] = time.monotonic_ns() / 1e3
        self.close(model_id)

    def may_begin(self) -> bool:
        """Whether requests may begin without a decision now; nobody waits."""
        execution = self._execution
        if not self._workers.free or execution.could_grow or execution.gangs.any_ending:
            return False
        self._review()
        if any(self._open[model_id].limit for model_id in execution.gangs.models_under_way() if model_id in self._open):
            return False  # what is under way counts, too
        return bool(self._open) and execution.gangs.free >= self._path.worker_slots + LEASES_LEFT

    def poll(self, control_seq: int, spin_us: int, timeout_us: int, watch_us: int) -> None:
        """Poll the rings and start eligible requests. Return at the latest 3 `watch_us` after the first one."""
        leases: Sequence[int] | None = self._leases()
        end_ns = None
        while True:
            completed, in_flight = self._path.poll(leases, control_seq, spin_us, timeout_us, watch_us)
            for model_id, requests in groupby(completed, attrgetter("model_id")):
                self._count(model_id, list(requests))
            now_ns = time.monotonic_ns()
            if end_ns is None:
                end_ns = now_ns + watch_us * 1000
            if len(completed) < MAX_COMPLETED or now_ns >= end_ns:
                break
            leases = None  # all others stay where they are
        for present in sorted(in_flight, key=attrgetter("begun_ns")):  # so a worker has last what it will do last
            self._take_over(present, now_ns / 1e3)
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

    def forget(self, model_id: int) -> None:
        """Close a model that is not served any more."""
        self.close(model_id)
        self._asked_us.pop(model_id, None)
        self._held_us.pop(model_id, None)

    def close_idle(self, now_us: float) -> None:
        """Close what has not been asked for long: its arenas may give their memory back.

        How others begin that may be in either precision, changes with the load.
        """
        for model_id in [number for number in self._open if self._asked_us[number] + REST_US < now_us]:
            self.close(model_id)
        for model_id, known in self._open.items():
            if known.profile.in_bf16 is not None:
                known.is_dated = True
                self._to_review.add(model_id)

    # -- models

    def _review(self) -> None:
        """Open and close models: those that were asked, or all after a change."""
        level = query_level(self._execution.times.interference.level(time.monotonic_ns() / 1e3))
        changes = (self._models.changes, self._workers.in_service)
        if self._reviewed != changes:
            self._reviewed = changes
            self._to_review.update(self._asked_us)
        self._to_review.update([number for number, known in self._open.items() if known.level != level])
        for model_id in self._to_review:
            self._review_model(model_id, level)
        self._to_review.clear()

    def _review_model(self, model_id: int, level: float) -> None:
        model, profile = self._models.get(model_id), self._models.profiles.get(model_id)
        known, cores = self._open.get(model_id), self._workers.in_service
        held = profile is None or (self._former is not None and self._former.may_delay(profile, cores))
        limits = self._models.limits
        is_limited = limits.may_bind(model_id, cores)
        limit = limits.own_limit(model_id) if is_limited else 0
        if model is None or profile is None or held or (is_limited and not limit) or self._is_held(model_id):
            self.close(model_id)
            return
        is_known = known is not None and known.profile is profile and known.limit == limit
        if known is not None and is_known and known.level == level and not known.is_dated:
            return
        start = self._policy.lone_start(profile, cores, level)
        if start is None or start.cores > cores:
            self.close(model_id)
        elif known is not None and is_known and known.start == start:
            known.level, known.is_dated = level, False
        else:
            self.close(model_id)
            arenas: list[int | None] = [None] * self._arena_count(start, limit)
            self._open[model_id] = opened = _Open(model.spec, profile, start, level, arenas, limit)
            self._reserve_arenas(opened)

    def _is_held(self, model_id: int) -> bool:
        """Whether queries hold what the model needs without a run, or have done so lately."""
        now_us = time.monotonic_ns() / 1e3
        return self._models.limits.is_held(model_id) or now_us - self._held_us.get(model_id, -math.inf) < HELD_REST_US

    def _arena_count(self, start: LoneStart, limit: int) -> int:
        """Return how many requests may be under way: those that compute, and one that ranks are about to leave."""
        count = self._path.worker_slots if start.cores == 1 else self._workers.in_service // start.cores + 1
        return min(count, limit) if limit else count

    def _reserve_arenas(self, known: _Open) -> None:
        """Let each request that may be under way have an arena. Without one the model is closed until it is asked."""
        spec, start = known.spec, known.start
        known.arenas = [self._arena(spec) if offset is None else offset for offset in known.arenas]
        arenas = tuple([offset for offset in known.arenas if offset is not None])
        if len(arenas) < len(known.arenas):
            self.close(spec.model_id)
            return
        min_slack_us = start.min_slack_us + self._way_back_us if start.min_slack_us else 0.0
        self._path.open(
            OpenModel(
                spec.model_id,
                spec.layers,
                int(known.profile.rows_us(start.cores, 1)),
                start.cores,
                int(min_slack_us),
                start.may_grow,
                spec.arena_bytes,
                arenas,
                bytes(start.versions),
            )
        )

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

    def _count(self, model_id: int, requests: Sequence[Completed]) -> None:
        """Note what is noted of others, too."""
        known = self._open[model_id]
        self._asked_us[model_id] = requests[-1].arrival_us
        self._to_review.add(model_id)
        if self._former is not None:
            self._former.answered(model_id, requests)
        self._execution.completed_without_gang(known.spec, known.start, requests)

    def _take_over(self, present: InFlight, now_us: float) -> None:
        """Let a gang have what is under way, with its arena."""
        known = self._open[present.model_id]
        request = self._requests.take_over(present)
        self.arrived(request.query)
        if self._former is not None:
            self._former.arrived(request.query)
        offset, known.arenas[present.arena] = known.arenas[present.arena], None
        assert offset is not None, "a request under way has an arena"
        self._arenas.use_reserved(present.model_id, offset)
        self._execution.take_over(request.units[0], known.start, present, offset, now_us)
