"""ModelInfer: bytes in, bytes out, with a thread that waits for the answer or without one.

`Inference` plans requests, asks the response cache, and answers in the caller's thread. `NonBlockingInference` hands a
request to the scheduler at once, and the loop answers it. It takes plain requests only: small ones, of a form
that has been seen before, whose tensors are in the messages or in the clients' shared memory. All others, and whatever
is wrong, go the blocking way.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol, cast

from cachetools import LRUCache
from google.protobuf.message import DecodeError

from gangway.executor.logs import OFTEN
from gangway.protos import StatusCode
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import RequestError, invalid, unavailable
from gangway.server.front_end.model_run import ClientCall, InnerCall, InnerStream
from gangway.server.front_end.request import ClientRequest, Resources
from gangway.server.front_end.sequences import Sequences
from gangway.server.models.served import Models, ServedModel
from gangway.server.models.settings import preserves_ordering
from gangway.server.requests.codecs import with_id
from gangway.server.requests.contents import MalformedRequestError, Raws, split_contents, split_request
from gangway.server.requests.data_plane import Submission
from gangway.server.requests.python_codec import PythonCodec
from gangway.server.requests.validation import KnownRequest, RequestPlan, RequestPlanner
from gangway.server.serving.loop import Completions, ServingLoop
from gangway.server.threads import NO_THREAD

_log = logging.getLogger(__name__)

ENTRY_BYTES = 400  # what an answer costs besides its own bytes: key, digest, dictionaries
DIGEST_BYTES = 32
_LENGTH_BYTES = 8


class Key(NamedTuple):
    """Which model, as loaded when, and what was asked."""

    load: int
    digest: bytes


def key_of(load: int, header: bytes, raws: Sequence[bytes | memoryview]) -> Key:
    """Return the key of a request: its header, without the id, and its tensors."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in (header, *raws):
        digest.update(len(part).to_bytes(_LENGTH_BYTES, "little"))
        digest.update(part)
    return Key(load, digest.digest())


class ResponseCache:
    """Answers of models whose configuration allows it, for requests that are equal byte by byte. Safe for threads.

    It holds at most `size_bytes`; the least recently used answers go when there is no room. A model that is loaded
    again has another `load` number, so its former answers are never found, and `keep` frees them.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._lock = threading.Lock()
        self._answers: LRUCache[Key, bytes] = LRUCache(size_bytes, _cost)

    def get(self, key: Key) -> bytes | None:
        """Return the answer that was given before, without an id."""
        with self._lock:
            return self._answers.get(key)

    def put(self, key: Key, answer: bytes) -> None:
        """Keep an answer, unless it is larger than the cache."""
        if _cost(answer) <= self._size_bytes:
            with self._lock:
                self._answers[key] = answer

    def keep(self, loads: Container[int]) -> None:
        """Forget the answers of all other models."""
        with self._lock:
            for key in [key for key in self._answers if key.load not in loads]:
                del self._answers[key]

    @property
    def used_bytes(self) -> int:
        """How much is taken."""
        with self._lock:
            return int(self._answers.currsize)


def _cost(answer: bytes) -> int:
    return len(answer) + ENTRY_BYTES


class Inference:
    """Serves the models that it was last given. Safe for threads. `cache`: None if no answers are kept."""

    def __init__(self, resources: Resources, sequences: Sequences, cache: ResponseCache | None = None) -> None:
        self.cache = cache
        self._resources = resources
        self._sequences = sequences
        self._planner = RequestPlanner(Models())
        self._refusal = ""
        self._in_order: frozenset[str] = frozenset()  # models whose answers keep the order of the requests

    def serve(self, models: Models) -> None:
        """Serve these models from now on; requests that have begun keep theirs."""
        loads = {model.load for model in models.served()}
        self._sequences.keep(loads)
        self._planner = RequestPlanner(models)
        self._in_order = frozenset(model.name for model in models.served() if preserves_ordering(model.config))
        if self.cache is not None:
            self.cache.keep(loads)

    def refuse(self, reason: str) -> None:
        """Answer every further request with UNAVAILABLE."""
        self._refusal = reason
        self._sequences.refuse(reason)

    @property
    def idle(self) -> bool:
        """Whether no request is being executed and no answer to one is still on its way."""
        return self._resources.idle and not self._sequences.requests

    def take_plain(self, message: bytes) -> KnownRequest | None:
        """Return a request that is known and plain, whose model stays until its `uses` are ended; None if it is not.

        There is none while requests are refused, or traced with their tensors: `infer` handles these.
        """
        if self._refusal or self._resources.tracer.wants_tensors:
            return None
        known = self._planner.known(message)
        return known if known is not None and known.plan.model.uses.begin() else None

    def take_plain_parts(self, header: bytes, request_id: bytes, raws: list[memoryview]) -> KnownRequest | None:
        """Do the same with a request in parts, as `infer_parts` takes them."""
        if self._refusal or self._resources.tracer.wants_tensors:
            return None
        known = self._planner.known_parts(header, request_id, raws)
        return known if known is not None and known.plan.model.uses.begin() else None

    def order_of(self, header: bytes) -> str | None:
        """Return the model of a request, if its answers keep the order of the requests; None for any other model.

        `header`: as in `infer_parts`. None if the header is unparsable; the planner reports that.
        """
        if not any(name.encode() in header for name in self._in_order):
            return None  # most headers need no second look
        try:
            name = pb.ModelInferRequest.FromString(header).model_name
        except DecodeError:
            return None
        return name if name in self._in_order else None

    def infer(self, message: bytes, call: ClientCall) -> bytes:
        """Answer one serialised ModelInferRequest by a serialised ModelInferResponse. Raises RequestError."""
        arrival_ns = time.monotonic_ns()
        try:
            header, request_id, raws = split_contents(split_request(message))
        except MalformedRequestError as error:
            invalid(str(error))
        return self.infer_parts(header, request_id, raws, call, arrival_ns)

    def infer_parts(self, header: bytes, request_id: bytes, raws: Raws, call: ClientCall, arrival_ns: int) -> bytes:
        """Do the same with a request in parts: the message without id and tensors, the id, the tensors' bytes.

        Equal headers share a plan, so callers should make equal headers for equal requests. `arrival_ns`:
        CLOCK_MONOTONIC.
        """
        if self._refusal:
            unavailable(self._refusal)
        plan = self._take(header, bool(raws))
        request = ClientRequest(self._resources, plan, request_id, call, arrival_ns, self.infer_inner)
        try:
            if not isinstance(raws, list):
                raws = raws()
            if self.cache is not None and plan.cacheable:
                return self._remember(self.cache, request, header, raws)
            return self._answer(request, raws)
        except RequestError as error:
            request.fail(error)
            raise
        finally:
            request.close()

    def infer_inner(
        self, header: bytes, request_id: bytes, raws: Sequence[memoryview], call: InnerCall | InnerStream
    ) -> bytes:
        """Answer a request that a Python model makes."""
        return self.infer_parts(header, request_id, list(raws), call, time.monotonic_ns())

    def _answer(self, request: ClientRequest, raws: list[memoryview]) -> bytes:
        if request.plan.sequence is None:
            return request.answer(request.contents_of(raws))
        with self._sequences.turn(request.plan, request.call, request.begin_ns) as own:
            request.take_turn(own)
            return request.answer(request.contents_of(raws))

    def _remember(self, cache: ResponseCache, request: ClientRequest, header: bytes, raws: list[memoryview]) -> bytes:
        """Answer from the cache, or have the request executed and keep its answer."""
        begin_ns = time.monotonic_ns()
        key = key_of(request.model.load, header, raws)
        response = cache.get(key)
        if response is not None:
            request.answered_from_cache(begin_ns)
            return with_id(response, request.request_id)
        looked_ns = time.monotonic_ns()
        request.response_id = b""
        response = self._answer(request, raws)
        answered_ns = time.monotonic_ns()
        cache.put(key, response)
        request.model.statistics.cache_miss(looked_ns - begin_ns + time.monotonic_ns() - answered_ns)
        return with_id(response, request.request_id)

    def _take(self, header: bytes, has_raws: bool) -> RequestPlan:
        """Return a plan whose model stays until its `uses` are ended."""
        while True:
            plan = self._planner.plan(header, has_raws)
            if plan.model.uses.begin():  # else it has been replaced since, and the planner with it
                if not plan.members or _begin_all(plan.members):
                    return plan
                plan.model.uses.end()


def _begin_all(models: Sequence[ServedModel]) -> bool:
    """Begin to use all of them; False, and none is used, if one has been replaced meanwhile."""
    for index, model in enumerate(models):
        if not model.uses.begin():
            for begun in models[:index]:
                begun.uses.end()
            return False
    return True


LOOK_S: Final = 1.0  # how often requests are looked for whose time is over
MAX_MESSAGE_BYTES = 1 << 20  # all other calls wait while the loop copies a tensor

_INTERNAL: Final = RequestError(StatusCode.INTERNAL, "internal error, see the server's log")


class NonBlockingCall(ClientCall, Protocol):
    """A remote call that waits for its answer without a thread."""

    def answer(self, result: bytes | RequestError) -> None:
        """Send the answer, or why there is none; once, from any thread."""


class NonBlockingInference:
    """Safe for threads. `inference`: the blocking way, which knows the models."""

    def __init__(self, resources: Resources, inference: Inference, serving: ServingLoop) -> None:
        self._resources = resources
        self._inference = inference
        self._completions = Completions(serving, resources.plane.slots, resources.afterwork.do)
        self._waiting: dict[int, ClientRequest] = {}  # by slot
        serving.every(LOOK_S, self._give_up)

    def begin(self, message: bytes, call: NonBlockingCall) -> bool:
        """Hand a request to the scheduler; `call.answer` is called later, on the loop, with what the client gets.

        False: nothing has been done, the request is one for the blocking way.
        """
        arrival_ns = time.monotonic_ns()
        if len(message) > MAX_MESSAGE_BYTES:
            return False
        known = self._inference.take_plain(message)
        return known is not None and self._begin_known(known, call, arrival_ns)

    def begin_parts(
        self, header: bytes, request_id: bytes, raws: list[memoryview], call: NonBlockingCall, arrival_ns: int
    ) -> bool:
        """Do the same with a request in parts, as `Inference.infer_parts` takes them."""
        if sum(map(len, raws)) > MAX_MESSAGE_BYTES:
            return False
        known = self._inference.take_plain_parts(header, request_id, raws)
        return known is not None and self._begin_known(known, call, arrival_ns)

    def _begin_known(self, known: KnownRequest, call: NonBlockingCall, arrival_ns: int) -> bool:
        plan, request_id, raws = known
        begun = False
        request = ClientRequest(self._resources, plan, request_id, call, arrival_ns, self._inference.infer_inner)
        try:
            begun = self._begin(request, raws)
        except RequestError:
            pass  # the blocking way finds the same, and says so
        finally:
            if not begun:
                request.close()
        return begun

    def _begin(self, request: ClientRequest, raws: list[memoryview]) -> bool:
        """Copy the contents and hand the request over. Raises RequestError, and nothing is left of it then."""
        if request.plan.regions:
            request.contents = contents = request.contents_of(raws)
        else:
            contents = raws  # which the request does not keep: many that wait would hold their tensors twice
        request.decide(contents)
        plan = request.plan
        codec = plan.plain_codec
        if codec is None or codec.answer_bytes(plan.shapes.rows) > MAX_MESSAGE_BYTES:
            return False
        if isinstance(codec, PythonCodec):
            if codec.was_left:
                return False  # one that waits for other models needs a thread
            contents = codec.with_about(contents, request.request_id)
        submission = request.open(contents)
        if plan.regions:
            assert not isinstance(codec, PythonCodec), "for which regions are copied: no plain request"
            mapped = submission.external.inputs
            copied = sum(
                size for place, size in zip(codec.places, plan.input_sizes, strict=True) if place not in mapped
            )
            if copied > MAX_MESSAGE_BYTES:
                submission.close()
                return False
        slot = submission.slot
        self._waiting[slot] = request
        self._completions.expect(slot, partial(self._ended, slot, request))
        try:
            request.submit(contents, by_bell=True)
        except Exception:
            if not self._completions.forget(slot):
                return True  # it is being answered: UNAVAILABLE
            del self._waiting[slot]
            submission.close()
            raise
        return True

    def _give_up(self) -> None:
        """Answer the requests whose time is over."""
        now_ns = time.monotonic_ns()
        for slot, request in list(self._waiting.items()):
            if request.clock.end_ns < now_ns and self._completions.forget(slot):
                del self._waiting[slot]
                self._expired(request)

    def _ended(self, slot: int, request: ClientRequest) -> None:
        """Answer a request that has ended; on the loop. Counting it and the like come after the answer."""
        del self._waiting[slot]
        assert request.submission is not None, "opened"
        status = request.submission.status()
        if request.may_wait(status):
            self._go_on(request, partial(request.finish_and_conclude, request.submission.outcome()))
            return
        response = self._response(request, partial(request.finish, status))
        if response is not None:
            rest = partial(self._conclude, request, request.submission, response)
            self._resources.afterwork.add(rest, at_once=bool(request.regions))  # which the client may unmap
            _call_of(request).answer(response)

    def _conclude(self, request: ClientRequest, submission: Submission, response: bytes) -> None:
        self._resources.plane.last_wait_ns[request.model.model_id] = request.finished_ns - request.submitted_ns
        try:
            request.conclude(response, submission.outcome())
        finally:
            request.close()

    def _response(self, request: ClientRequest, make: Callable[[], bytes | None]) -> bytes | None:
        """Return the response; None if that is done with: the client gets an error, or another attempt follows."""
        try:
            response = make()
        except RequestError as error:
            self._fail(request, error)
        except Exception:
            _log.exception("a request failed by a fault of the server; its client is told INTERNAL", extra=OFTEN)
            self._fail(request, _INTERNAL)
        else:
            if response is None:
                self._go_on(request, partial(request.answer, request.contents))  # with more room, or without a region
            return response
        return None

    def _go_on(self, request: ClientRequest, make: Callable[[], bytes | None]) -> None:
        """Go on in the blocking way, in a thread of its own, which makes the response and concludes the request."""
        try:
            threading.Thread(target=self._answer, args=(request, make), name="again", daemon=True).start()
        except RuntimeError:
            if request.submission is not None:
                request.submission.close()
            self._fail(request, RequestError(StatusCode.UNAVAILABLE, NO_THREAD))

    def _answer(self, request: ClientRequest, make: Callable[[], bytes | None]) -> None:
        response = self._response(request, make)
        if response is not None:
            request.close()
            _call_of(request).answer(response)

    def _expired(self, request: ClientRequest) -> None:
        """Answer a request that has not ended in its time; what it holds follows later."""
        request.abandon()
        self._fail(request, request.expired())

    def _fail(self, request: ClientRequest, error: RequestError) -> None:
        request.fail(error)
        request.close()
        _call_of(request).answer(error)


def _call_of(request: ClientRequest) -> NonBlockingCall:
    return cast("NonBlockingCall", request.call)
