"""What decisions do to gangs, and what becomes of a query when its gang has left."""

import logging
from pathlib import Path

from gangway.executor.control import ControlSegment
from gangway.executor.leases import MAX_RANKS, PhaseKind
from gangway.executor.messages import Left, LeftReason
from gangway.executor.slots import SlotStatus
from gangway.scheduler.accounts import Accounts
from gangway.scheduler.arenas import ArenaPool
from gangway.scheduler.control import LoadModel
from gangway.scheduler.counter_interference import from_profiles
from gangway.scheduler.gangs import Gang, GangTable
from gangway.scheduler.interference import Interference, SlowdownInterference, Unit
from gangway.scheduler.models import ModelTable
from gangway.scheduler.policy import Policy, Reject, Resize, Start, Stop
from gangway.scheduler.requests import Request, RequestBook
from gangway.scheduler.stretch import Stretches
from gangway.scheduler.workers import WorkerTable

_log = logging.getLogger(__name__)


class Execution:
    """Queries on gangs. `changed`: something that a decision may depend on is not as it was at the last one.

    Decisions about queries that are no longer where the policy saw them are ignored. Times are microseconds on
    CLOCK_MONOTONIC.
    """

    def __init__(
        self,
        control: ControlSegment,
        requests: RequestBook,
        workers: WorkerTable,
        models: ModelTable,
        arenas: ArenaPool,
        policy: Policy,
        accounts: Accounts,
    ) -> None:
        self.gangs = GangTable(control)
        self.interference: Interference = SlowdownInterference()
        self.stretches = Stretches()
        self.changed = False
        self._requests = requests
        self._workers = workers
        self._models = models
        self._arenas = arenas
        self._policy = policy
        self._accounts = accounts

    def use_counters(self, profiles: Path, machine_id: str) -> None:
        """Take the level of interference from counters, if the folder of profiles says how and the machine can."""
        if isinstance(self.interference, SlowdownInterference):
            counters = from_profiles(profiles, machine_id, self._workers.pids)
            if counters is not None:
                self.interference = counters
                _log.info("level of interference: from %s", counters.name)

    # -- decisions

    def start(self, start: Start, now_us: float) -> None:
        """Let a waiting query run a block."""
        request = self._requests.get_waiting(start.query_id)
        if request is None or not self._is_sound(start, request):
            return
        gang = self.gangs.of_query(start.query_id) if request.started else self._form(request)
        if gang is None:
            return
        if not self._requests.start(request):
            self._close(gang)
            self.changed = True
            return
        if not gang.blocks:
            self._models.limits.started(request.query.model_id)
        for core in start.cores:
            self._workers.occupy(core, gang.lease)
        self._requests.count(request, self._accounts.begins(gang, start))
        self.gangs.send(gang, start, self._spec(request).arena_bytes, now_us)

    def stop(self, stop: Stop) -> None:
        """Take a running query off its cores."""
        gang = self._at_work(stop.query_id)
        if gang is not None and (stop.at_once or not gang.stopping):
            self.gangs.stop(gang, stop.at_once)

    def resize(self, resize: Resize) -> None:
        """Let a gang grow or shrink, unless ranks of it are leaving."""
        gang = self._at_work(resize.query_id)
        if gang is None or gang.leaving or gang.indivisible:
            return
        ranks, cores = gang.wanted, resize.cores
        if len(cores) > ranks and cores[:ranks] == gang.cores and self._are_free(cores[ranks:]):
            for core in cores[ranks:]:
                self._workers.occupy(core, gang.lease)
            self._accounts.grows(gang, len(cores))
            self.gangs.grow(gang, cores)
        elif 0 < len(cores) < ranks and cores == gang.cores[: len(cores)]:
            self._accounts.shrinks(gang)
            self.gangs.shrink(gang, len(cores))
        else:
            _log.error("no such resize: %s of cores %s", resize, gang.cores)

    def reject(self, reject: Reject) -> None:
        """Refuse a waiting query, if that is its queue policy."""
        request = self._requests.get_waiting(reject.query_id)
        if request is not None and request.query.rejects_late:
            self.end(request, SlotStatus.LATE)

    # -- ends

    def end(self, request: Request, status: SlotStatus) -> None:
        """Answer a waiting request; a paused one gives back what it holds."""
        gang = self.gangs.of_query(request.query.query_id)
        if gang is not None:
            self._close(gang)
        if (model := self._models.get(request.query.model_id)) is not None:
            self._accounts.refused(model.spec.name, status)
        self._requests.finish(request, status)
        self.changed = True

    def drop(self, request: Request, status: SlotStatus = SlotStatus.CANCELLED) -> None:
        """Nobody wants the answer any more: end a waiting request now, a running one when its gang has stopped."""
        request.dropped = True
        request.drop_status = status
        if self._requests.is_waiting(request):
            self.end(request, status)
        elif (gang := self.gangs.of_query(request.query.query_id)) is not None and not gang.stopping:
            self.gangs.stop(gang)

    def left(self, core: int, message: Left, now_us: float) -> bool:
        """A rank has left; return whether a gang came to its end by that."""
        gang = self.gangs.leave(message, now_us)
        if gang is None:
            return False
        self._accounts.left(gang, core, message)
        if self._workers.left(core, gang.lease):
            self.changed = True
        if LeftReason.DONE in gang.reasons:  # the others are as good as gone
            for rank in gang.outstanding:
                self.changed |= self._workers.leaves(gang.cores[rank], gang.lease)
        if gang.outstanding:
            return False
        self._ended(gang, now_us)
        return True

    def lose_core(self, core: int, now_us: float) -> None:
        """The worker of this core is dead."""
        self.changed = True
        for gang in self.gangs.lose_core(core):
            if not gang.outstanding:
                self._ended(gang, now_us)

    def _ended(self, gang: Gang, now_us: float) -> None:
        """All ranks have left: the query is answered, or paused, or must be ended or run again."""
        request = gang.request
        invalid = LeftReason.INVALID in gang.reasons
        kind, next_layer, turned_ns = gang.shared.position()
        if not gang.lost and not invalid:
            self._accounts.ended(gang, next_layer)
            self._measure(gang, next_layer, turned_ns, now_us)
            if kind != PhaseKind.END and not request.dropped:
                self._requests.pause(request, next_layer, now_us - gang.started_us)
                self.changed = True
                return
        self.changed |= not self.gangs.free
        self._close(gang)
        if request.dropped:
            self._accounts.refused(gang.model, request.drop_status)
            self._requests.finish(request, request.drop_status)
        elif invalid:
            if self._requests.finish(request, SlotStatus.INTERNAL):
                _log.error("a worker could not run %s", self._spec(request).name)
        elif gang.lost:
            self._requests.run_again(request)  # forgets it if a rank has answered
        else:
            self._requests.answered(request)
            self._policy.finished(request.query, now_us)

    def _measure(self, gang: Gang, end_layer: int, turned_ns: int, now_us: float) -> None:
        """Have taken into account what the gang's block says about interference, and how well it was predicted."""
        query = gang.request.query
        profile = self._models.profiles.get(query.model_id)
        if profile is None or gang.resized or end_layer == query.next_layer:
            return
        time_us = (turned_ns - gang.joined_ns) / 1e3
        layers = (query.next_layer, end_layer)
        unit = Unit(profile, *layers, gang.wanted, query.rows, gang.versions, time_us)
        self.interference.finished(unit, now_us)
        self.stretches.finished(query.model_id, unit, self.interference.level(now_us))

    # -- what a gang needs

    def _form(self, request: Request) -> Gang | None:
        """Return a gang with lease and arena for a query; None if it has to wait for one, or can never have one."""
        if not self.gangs.free:
            return None
        try:
            arena_offset = self._arenas.acquire(request.query.model_id, request.query.rows)
        except OSError as error:
            _log.error("no memory for %d rows of %s: %s", request.query.rows, self._spec(request).name, error)
            self._requests.finish(request, SlotStatus.UNAVAILABLE)
            self.changed = True
            return None
        if arena_offset is None:
            return None
        spec = self._spec(request)
        return self.gangs.open(request, arena_offset, spec.indivisible, spec.name)

    def _close(self, gang: Gang) -> None:
        self._arenas.release(gang.request.query.model_id, gang.arena_offset)
        self.gangs.close(gang)
        self.changed |= bool(self._models.limits)  # a query may have waited for this one

    def _at_work(self, query_id: int) -> Gang | None:
        gang = self.gangs.of_query(query_id)
        return gang if gang is not None and gang.outstanding and gang.ended_us is None else None

    def _spec(self, request: Request) -> LoadModel:
        model = self._models.get(request.query.model_id)
        assert model is not None, "a model stays until its last gang has ended"
        return model.spec

    def _is_sound(self, start: Start, request: Request) -> bool:
        """Whether the decision can be carried out. A policy that is wrong must not end the server."""
        query = request.query
        layers = start.end_layer - query.next_layer
        sound = layers > 0 and start.end_layer <= self._spec(request).layers and len(start.versions) in (0, layers)
        if not sound or not 0 < len(start.cores) <= MAX_RANKS or not self._are_free(start.cores):
            _log.error("no such block: %s, next layer %d", start, query.next_layer)
            return False
        return True

    def _are_free(self, cores: tuple[int, ...]) -> bool:
        free = self._workers.free
        return len(set(cores)) == len(cores) and all(core in free for core in cores)
