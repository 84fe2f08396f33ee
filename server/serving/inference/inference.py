"""ModelInfer on the loop: a request is planned, looked for in the response cache, waits for its turn in a sequence, and
is answered (`request.py`). None of it blocks.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from google.protobuf.message import DecodeError

from gangway.base.logs import OFTEN
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import RequestError, fault, invalid, unavailable
from gangway.server.models.served import Models, ServedModel
from gangway.server.models.settings import preserves_ordering
from gangway.server.requests.codecs import with_id
from gangway.server.requests.contents import MalformedRequestError, Raws, RequestHead, split_contents, split_request
from gangway.server.requests.validation import RequestPlan, RequestPlanner
from gangway.server.serving.call import Call
from gangway.server.serving.inference.arriving import ArrivingMemory, ArrivingRequest
from gangway.server.serving.inference.python import LARGE_BYTES, AttendedInstance, InnerCall
from gangway.server.serving.inference.request import ClientRequest, Resources
from gangway.server.serving.inference.response_cache import ResponseCache, key_of
from gangway.server.serving.inference.sequences import Sequences
from gangway.server.serving.pending import drive

_log = logging.getLogger(__name__)

LARGE_HEADER_BYTES = 64 << 10  # to understand it would hold the loop for too long: it has tensors in it


class Inference:
    """Serves the models that it was last given. `cache`: None if no answers are kept.

    What begins requests is for the loop's thread, all else for any.
    """

    def __init__(self, resources: Resources, sequences: Sequences, cache: ResponseCache | None = None) -> None:
        self.cache = cache
        self._resources = resources
        self._sequences = sequences
        self._planner = RequestPlanner(Models())
        self._places = ArrivingMemory(resources.slots, self._execute)
        self._attended: dict[str, AttendedInstance] = {}  # by address
        self._refusal = ""
        self._in_order: frozenset[str] = frozenset()  # models whose answers keep the order of the requests
        self._in_sequences: frozenset[str] = frozenset()  # models whose requests may stand in sequences

    def serve(self, models: Models) -> None:
        """Serve these models from now on; requests that have begun keep theirs."""
        loads = {model.load for model in models.served()}
        self._sequences.keep(loads)
        self._planner = RequestPlanner(models)
        self._in_order = frozenset(model.name for model in models.served() if preserves_ordering(model.config))
        self._in_sequences = frozenset(model.name for model in models.served() if model.sequence or model.is_ensemble)
        if self.cache is not None:
            self.cache.keep(loads)

    def attend(self, address: str) -> None:
        """Execute what the model of an instance asks for while it has no request, until its process ends."""
        if address not in self._attended:
            with suppress(OSError):  # no descriptor: it asks again
                forget = partial(self._attended.pop, address, None)
                self._attended[address] = AttendedInstance(self._resources.slots, address, self.begin, forget)

    def refuse(self, reason: str) -> None:
        """Answer every further request with UNAVAILABLE."""
        self._refusal = reason
        self._sequences.refuse(reason)

    @property
    def idle(self) -> bool:
        """Whether no request is being executed and no answer to one is still on its way."""
        return self._resources.idle and not self._sequences.requests

    def order_of(self, header: bytes) -> str | None:
        """Return the model of a request, if its answers keep the order of the requests; None for any other model.

        `header`: as in `begin`. None if the header is unparsable; the planner reports that.
        """
        if not any(name.encode() in header for name in self._in_order):
            return None  # most headers need no second look
        try:
            name = pb.ModelInferRequest.FromString(header).model_name
        except DecodeError:
            return None
        return name if name in self._in_order else None

    def has_sequences(self, name: str) -> bool:
        """Whether requests to this model may stand in sequences. To any other one their ids mean nothing."""
        return name in self._in_sequences

    def begin_message(self, message: bytes, call: Call) -> None:
        """Execute one serialised ModelInferRequest; `call.answer` gets the serialised ModelInferResponse."""
        arrival_ns = time.monotonic_ns()
        if len(message) > LARGE_BYTES:
            drive(self._answer_large(message, call, arrival_ns))
            return
        known = self._planner.known(message)
        if known is not None and not self._refusal and known[0].model.uses.begin():
            drive(self._answer_known(*known, call, arrival_ns))
            return
        try:
            parts = parts_of(message)
        except RequestError as error:
            call.answer(error)
            return
        self.begin(*parts, call, arrival_ns)

    def begin(self, header: bytes, request_id: bytes, raws: Raws, call: Call, arrival_ns: int) -> None:
        """Do the same with a request in parts: the message without id and tensors, the id, the tensors' bytes.

        Equal headers share a plan, so callers should make equal headers for equal requests. `arrival_ns`:
        CLOCK_MONOTONIC.
        """
        drive(self._answer_parts(header, request_id, raws, call, arrival_ns))

    def arriving(self, begin: bytes, size_bytes: int) -> ArrivingRequest | None:
        """Return what takes the rest of a message of `size_bytes` that begins so, and executes it then.

        None: more of it must be there, or it is to be collected, and goes to `begin_message`.
        """
        head = RequestHead.of(begin)
        if head is None or self._refusal or self._resources.tracer.wants_tensors:
            return None
        try:
            plan = self._planner.plan(head.header, True)
            return self._places.open(plan, head, begin[: head.size_bytes], size_bytes)
        except RequestError:  # which is told once all is there
            return None

    def _execute(self, arriving: ArrivingRequest, call: Call) -> None:
        if self._refusal or not arriving.plan.model.uses.begin():  # it has been replaced since
            message = arriving.collected()
            arriving.drop()
            self.begin_message(message, call)
            return
        drive(self._answer_arrived(arriving, call, time.monotonic_ns()))

    async def _answer_arrived(self, arriving: ArrivingRequest, call: Call, arrival_ns: int) -> None:
        request = ClientRequest(self._resources, arriving.plan, arriving.request_id, call, arrival_ns, self.begin)
        request.placed = arriving.leave()
        try:
            result = await request.answer()
        except Exception as error:
            self._fail(request, error)
        else:
            self._finish(request, result)

    async def _answer_large(self, message: bytes, call: Call, arrival_ns: int) -> None:
        """Have a thread take a message apart, whose header may be most of it."""
        try:
            header, request_id, raws = await self._resources.slots.aside.run(parts_of, message)
        except Exception as error:
            call.answer(_told(error))
        else:
            self.begin(header, request_id, raws, call, arrival_ns)

    async def _answer_known(
        self, plan: RequestPlan, request_id: bytes, raws: list[memoryview], call: Call, arrival_ns: int
    ) -> None:
        request = ClientRequest(self._resources, plan, request_id, call, arrival_ns, self.begin)
        try:
            await request.take(raws)
            del raws  # the request holds them, until they are in its own memory
            result = await request.answer()
        except Exception as error:
            self._fail(request, error)
        else:
            self._finish(request, result)

    async def _answer_parts(self, header: bytes, request_id: bytes, raws: Raws, call: Call, arrival_ns: int) -> None:
        try:
            plan = await self._take(header, bool(raws), isinstance(call, InnerCall))
        except Exception as error:
            if call.access is not None and not call.access.model:
                call.access.model = _named_model(header)
            call.answer(_told(error))
            return
        request = ClientRequest(self._resources, plan, request_id, call, arrival_ns, self.begin)
        try:
            given = raws if isinstance(raws, list) else await self._resources.slots.aside.run(raws)
            del raws
            is_step = isinstance(call, InnerCall) and call.is_step
            if self.cache is not None and plan.cacheable and not is_step:
                result = await self._remember(self.cache, request, given)
            elif plan.sequence is not None:
                result = await self._in_turn(request, given)
            else:
                await request.take(given)
                del given  # the request holds it, until it is in its own memory
                result = await request.answer()
        except Exception as error:
            self._fail(request, error)
        else:
            self._finish(request, result)

    def _finish(self, request: ClientRequest, result: bytes) -> None:
        """Answer a request. Counting it and the like come after the answer."""
        if request.call.access is not None:
            request.note(request.call.access)
        deferred = self._resources.slots.deferred
        deferred.add(request.end, at_once=bool(request.regions))  # which the client may unmap
        request.call.answer(result)
        if not request.by_slot:  # else it is done when all that have ended are answered
            deferred.do()

    def _fail(self, request: ClientRequest, error: Exception) -> None:
        told = _told(error)
        if request.call.access is not None:
            request.note(request.call.access)
        request.fail(told)
        request.close()
        request.call.answer(told)

    async def _in_turn(self, request: ClientRequest, raws: list[memoryview]) -> bytes:
        turn = await self._sequences.turn(request.plan, request.call, request.begin_ns)
        try:
            request.take_turn(turn.plan)
            await request.take(raws)
            return await request.answer()
        finally:
            request.conclude()  # the next one may need its memory
            turn.leave()

    async def _remember(self, cache: ResponseCache, request: ClientRequest, raws: list[memoryview]) -> bytes:
        """Answer from the cache, or have the request executed and keep its answer."""
        begin_ns = time.monotonic_ns()
        load, header = request.model.load, request.plan.cached_header
        parts: list[bytes | memoryview] = [*raws]
        for pair in sorted(request.envelope.headers.items()):
            parts += map(str.encode, pair)
        if sum(map(len, raws)) > LARGE_BYTES:
            key = await self._resources.slots.aside.run(key_of, load, header, parts)
        else:
            key = key_of(load, header, parts)
        response = cache.get(key)
        if response is not None:
            request.answered_from_cache(begin_ns)
            return with_id(response, request.request_id)
        asked_ns = time.monotonic_ns()
        request.response_id = b""
        if request.plan.sequence is not None:
            response = await self._in_turn(request, raws)
        else:
            await request.take(raws)
            response = await request.answer()
        answered_ns = time.monotonic_ns()
        cache.put(key, response)
        request.model.statistics.cache_miss(asked_ns - begin_ns + time.monotonic_ns() - answered_ns)
        return with_id(response, request.request_id)

    async def _take(self, header: bytes, has_raws: bool, is_inner: bool) -> RequestPlan:
        """Return a plan whose model stays until its `uses` are ended. Raises RequestError."""
        while True:
            if self._refusal and not is_inner:  # which belongs to a request that has begun
                unavailable(self._refusal)
            if len(header) > LARGE_HEADER_BYTES:
                plan = await self._resources.slots.aside.run(self._planner.plan, header, has_raws)
            else:
                plan = self._planner.plan(header, has_raws)
            if plan.model.uses.begin():  # else it has been replaced since, and the planner with it
                if not plan.members or _begin_all(plan.members):
                    return plan
                plan.model.uses.end()


def _told(error: Exception) -> RequestError:
    """Return what the client is told of an error."""
    if isinstance(error, RequestError):
        return error
    _log.error("a request failed by a fault of the server; its client is told INTERNAL", exc_info=error, extra=OFTEN)
    return fault()


def _named_model(header: bytes) -> str:
    """Return the model that a request names; empty if it cannot be read."""
    try:
        return pb.ModelInferRequest.FromString(header).model_name
    except DecodeError:
        return ""


def parts_of(message: bytes) -> tuple[bytes, bytes, Raws]:
    """Return header, id and tensors of a serialised ModelInferRequest. Raises RequestError."""
    try:
        return split_contents(split_request(message))
    except MalformedRequestError as error:
        invalid(str(error))


def _begin_all(models: Sequence[ServedModel]) -> bool:
    """Begin to use all of them; False, and none is used, if one has been replaced meanwhile."""
    for index, model in enumerate(models):
        if not model.uses.begin():
            for begun in models[:index]:
                begun.uses.end()
            return False
    return True
