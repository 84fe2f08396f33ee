"""ModelInfer: bytes in, bytes out. One copy of each input into shared memory, one copy of each output out of it."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from gangway.executor.slots import SlotOutcome, SlotStatus
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.batching import preserves_ordering
from gangway.server.calls import Call as Way
from gangway.server.calls import Contents
from gangway.server.data_plane import DataPlane, PoolExhaustedError, Request
from gangway.server.ensemble.call import EnsembleCall
from gangway.server.ensemble.run import EnsembleRun
from gangway.server.ensemble.spans import count_inner, outcome_of, times_of
from gangway.server.errors import RequestError, invalid, unavailable
from gangway.server.failures import failure
from gangway.server.in_place.choice import choose
from gangway.server.in_place.elsewhere import NOWHERE, Elsewhere
from gangway.server.in_place.mappings import Mappings
from gangway.server.models import Models, ServedModel
from gangway.server.plan import Plan, Planner
from gangway.server.regions import NO_REGIONS, Region, Regions
from gangway.server.request_clock import RequestClock
from gangway.server.response import report_of, with_id
from gangway.server.response_cache import ResponseCache, key_of
from gangway.server.sequence.sequences import Sequences
from gangway.server.shape_watch import ShapeWatch
from gangway.server.statistics import Times
from gangway.server.tracing.sampled import Instants
from gangway.server.tracing.tracer import Tracer
from gangway.server.wire import MalformedRequestError, split_request
from google.protobuf.message import DecodeError

COMPUTED: Final = frozenset({SlotStatus.OK, SlotStatus.INTERNAL})  # or it was tried


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


class Inference:
    """Serves the models that it was last given. Safe for threads."""

    def __init__(
        self,
        plane: DataPlane,
        watch: ShapeWatch,
        regions: Regions,
        tracer: Tracer,
        cache: ResponseCache | None = None,
        mappings: Mappings | None = None,
        sequences: Sequences | None = None,
    ) -> None:
        self._plane = plane
        self._watch = watch
        self._regions = regions
        self._tracer = tracer
        self._cache = cache
        self._mappings = mappings
        self._sequences = sequences or Sequences(plane)
        self._planner = Planner(Models())
        self._refusal = ""
        self._in_order: frozenset[str] = frozenset()  # models whose answers keep the order of the requests
        self._calls: set[Request | EnsembleRun] = set()  # until the last byte of the answer has been sent

    def serve(self, models: Models) -> None:
        """Serve these models from now on; requests that have begun keep theirs."""
        loads = {model.load for model in models.served()}
        self._sequences.keep(loads)
        self._planner = Planner(models)
        self._in_order = frozenset(model.name for model in models.served() if preserves_ordering(model.config))
        if self._cache is not None:
            self._cache.keep(loads)

    def refuse(self, reason: str) -> None:
        """Answer every further request with UNAVAILABLE."""
        self._refusal = reason
        self._sequences.refuse(reason)

    @property
    def idle(self) -> bool:
        """Whether no request is being executed and no answer to one is still on its way."""
        return not self._calls and not self._plane.usage().requests and self._sequences.idle

    @property
    def plane(self) -> DataPlane:
        """The way to the scheduler."""
        return self._plane

    @property
    def regions(self) -> Regions:
        """The clients' shared memory."""
        return self._regions

    def take_plain(self, header: bytes, has_raws: bool) -> Plan | None:
        """Return a plan that is known and plain, whose model stays until its `uses` are ended; None if there is none.

        So it is, too, while requests are refused or traced: `infer` sees to that.
        """
        if self._refusal or self._tracer.active:
            return None
        plan = self._planner.known(header, has_raws)
        return plan if plan is not None and plan.plain_call is not None and plan.model.uses.begin() else None

    def order_of(self, header: bytes) -> str | None:
        """Return the model of a request, if its answers keep the order of the requests; None for any other model.

        `header`: as in `infer_parts`. None also if it cannot be read, which others will complain about.
        """
        if not any(name.encode() in header for name in self._in_order):
            return None  # most headers need no second look
        try:
            name = pb.ModelInferRequest.FromString(header).model_name
        except DecodeError:
            return None
        return name if name in self._in_order else None

    def infer(self, message: bytes, call: Call) -> bytes:
        """Answer one serialised ModelInferRequest by a serialised ModelInferResponse. Raises RequestError."""
        arrival_ns = time.monotonic_ns()
        try:
            header, request_id, raws = split_request(message)
        except MalformedRequestError as error:
            invalid(str(error))
        return self.infer_parts(header, request_id, raws, call, arrival_ns)

    def infer_parts(
        self, header: bytes, request_id: bytes, raws: list[memoryview], call: Call, arrival_ns: int
    ) -> bytes:
        """Do the same with a request in parts: the message without id and tensors, the id, the tensors' bytes.

        Equal headers share a plan, so whoever makes them should make equal ones. `arrival_ns`: CLOCK_MONOTONIC.
        """
        if self._refusal:
            unavailable(self._refusal)
        plan = self._take(header, bool(raws))
        try:
            if self._cache is not None and plan.cacheable:
                return self._remember(self._cache, plan, header, request_id, raws, call, arrival_ns)
            return self._run(plan, request_id, raws, call, arrival_ns)
        except RequestError as error:
            had_target = plan.terms.target_us > 0
            plan.model.statistics.failed(time.monotonic_ns() - arrival_ns, error.code, had_target)
            if self._tracer.active:
                self._tracer.not_executed(plan, request_id, call, arrival_ns, error)
            raise
        finally:
            plan.model.uses.end()
            for member in plan.members:
                member.uses.end()

    def _take(self, header: bytes, has_raws: bool) -> Plan:
        """Return a plan whose model stays until its `uses` are ended."""
        while True:
            plan = self._planner.plan(header, has_raws)
            if plan.model.uses.begin():  # else it has been replaced since, and the planner with it
                if not plan.members or _begin_all(plan.members):
                    return plan
                plan.model.uses.end()

    def _remember(
        self,
        cache: ResponseCache,
        plan: Plan,
        header: bytes,
        request_id: bytes,
        raws: list[memoryview],
        call: Call,
        arrival_ns: int,
    ) -> bytes:
        """Answer from the cache, or run the request and keep its answer."""
        begin_ns = time.monotonic_ns()
        key = key_of(plan.model.load, header, raws)
        response = cache.get(key)
        looked_ns = time.monotonic_ns()
        if response is not None:
            in_time = looked_ns - arrival_ns <= plan.terms.target_us * 1000 if plan.terms.target_us else None
            plan.model.statistics.cache_hit(looked_ns - arrival_ns, looked_ns - begin_ns, in_time)
            if self._tracer.active:
                self._tracer.not_executed(plan, request_id, call, arrival_ns)
            return with_id(response, request_id)
        response = self._run(plan, b"", raws, call, arrival_ns)
        answered_ns = time.monotonic_ns()
        cache.put(key, response)
        plan.model.statistics.cache_miss(looked_ns - begin_ns + time.monotonic_ns() - answered_ns)
        return with_id(response, request_id)

    def _run(self, plan: Plan, request_id: bytes, raws: list[memoryview], call: Call, arrival_ns: int) -> bytes:
        if plan.sequence is None:
            return self._execute_now(plan, request_id, raws, call, arrival_ns)
        with self._sequences.turn(plan, call, arrival_ns) as own:
            return self._execute_now(own, request_id, raws, call, arrival_ns)

    def _execute_now(self, plan: Plan, request_id: bytes, raws: list[memoryview], call: Call, arrival_ns: int) -> bytes:
        if not plan.regions:
            return self._answer(plan, request_id, plan.contents(raws), NO_REGIONS, call, arrival_ns)
        with self._regions.held(plan.regions) as regions:
            return self._answer(plan, request_id, plan.contents(raws, regions), regions, call, arrival_ns)

    def _answer(
        self,
        plan: Plan,
        request_id: bytes,
        contents: Contents,
        regions: Mapping[str, Region],
        call: Call,
        arrival_ns: int,
    ) -> bytes:
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
                    raise failure(plan.model.name, status, plan.terms.max_queue)
        if plan.model.symbols and plan.sequence is None:
            self._watch.used(plan.model, plan.model.key_of(plan.shapes.sizes))
        queued_ns = submitted_ns - plan.waited_ns  # waiting for its turn is waiting
        end_ns = count(plan, clock, queued_ns, finished_ns, outcome)
        if self._tracer.active:
            instants = Instants(arrival_ns, queued_ns, finished_ns, end_ns)
            self._tracer.answered(plan, request_id, call, instants, outcome, contents, response)
        if plan.wants_report:
            response += report_of(outcome, plan.shapes.rows, plan.terms.target_us, placed.count)
        return response

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
        with EnsembleRun(self._plane, self._watch, way, plan.terms, clock) as run:
            self._calls.add(run)
            if not call.add_callback(lambda: self._ended(run)):
                self._ended(run)
            results = run.execute(contents)
            finished_ns = time.monotonic_ns()
            response = way.answer(request_id, results, regions)
        spans, end_ns = run.spans, time.monotonic_ns()
        outcome = outcome_of(spans, clock.arrival_ns)
        in_time = end_ns <= clock.deadline_ns if clock.deadline_ns else None
        times = times_of(spans, end_ns - clock.arrival_ns)
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
            return self._plane.open(way.layout(contents), plan.shapes.rows, placed)
        except PoolExhaustedError as error:
            placed.let_go()
            unavailable(f"Exceeds maximum queue size: {error}")

    def submit(self, plan: Plan, request: Request, call: Call, clock: RequestClock, by_bell: bool = False) -> None:
        """Hand a request to the scheduler, and cancel it when its call is over. Raises RequestError (UNAVAILABLE)."""
        terms = plan.terms
        try:
            request.submit(
                clock.deadline_ns,
                terms.priority,
                clock.arrival_ns,
                clock.limit_ns,
                terms.rejects_late,
                terms.max_queue,
                by_bell,
            )
        except PoolExhaustedError as error:
            unavailable(f"Exceeds maximum queue size: {error}")
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


def count(plan: Plan, clock: RequestClock, submitted_ns: int, finished_ns: int, outcome: SlotOutcome) -> int:
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
    in_time = end_ns <= clock.deadline_ns if clock.deadline_ns else None
    plan.model.statistics.succeeded(plan.shapes.rows, times, in_time, outcome.counts, outcome.batch_rows, outcome.leads)
    return end_ns


def _begin_all(models: Sequence[ServedModel]) -> bool:
    """Begin to use all of them; False, and none is used, if one has been replaced meanwhile."""
    for index, model in enumerate(models):
        if not model.uses.begin():
            for begun in models[:index]:
                begun.uses.end()
            return False
    return True
