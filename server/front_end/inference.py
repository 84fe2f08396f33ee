"""ModelInfer: bytes in, bytes out. Plans of requests, the response cache, and who may not be answered now."""

import hashlib
import threading
import time
from collections.abc import Container, Sequence
from typing import NamedTuple

from cachetools import LRUCache
from google.protobuf.message import DecodeError

from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import RequestError, invalid, unavailable
from gangway.server.front_end.model_run import ClientCall
from gangway.server.front_end.request import ClientRequest, Resources
from gangway.server.front_end.sequences import Sequences
from gangway.server.models.served import Models, ServedModel
from gangway.server.models.settings import preserves_ordering
from gangway.server.requests.codecs import with_id
from gangway.server.requests.contents import split_contents
from gangway.server.requests.validation import RequestPlan, RequestPlanner
from gangway.server.requests.wire import MalformedRequestError, Raws, split_request

# The response cache: answers of models whose configuration allows it, for requests that are equal byte by byte.
#
# The least recently used answers go when there is no room. A model that is loaded again has another `load` number, so
# what was answered before is never found again, and `keep` gives its memory back.

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
    """At most `size_bytes` of answers. Safe for threads."""

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

    def take_plain(self, header: bytes, has_raws: bool) -> RequestPlan | None:
        """Return a plan that is known and plain, whose model stays until its `uses` are ended; None if there is none.

        So it is, too, while requests are refused, or traced with their tensors: `infer` sees to that.
        """
        if self._refusal or self._resources.tracer.wants_tensors:
            return None
        plan = self._planner.known(header, has_raws)
        return plan if plan is not None and plan.plain_codec is not None and plan.model.uses.begin() else None

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

        Equal headers share a plan, so whoever makes them should make equal ones. `arrival_ns`: CLOCK_MONOTONIC.
        """
        if self._refusal:
            unavailable(self._refusal)
        plan = self._take(header, bool(raws))
        request = ClientRequest(self._resources, plan, request_id, call, arrival_ns)
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
