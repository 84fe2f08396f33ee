"""Answers one request whose body is there: what the threads of the HTTP server do."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gangway.server.errors import RequestError, invalid, unsupported
from gangway.server.http.call import HttpCall
from gangway.server.http.compression import MIN_BYTES, accepted, deflate, inflate
from gangway.server.http.generate import generate_reply, read_generate
from gangway.server.http.infer_request import JsonRequest, JsonRequests, most_body_bytes
from gangway.server.http.infer_response import JsonResponses
from gangway.server.http.json_text import parse_object
from gangway.server.http.operations import OPERATIONS, Operation
from gangway.server.http.raw_request import read_raw
from gangway.server.http.replies import HttpError, Reply, error_text, refusal
from gangway.server.http.routes import Route
from gangway.server.inference import Inference
from gangway.server.methods import AnyMethod
from gangway.server.models import Models

INFERENCES = frozenset({"infer", "generate", "generate_stream"})  # always POST
HEADER_LENGTH = b"inference-header-content-length"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Incoming:
    """A request. `headers` have names in lower case; `arrival_ns` is CLOCK_MONOTONIC."""

    verb: str
    route: Route
    headers: Mapping[bytes, bytes]
    body: bytes
    call: HttpCall
    arrival_ns: int


def verbs_of(route: Route) -> tuple[str, ...]:
    """Return the HTTP methods that a path has."""
    return ("POST",) if route.operation in INFERENCES else tuple(OPERATIONS[route.operation])


def method_of(route: Route, verb: str) -> str:
    """Return the method of the service that a route stands for."""
    return "ModelInfer" if route.operation in INFERENCES else OPERATIONS[route.operation][verb].method


class Service:
    """Translates to and from the methods of the service. Safe for threads."""

    def __init__(
        self,
        inference: Inference,
        methods: Mapping[str, AnyMethod],
        models: Callable[[], Models],
        max_body_bytes: int,
    ) -> None:
        self._inference = inference
        self._methods = methods
        self._models = models
        self._max_body_bytes = max_body_bytes
        self._requests = JsonRequests()
        self._responses = JsonResponses()

    def answer(self, incoming: Incoming) -> Reply:
        """Return the reply, whatever happens."""
        try:
            reply = self._reply(incoming)
            return _compressed(reply, incoming.headers) if incoming.route.operation == "infer" else reply
        except RequestError as error:
            return refusal(error)
        except HttpError as error:
            return error.reply
        except Exception:
            _log.exception("a request failed unexpectedly")
            return Reply(500, (error_text("internal error, see the server's log"),))

    def _reply(self, incoming: Incoming) -> Reply:
        body = incoming.body
        if b"content-encoding" in incoming.headers:
            encoding = incoming.headers[b"content-encoding"].decode("latin-1").strip().lower()
            body = inflate(body, encoding, self._most_bytes(incoming.route))
        match incoming.route.operation:
            case "infer":
                return self._infer(incoming, memoryview(body))
            case "generate" | "generate_stream":
                return self._generate(incoming, body)
            case operation:
                return self._ask(incoming, OPERATIONS[operation][incoming.verb], body)

    def _most_bytes(self, route: Route) -> int:
        """Return how long a body may be when it is inflated. Raises RequestError for inference with no such model."""
        if route.operation not in INFERENCES:
            return self._max_body_bytes
        most_bytes = most_body_bytes(self._models().find(route.model, route.version))
        return self._max_body_bytes if most_bytes is None else min(most_bytes, self._max_body_bytes)

    def _ask(self, incoming: Incoming, operation: Operation, body: bytes) -> Reply:
        content = parse_object(body) if incoming.verb == "POST" else {}
        method = self._methods.get(operation.method)
        if method is None:
            unsupported(f"{operation.method} is not supported by this server")
        return operation.reply(method.answer(operation.request(incoming.route, content)))

    def _infer(self, incoming: Incoming, body: memoryview) -> Reply:
        route = incoming.route
        json_bytes = _json_bytes(incoming.headers, len(body))
        if json_bytes or HEADER_LENGTH not in incoming.headers:
            request = self._requests.read(route.model, route.version, body[:json_bytes])
        else:
            request = read_raw(self._models().find(route.model, route.version), route.version, body)
        return self._responses.reply(self._run(incoming, request, body[json_bytes:]), request.wishes)

    def _generate(self, incoming: Incoming, body: bytes) -> Reply:
        route = incoming.route
        model = self._models().find(route.model, route.version)
        request = read_generate(model, route.version, body)
        response = self._run(incoming, request, memoryview(b""))
        return generate_reply(response, streamed=route.operation == "generate_stream")

    def _run(self, incoming: Incoming, request: JsonRequest, binary: memoryview) -> bytes:
        raws = request.raws(incoming.route.model, binary)
        return self._inference.infer_parts(request.header, request.request_id, raws, incoming.call, incoming.arrival_ns)


def _compressed(reply: Reply, headers: Mapping[bytes, bytes]) -> Reply:
    """Compress tensors only, as Triton does: clients ask for it by default and do not expect it of anything else."""
    encoding = accepted(headers.get(b"accept-encoding", b"").decode("latin-1"))
    return deflate(reply, encoding) if encoding and reply.size_bytes >= MIN_BYTES else reply


def _json_bytes(headers: Mapping[bytes, bytes], body_bytes: int) -> int:
    """Return how many bytes of the body are JSON: all, if the header that says it is missing."""
    text = headers.get(HEADER_LENGTH)
    if text is None:
        return body_bytes
    if not (text.isdigit() and len(text) < 19 and int(text) <= body_bytes):
        invalid(
            f"Inference-Header-Content-Length: expected 0 to {body_bytes}, the length of the body, got"
            f" '{text[:40].decode('latin-1')}'"
        )
    return int(text)
