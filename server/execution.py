"""A request that is carried out: from its contents to its answer, by the workers.

One copy of each input into shared memory, one copy of each output out of it; or none, where workers use the client's.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, Protocol

from gangway.executor.slots import SlotOutcome, SlotStatus
from gangway.server.calls import Call as Way
from gangway.server.calls import Contents
from gangway.server.data_plane import DataPlane, PoolExhaustedError, Request
from gangway.server.ensemble.call import EnsembleCall
from gangway.server.ensemble.run import EnsembleRun
from gangway.server.ensemble.spans import count_inner, outcome_of, times_of
from gangway.server.failures import failure, no_room
from gangway.server.in_place.choice import choose
from gangway.server.in_place.elsewhere import NOWHERE, Elsewhere
from gangway.server.in_place.mappings import Mappings
from gangway.server.plan import Plan
from gangway.server.regions import Region
from gangway.server.request_clock import RequestClock
from gangway.server.response import report_of
from gangway.server.shape_watch import ShapeWatch
from gangway.server.statistics import Times
from gangway.server.tracing.sampled import Instants
from gangway.server.tracing.tracer import Tracer

COMPUTED: Final = frozenset({SlotStatus.OK, SlotStatus.INTERNAL, SlotStatus.INVALID})  # or it was tried


class Call(Protocol):
    """What inference must know of a remote call (the part of grpc.ServicerContext it uses).

    A call may have more, which is only asked for when the request is traced (tracing/sampled.py): a method
    `invocation_metadata` that returns headers as pairs of text, names in small letters; and `front_end`, "GRPC" or
    "HTTP".
    """

    def time_remaining(self) -> float | None:
        """Return the seconds until the client's deadline; None or a huge number without one."""

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Have `callback` called when the call ends, for instance because the client cancels; False if it has ended."""


class Execution:
    """Over one data plane. Safe for threads."""

    def __init__(self, plane: DataPlane, watch: ShapeWatch, tracer: Tracer, mappings: Mappings | None = None) -> None:
        self.plane = plane
        self._watch = watch
        self._tracer = tracer
        self._mappings = mappings
        self._calls: set[Request | EnsembleRun] = set()  # until the last byte of the answer has been sent

    @property
    def idle(self) -> bool:
        """Whether no request is being executed and no answer to one is still on its way."""
        return not self._calls and not self.plane.usage().requests

    def answer(
        self,
        plan: Plan,
        request_id: bytes,
        contents: Contents,
        regions: Mapping[str, Region],
        call: Call,
        arrival_ns: int,
    ) -> bytes:
        """Return the serialised response of a request with these contents. Raises RequestError.

        `regions`: all that the plan names, which stay open meanwhile. `arrival_ns`: CLOCK_MONOTONIC.
        """
        clock = RequestClock.of(plan.terms.target_us, call.time_remaining(), arrival_ns)
        if isinstance(plan.call, EnsembleCall):
            return self._answer_ensemble(plan, plan.call, request_id, contents, regions, call, clock)
        way, response = plan.call, None
        placed = self.choose(plan, contents, regions)
        # Once more if the answer had too little room (the next attempt has what it needed), or memory of a region was
        # missing (copying finds out what is wrong with it).
        while response is None:
            with self._open(plan, way, contents, placed) as request:
                way.write(request, contents)
                submitted_ns = time.monotonic_ns()
                outcome = self._execute(plan, request, call, clock)
                finished_ns = time.monotonic_ns()
                if placed is not NOWHERE and outcome.status in COMPUTED and placed.spoiled():
                    placed = NOWHERE
                elif outcome.status is SlotStatus.OK:
                    response = way.answer(request_id, request, regions)
                elif outcome.status is SlotStatus.UNAVAILABLE and plan.spare is not None and way is not plan.spare:
                    way, placed = plan.spare, NOWHERE  # the variant has been unloaded meanwhile
                else:
                    status = clock.status_of(outcome.status, finished_ns)
                    raise failure(plan.model.name, status, plan.terms.max_queue, outcome.reason)
        if plan.model.symbols and plan.sequence is None:
            self._watch.used(plan.model, plan.model.key_of(plan.shapes.sizes))
        queued_ns = submitted_ns - plan.waited_ns  # waiting for its turn is waiting
        self.note(plan, request_id, contents, call, clock, queued_ns, finished_ns, outcome, response)
        if plan.wants_report:
            response += report_of(outcome, plan.shapes.rows, plan.terms.target_us, placed.count)
        return response

    def note(
        self,
        plan: Plan,
        request_id: bytes,
        contents: Contents,
        call: Call,
        clock: RequestClock,
        queued_ns: int,
        finished_ns: int,
        outcome: SlotOutcome,
        response: bytes,
    ) -> None:
        """Count a request that is answered now, and trace it if it is one to trace."""
        end_ns = self._count(plan, clock, queued_ns, finished_ns, outcome)
        if self._tracer.active:
            instants = Instants(clock.arrival_ns, queued_ns, finished_ns, end_ns)
            self._tracer.answered(plan, request_id, call, instants, outcome, contents, response)

    def _answer_ensemble(
        self,
        plan: Plan,
        way: EnsembleCall,
        request_id: bytes,
        contents: Contents,
        regions: Mapping[str, Region],
        call: Call,
        clock: RequestClock,
    ) -> bytes:
        terms = replace(plan.terms, rejects_late=plan.refuses_late)
        with EnsembleRun(self.plane, self._watch, way, terms, clock) as run:
            self._calls.add(run)
            if not call.add_callback(lambda: self._ended(run)):
                self._ended(run)
            results = run.execute(contents)
            finished_ns = time.monotonic_ns()
            response = way.answer(request_id, results, regions)
        spans, end_ns = run.spans, time.monotonic_ns()
        outcome = outcome_of(spans, clock.arrival_ns)
        times = times_of(spans, end_ns - clock.arrival_ns)
        in_time = self._in_time(plan, clock, end_ns)
        plan.model.statistics.succeeded(plan.shapes.rows, times, in_time, outcome.counts)
        count_inner(way.graph, spans)
        if self._tracer.active:
            instants = Instants(clock.arrival_ns, spans[0].submitted_ns, finished_ns, end_ns)
            self._tracer.answered(plan, request_id, call, instants, outcome, contents, response, spans)
        if plan.wants_report:
            response += report_of(outcome, plan.shapes.rows, plan.terms.target_us)
        return response

    def choose(self, plan: Plan, contents: Contents, regions: Mapping[str, Region]) -> Elsewhere:
        """Return what of the request the workers are to use where the client has it."""
        if not regions or self._mappings is None or plan.in_place is None:
            return NOWHERE
        return choose(plan.in_place, contents, regions, self._mappings)

    def _open(self, plan: Plan, way: Way, contents: Contents, placed: Elsewhere) -> Request:
        try:
            return self.plane.open(way.layout(contents), plan.shapes.rows, placed)
        except PoolExhaustedError as error:
            placed.let_go()
            raise no_room(error) from error

    def submit(self, plan: Plan, request: Request, call: Call, clock: RequestClock, by_bell: bool = False) -> None:
        """Hand a request to the scheduler, and cancel it when its call is over. Raises RequestError (UNAVAILABLE)."""
        terms = plan.terms
        try:
            request.submit(
                clock.deadline_ns,
                terms.priority,
                clock.arrival_ns,
                clock.limit_ns,
                plan.refuses_late,
                terms.max_queue,
                by_bell,
            )
        except PoolExhaustedError as error:
            raise no_room(error) from error
        # Only from here on is there something to cancel; a call that has ended meanwhile takes no callback any more.
        self._calls.add(request)
        if not call.add_callback(lambda: self._ended(request)):
            self._ended(request)

    def _execute(self, plan: Plan, request: Request, call: Call, clock: RequestClock) -> SlotOutcome:
        self.submit(plan, request, call, clock)
        outcome = request.wait(clock.end_ns)
        if outcome is None:
            raise failure(plan.model.name, clock.status_at_end, plan.terms.max_queue)
        return outcome

    def _ended(self, request: Request | EnsembleRun) -> None:
        """The call is over: answered, or given up by the client."""
        self._calls.discard(request)
        request.cancel()

    def _count(self, plan: Plan, clock: RequestClock, submitted_ns: int, finished_ns: int, outcome: SlotOutcome) -> int:
        """Count a request that has been answered now, and return when that is."""
        end_ns = time.monotonic_ns()
        infer_ns = int(outcome.compute_us * 1000)
        times = Times(
            total=end_ns - clock.arrival_ns,
            queue=max(0, finished_ns - submitted_ns - infer_ns),
            compute_input=submitted_ns - clock.arrival_ns,
            compute_infer=infer_ns,
            compute_output=end_ns - finished_ns,
        )
        in_time, leads = self._in_time(plan, clock, end_ns), outcome.leads
        plan.model.statistics.succeeded(plan.shapes.rows, times, in_time, outcome.counts, outcome.batch_rows, leads)
        return end_ns

    def _in_time(self, plan: Plan, clock: RequestClock, end_ns: int) -> bool | None:
        """Return whether an answer now meets the target (None: there is none); one that does lets calls in."""
        is_met = clock.is_met(end_ns)
        if is_met:
            self.plane.door.in_time()
            statistics = plan.model.statistics
            statistics.least_met_us = min(statistics.least_met_us, plan.terms.target_us)
        return is_met
