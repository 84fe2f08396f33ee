"""ModelInfer: bytes in, bytes out. One copy of each input into shared memory, one copy of each output out of it."""

import time
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from gangway.protos import grpc_service_pb2 as pb
from gangway.server.batching import preserves_ordering
from gangway.server.data_plane import DataPlane
from gangway.server.errors import RequestError, invalid, unavailable
from gangway.server.execution import Call, Execution
from gangway.server.in_place.mappings import Mappings
from gangway.server.large_contents import split_contents
from gangway.server.models import Models, ServedModel
from gangway.server.plan import Plan, Planner
from gangway.server.regions import NO_REGIONS, Regions
from gangway.server.response import with_id
from gangway.server.response_cache import ResponseCache, key_of
from gangway.server.sequence.sequences import Sequences
from gangway.server.shape_watch import ShapeWatch
from gangway.server.tracing.tracer import Tracer
from gangway.server.wire import MalformedRequestError, Raws, split_request


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
        self.execution = Execution(plane, watch, tracer, mappings)
        self.regions = regions
        self._tracer = tracer
        self._cache = cache
        self._sequences = sequences or Sequences(plane)
        self._planner = Planner(Models())
        self._refusal = ""
        self._in_order: frozenset[str] = frozenset()  # models whose answers keep the order of the requests

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
        return self.execution.idle and self._sequences.idle

    def take_plain(self, header: bytes, has_raws: bool) -> Plan | None:
        """Return a plan that is known and plain, whose model stays until its `uses` are ended; None if there is none.

        So it is, too, while requests are refused, or traced with their tensors: `infer` sees to that.
        """
        if self._refusal or self._tracer.wants_tensors:
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
            header, request_id, raws = split_contents(split_request(message))
        except MalformedRequestError as error:
            invalid(str(error))
        return self.infer_parts(header, request_id, raws, call, arrival_ns)

    def infer_parts(self, header: bytes, request_id: bytes, raws: Raws, call: Call, arrival_ns: int) -> bytes:
        """Do the same with a request in parts: the message without id and tensors, the id, the tensors' bytes.

        Equal headers share a plan, so whoever makes them should make equal ones. `arrival_ns`: CLOCK_MONOTONIC.
        """
        if self._refusal:
            unavailable(self._refusal)
        plan = self._take(header, bool(raws))
        try:
            if not isinstance(raws, list):
                raws = raws()
            if self._cache is not None and plan.cacheable:
                return self._remember(self._cache, plan, header, request_id, raws, call, arrival_ns)
            return self._run(plan, request_id, raws, call, arrival_ns)
        except RequestError as error:
            self.note_failure(plan, request_id, call, arrival_ns, error)
            raise
        finally:
            plan.model.uses.end()
            for member in plan.members:
                member.uses.end()

    def note_failure(self, plan: Plan, request_id: bytes, call: Call, arrival_ns: int, error: RequestError) -> None:
        """Count a request that has failed, and trace it if it is one to trace."""
        plan.model.statistics.failed(time.monotonic_ns() - arrival_ns, error.code, plan.terms.target_us > 0)
        if self._tracer.active:
            self._tracer.not_executed(plan, request_id, call, arrival_ns, error)

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
            return self.execution.answer(plan, request_id, plan.contents(raws), NO_REGIONS, call, arrival_ns)
        with self.regions.held(plan.regions) as regions:
            return self.execution.answer(plan, request_id, plan.contents(raws, regions), regions, call, arrival_ns)


def _begin_all(models: Sequence[ServedModel]) -> bool:
    """Begin to use all of them; False, and none is used, if one has been replaced meanwhile."""
    for index, model in enumerate(models):
        if not model.uses.begin():
            for begun in models[:index]:
                begun.uses.end()
            return False
    return True
