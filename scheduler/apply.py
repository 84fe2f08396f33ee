"""How decisions are applied to gangs, and what becomes of requests when a gang has left."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from gangway.artifact.precision import BF16, FP32
from gangway.executor.fast_path import Completed, InFlight
from gangway.executor.leases import MAX_RANKS, PhaseKind
from gangway.executor.messages import LeaseLeft, LeftReason
from gangway.executor.slots import SlotStatus
from gangway.scheduler.gangs import DONE, Gang, GangTable
from gangway.scheduler.interference import BlockTimes
from gangway.scheduler.messages import LoadModel
from gangway.scheduler.observability import REFUSALS
from gangway.scheduler.policy import LoneStart, Reject, Replan, Resize, Start, StartOver, Stop
from gangway.scheduler.requests import MAX_CRASHES, Request
from gangway.scheduler.state import SchedulerState
from gangway.scheduler.units import Unit

END: Final = PhaseKind.END
INVALID: Final = LeftReason.INVALID
_log = logging.getLogger(__name__)


class Execution:
    """Units on gangs. Times are microseconds on CLOCK_MONOTONIC.

    A decision about a query that is no longer where the policy saw it is ignored. `on_crash` is called with the number
    of a model that has ended a worker. `changed`: something that a decision may depend on has changed since the last
    one; `queue_changed`: the queries that wait for a core have.
    """

    def __init__(self, state: SchedulerState, on_crash: Callable[[int], None]) -> None:
        self.gangs = GangTable(state.control)
        self.times = BlockTimes()
        self.changed = False
        self.queue_changed = False
        self._requests = state.requests
        self._workers = state.workers
        self._models = state.models
        self._arenas = state.arenas
        self._policy = state.policy
        self._accounts = state.accounts
        self._log = state.log
        self._on_crash = on_crash

    @property
    def could_grow(self) -> bool:
        """Whether a gang could use more cores than it has."""
        return any(not gang.indivisible and gang.wanted < self._most_ranks(gang) for gang in self.gangs.all())

    def settled(self) -> None:
        """Note that a decision has seen all changes."""
        self.changed = self.queue_changed = False

    # -- decisions

    def start(self, start: Start, now_us: float) -> None:
        """Let a waiting unit run a block."""
        unit = self._requests.waiting.get(start.query_id)
        if unit is None:
            return
        query, gang = unit.query, self.gangs.of_query(start.query_id)
        artifact_id = gang.artifact_id if gang is not None else self._models.artifact_id(query, start.precision)
        if not self._is_sound(start, unit, artifact_id):
            return
        if gang is None:
            gang = self._form(unit, artifact_id)
            if gang is None:
                return
            if query.precision != FP32:
                self._requests.choose(unit, FP32 if artifact_id == query.model_id else BF16)
        if not self._requests.start(unit):
            self._close(gang)
            self.changed = True
            return
        if not gang.blocks:
            self._models.limits.started(unit.query.model_id)
        for core in start.cores:
            self._workers.occupy(core, gang.lease)
        requests = self._requests.of(unit)
        self._accounts.begins(gang, start, requests)
        self._requests.count(requests)
        members = () if gang.generation else self._requests.members(unit)  # a lease has them from its first block on
        self.gangs.send(gang, start, self._spec(artifact_id), members, now_us)

    def stop(self, stop: Stop) -> None:
        """Take a running unit off its cores."""
        gang = self._at_work(stop.query_id)
        if gang is not None and (stop.at_once or not gang.stopping):
            self.gangs.stop(gang, stop.at_once)

    def resize(self, resize: Resize) -> None:
        """Let a gang grow or shrink, unless ranks of it are leaving."""
        gang = self._at_work(resize.query_id)
        if gang is None or gang.leaving or gang.indivisible:
            return
        ranks, cores = gang.wanted, resize.cores
        if resize.versions is not None:
            self.gangs.replan(gang, resize)
        if len(cores) > ranks and cores[:ranks] == gang.cores and self._workers.are_free(cores[ranks:]):
            if self.gangs.grow(gang, cores):
                self._accounts.grows(gang, ranks)
                for core in cores[ranks:]:
                    self._workers.occupy(core, gang.lease)
        elif 0 < len(cores) < ranks and cores == gang.cores[: len(cores)]:
            if self.gangs.shrink(gang, len(cores)):
                self._accounts.shrinks(gang)
        else:
            _log.error(
                "a decision of the scheduling policy is ignored: %s is impossible for a batch on cores %s",
                resize,
                gang.cores,
            )

    def replan(self, replan: Replan) -> None:
        """Change versions and blocks that lie before a gang."""
        gang = self._at_work(replan.query_id)
        if gang is not None and not gang.indivisible:
            self.gangs.replan(gang, replan)

    def reject(self, reject: Reject) -> None:
        """Refuse the requests of a waiting unit, if that is their queue policy."""
        unit = self._requests.waiting.get(reject.query_id)
        if unit is not None and unit.query.rejects_late:
            for request in self._requests.of(unit):
                self.drop(request, SlotStatus.LATE)

    def start_over(self, decision: StartOver) -> None:
        """Let a stopped unit give its lease and its arena back."""
        unit = self._requests.waiting.get(decision.query_id)
        gang = self.gangs.of_query(decision.query_id)
        if unit is not None and gang is not None and unit.query.started:
            self._close(gang)
            for request in self._requests.start_over(unit):
                self._finish(request)
            self.changed = True

    # -- without a decision

    def take_over(self, unit: Unit, start: LoneStart, in_flight: InFlight, arena_offset: int, now_us: float) -> None:
        """Give a unit that is under way without a decision to a gang."""
        self._policy.arrived(unit.query)
        self._models.limits.started(unit.query.model_id)
        spec = self._spec(in_flight.model_id)
        block = Start(unit.query.query_id, spec.layers, in_flight.cores, start.versions)
        gang = self.gangs.take_over(unit, block, in_flight, arena_offset, spec, now_us)
        for rank in in_flight.inside:
            self._workers.occupy(gang.cores[rank], gang.lease)
            if in_flight.ended:
                self._workers.leaves(gang.cores[rank], gang.lease)
        self._accounts.begins(gang, block, self._requests.of(unit))

    def completed_without_gang(self, spec: LoadModel, start: LoneStart, requests: Sequence[Completed]) -> None:
        """Note queries of a model that were begun without a decision, and are answered."""
        model_id = spec.model_id
        self._models.limits.started(model_id, len(requests))
        self._accounts.completed_without_gang(spec.name, len(requests), spec.layers, start.versions)
        if (profile := self._models.profiles.get(model_id)) is not None:
            self.times.completed_without_gang(profile, start, requests)
        self._models.ran_each(model_id, [each.end_us - each.joined_us for each in requests], requests[-1].end_us)
        self._policy.answered(model_id, requests, self._requests.next_id(len(requests)))

    # -- ends

    def drop(self, request: Request, status: SlotStatus = SlotStatus.CANCELLED) -> None:
        """End a request: now, or when what is under way of it has ended, which is stopped unless others need it.

        A unit that was stopped and that nobody needs any more gives back what it holds.
        """
        request.dropped = True
        request.drop_status = status
        self._requests.leave_batch(request)
        self.queue_changed = True
        if self._requests.withdraw(request):
            self._finish(request)
            return
        for unit in tuple(request.units):
            gang = self.gangs.of_query(unit.query.query_id)
            if gang is None or not self._requests.is_dropped(unit):
                continue
            if unit in self._requests.waiting:
                self._requests.waiting.remove(unit)
                self._close(gang)
                self._leave(unit, self._requests.of(unit))
                self.changed = True
            elif not gang.stopping:
                self.gangs.stop(gang)

    def left(self, core: int, message: LeaseLeft, now_us: float) -> bool:
        """Note that a rank has left; return whether a gang came to its end by that."""
        gang = self.gangs.leave(message, now_us)
        if gang is None:
            return False
        self._accounts.left(gang, core, message)
        if self._workers.left(core, gang.lease):
            self.changed = True
        if DONE in gang.reasons:  # the others are as good as gone
            for rank in gang.outstanding:
                self.changed |= self._workers.leaves(gang.cores[rank], gang.lease)
            if gang.ended_us == now_us and self._models.limits:
                self.changed = True  # a query may have waited for this one
        if gang.outstanding:
            return False
        self._ended(gang, now_us)
        return True

    def lose_core(self, core: int, now_us: float, crashed_lease: int = -1) -> None:
        """Note that the worker of a core is dead. `crashed_lease`: the lease that it died of, -1 if it was none."""
        self.changed = True
        for gang in self.gangs.lose_core(core, crashed_lease):
            if not gang.outstanding:
                self._ended(gang, now_us)

    def _ended(self, gang: Gang, now_us: float) -> None:
        """See to the unit of a gang that all ranks have left: it is done, paused, failed, or must run again."""
        unit = gang.unit
        profile = self._models.tables.get(gang.artifact_id)
        requests = self._requests.of(unit)
        wanted_by = () if all(request.dropped for request in requests) else requests
        lost, invalid = gang.lost, INVALID in gang.reasons
        kind, next_layer, turned_ns = gang.shared.position()
        if not lost and not invalid:
            self._accounts.ended(gang, next_layer, wanted_by)
            self.times.finished(gang, profile, next_layer, turned_ns)
            if kind != END and wanted_by:
                self._requests.pause(unit, next_layer, now_us - gang.started_us)
                self.changed = True
                return
        self.changed |= not self.gangs.free
        self._close(gang)
        if lost or (invalid and len(unit.pieces) > 1):
            self._run_again(gang, requests)
        elif invalid:
            self._fail(gang)
        else:
            self._leave(unit, requests)
            if kind == END and not unit.query.next_layer:
                self._models.ran(gang.artifact_id, (turned_ns - gang.joined_ns) / 1e3, turned_ns / 1e3)
            if kind == END and wanted_by:
                self._policy.finished(unit.query, turned_ns / 1e3)

    def _leave(self, unit: Unit, requests: Sequence[Request]) -> None:
        """Note that a unit has ended. A request of which it was the last is answered by now, unless it was dropped."""
        for request in requests:
            request.units.remove(unit)
            if request.units:
                continue
            if request.dropped:
                self._finish(request)
            else:
                self._requests.answered(request)

    def _run_again(self, gang: Gang, requests: Sequence[Request]) -> None:
        """Let each request of a gang that was lost go on for itself, in case that one of them was the reason."""
        unit = gang.unit
        for piece, request in zip(unit.pieces, requests, strict=True):
            request.units.remove(unit)
            request.crashes += gang.crashed
            if request.dropped:
                if not request.units:
                    self._finish(request)
            elif not self._requests.run_again(piece, unit):
                at_fault = request.crashes >= MAX_CRASHES
                self.drop(request, SlotStatus.CRASHED if at_fault else SlotStatus.UNAVAILABLE)
        self.changed = True
        if gang.crashed:
            self._on_crash(gang.artifact_id)

    def _fail(self, gang: Gang) -> None:
        """Fail the only request of a gang that a worker could not run."""
        (request,) = self._requests.of(gang.unit)
        request.units.remove(gang.unit)
        _log.error("%s: a request failed in a worker process; its client is told INTERNAL", gang.model)
        self.drop(request, SlotStatus.INTERNAL)

    def _finish(self, request: Request) -> None:
        """Answer a dropped request of which no unit is left, unless a worker has answered it."""
        if self._requests.finish(request, request.drop_status):
            model = self._models.get(request.query.model_id)
            if model is not None:
                self._accounts.refused(model.spec.name, request.drop_status)
            if self._log.is_watched and request.drop_status in REFUSALS:
                free, waiting = len(self._workers.free), len(self._requests.queries)
                self._log.refused(request.query, request.drop_status, time.monotonic_ns() / 1e3, free, waiting)

    # -- what a gang needs

    def _form(self, unit: Unit, artifact_id: int) -> Gang | None:
        """Return a gang with lease and arena for a unit; None if it has to wait for one, or can never have one."""
        model = self._models.get(artifact_id)
        if not self.gangs.free or model is None:
            return None
        spec = model.spec
        try:
            arena_offset = self._arenas.acquire(artifact_id, unit.query.rows)
        except OSError as error:
            _log.error(
                "%s: requests are refused, because there is no memory for a batch of %d rows: %s",
                spec.name,
                unit.query.rows,
                error,
            )
            self._cannot_form(unit, artifact_id)
            return None
        if arena_offset is None:
            return None
        return self.gangs.open(unit, arena_offset, spec)

    def _cannot_form(self, unit: Unit, artifact_id: int) -> None:
        """Break up a unit for which there is no memory; fail it if it has a single request."""
        self.changed = True
        if len(unit.pieces) > 1:
            self._requests.break_up(unit)
        else:
            (request,) = self._requests.of(unit)
            for_good = len(self._requests) == 1 and self._arenas.can_never_hold(artifact_id, unit.query.rows)
            self.drop(request, SlotStatus.NO_MEMORY if for_good else SlotStatus.UNAVAILABLE)

    def _close(self, gang: Gang) -> None:
        self._arenas.release(gang.artifact_id, gang.arena_offset)
        self.gangs.close(gang)
        if DONE not in gang.reasons and self._models.limits:  # else when its first rank left
            self.changed = True

    def _at_work(self, query_id: int) -> Gang | None:
        gang = self.gangs.of_query(query_id)
        return gang if gang is not None and gang.outstanding and gang.ended_us is None else None

    def _most_ranks(self, gang: Gang) -> int:
        profile = self._models.tables.get(gang.artifact_id)
        return 0 if profile is None else min(profile.max_ranks, self._workers.in_service)

    def _spec(self, artifact_id: int) -> LoadModel:
        model = self._models.get(artifact_id)
        assert model is not None, "a model stays until its last gang has ended"
        return model.spec

    def _is_sound(self, start: Start, unit: Unit, artifact_id: int) -> bool:
        """Whether the decision can be carried out. A policy that is wrong must not end the server."""
        query, model = unit.query, self._models.get(artifact_id)
        layers = start.end_layer - query.next_layer
        sound = model is not None and layers > 0 and start.end_layer <= model.spec.layers
        sound = sound and len(start.versions) in (0, layers)
        if not sound or not 0 < len(start.cores) <= MAX_RANKS or not self._workers.are_free(start.cores):
            _log.error(
                "a decision of the scheduling policy is ignored: %s is impossible for a request at layer %d",
                start,
                query.next_layer,
            )
            return False
        return True
