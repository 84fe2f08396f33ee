"""What the port of HTTP serves: from a complete request to its reply.

Health and the page are answered at once. Inference begins at once, too, and needs no thread. Large JSON, compressed
bodies and answers that are to be compressed go to few threads.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from gangway.base.memory_budget import MemoryFullError, memory_budget
from gangway.server.access import CATEGORY_OF_METHOD, Ports, Restrictions
from gangway.server.errors import RequestError, invalid, unsupported
from gangway.server.models.served import Models, ServedModel
from gangway.server.options.endpoints import HttpOptions
from gangway.server.serving.access_log import AccessLog
from gangway.server.serving.call import Begin
from gangway.server.serving.http.call import CallResponses, HttpCall, Site
from gangway.server.serving.http.embeddings import ApiError, TextApi, refusal_of
from gangway.server.serving.http.generate import (
    UNSENT_BYTES,
    EventStreams,
    event_of,
    generated,
    only_one,
    read_generate,
)
from gangway.server.serving.http.infer import (
    BinaryOutputs,
    HttpRequest,
    HttpRequests,
    JsonResponses,
    most_body_bytes,
    read_raw,
)
from gangway.server.serving.http.json_text import parse_object
from gangway.server.serving.http.model_page import described
from gangway.server.serving.http.openapi import openapi
from gangway.server.serving.http.predict import Predict, predicted, read_predict
from gangway.server.serving.http.replies import (
    EVENTS,
    JSON,
    MIN_BYTES,
    HttpError,
    Reply,
    accepted,
    deflate,
    error_text,
    inflate,
    json_reply,
    refusal,
)
from gangway.server.serving.http.routes import (
    HEALTH,
    INFERENCES,
    METRICS_PATH,
    OPENAI_PATHS,
    OPENAI_PATHS_WITHOUT_BASE,
    OPERATIONS,
    PAGES,
    PREDICT,
    TEXTS,
    UNSERVED,
    WATCHING,
    Route,
    listed_model,
    method_of,
    route_of,
    verbs_of,
)
from gangway.server.serving.http.watching import Watchers, page
from gangway.server.serving.limits import ConnectionLimit
from gangway.server.serving.pending import Offload, drive
from gangway.server.serving.protocol import Methods
from gangway.server.serving.turns import Slices, drive_for
from gangway.server.system import own_version
from gangway.server.tracing.record import HTTP

_log = logging.getLogger(__name__)

MAX_HELD_BYTES: Final = 2 << 30  # bodies of all requests together
QUICK_BYTES: Final = 16 * 1024  # of JSON, read or written, take no longer than the loop has
QUICK_INFLATED_BYTES: Final = 64 * 1024
HEADER_LENGTH: Final = b"inference-header-content-length"
R = TypeVar("R")
FAILED: Final = Reply(500, (error_text("internal error, see the server's log"),))


@dataclass(frozen=True)
class HttpService:
    """What is served. `begin` executes a request. `ports`: where this front end listens.

    `unsent_bytes`: of events that clients have not read, all together.
    """

    begin: Begin
    methods: Methods
    models: Callable[[], Models]
    options: HttpOptions
    ports: Ports
    unsent_bytes: int = UNSENT_BYTES
    access_log: AccessLog | None = None


class HttpSite(Site):
    """Routes of the protocol, inference, and what watchers see. `watchers` None: the server cannot be watched.

    `work`: threads for what takes long.
    """

    def __init__(
        self, service: HttpService, work: Offload, limit: ConnectionLimit, watchers: Watchers | None = None
    ) -> None:
        super().__init__(limit)
        self._begin = service.begin
        self._methods = service.methods
        self._models = service.models
        self._max_body_bytes = service.options.max_body_bytes
        self._restrictions: Restrictions = service.options.restrictions
        self._ports = service.ports
        self._work = work
        self._watchers = watchers
        self._access_log = service.access_log
        self._held_bytes = 0
        self._requests = HttpRequests()
        self._responses = JsonResponses()
        self._texts = TextApi(service.begin, service.models, work)
        self.streams = EventStreams(service.unsent_bytes)

    # -- what a connection asks

    def open(self, call: HttpCall) -> Reply | None:
        """Refuse what has no route, is restricted, or is too large.

        What is left of a body that is refused is dropped as it comes: many clients read no answer before they have sent
        all.
        """
        if self._access_log is not None:
            peer = call.connection.transport.get_extra_info("peername")
            call.access = self._access_log.begin(HTTP, peer, call.method, call.path)
        try:
            call.route = route = self._route(call)
            if call.access is not None:
                call.access.model, call.access.version = route.model, route.version
            self._admit(route, call)
            if route.operation not in HEALTH and self.limit.is_reserved(call.connection):
                raise HttpError(503, "too many connections", closes=True)
            if call.length > self._max_body_bytes:
                raise self._too_large()
            memory_budget().take(call.length)  # what is received is counted again
        except HttpError as error:
            return _told(call, error)
        except MemoryFullError as error:
            return _told(call, HttpError(503, str(error)))
        return None

    def begin(self, call: HttpCall) -> None:
        """Answer a request that is complete."""
        call.arrival_ns = time.monotonic_ns()
        answering = self._answer(call)
        if call.route.operation in OPERATIONS or call.route.operation in TEXTS:
            drive_for(call, answering)
        else:
            drive(answering)

    def take(self, call: HttpCall, size_bytes: int) -> Reply | None:
        """Count some of a body; refuse what is too much."""
        closes = b"expect" in call.headers
        self._held_bytes += size_bytes
        if call.received_bytes > self._max_body_bytes:
            return _told(call, self._too_large(closes))
        if self._held_bytes > MAX_HELD_BYTES:
            return _told(call, HttpError(503, "too many large requests at once", closes=closes))
        try:
            memory_budget().take(size_bytes)
        except MemoryFullError as error:
            return _told(call, HttpError(503, str(error), closes=closes))
        return None

    def release(self, call: HttpCall) -> None:
        """Count a body no more."""
        self._held_bytes -= call.received_bytes
        call.received_bytes = 0

    def refusal(self, status: int, message: str) -> Reply:
        """Return a refusal as JSON."""
        return Reply(status, (error_text(message),))

    @property
    def elsewhere(self) -> str:
        """What a client of gRPC is told."""
        return f"this port speaks HTTP/1.1, not gRPC: {self._ports.text}"

    # -- before the body

    def _route(self, call: HttpCall) -> Route:
        """Return what the path means. Raises HttpError: 404, 405."""
        route = route_of(call.path)
        if route is None or (route.operation in WATCHING and self._watchers is None):
            raise _unserved(call) or HttpError(404, f"Not Found{self._hint(call.path)}")
        verbs = verbs_of(route)
        if call.method not in verbs:
            allow = ", ".join(verbs)
            raise _unserved(call) or HttpError(405, f"Method Not Allowed, only {allow}", allow=allow)
        return route

    def _hint(self, path: bytes) -> str:
        """Return what the client of a path that there is not may have meant."""
        if path in OPENAI_PATHS_WITHOUT_BASE:
            return ": the base URL of OpenAI's API ends with /v1"
        return f": {self._ports.metrics_text}" if path == METRICS_PATH else ""

    def _admit(self, route: Route, call: HttpCall) -> None:
        """Raise HttpError unless the client has sent what a restriction asks for; the message is Triton's."""
        if not self._restrictions.groups or route.operation in PAGES:
            return
        restriction = self._restrictions.of(CATEGORY_OF_METHOD[method_of(route, call.method)])
        if restriction is not None and not restriction.admits([call.headers.get(restriction.key.encode(), b"")]):
            raise HttpError(403, f"This API is restricted, expecting header '{restriction.key}'")

    def _too_large(self, closes: bool = False) -> HttpError:
        return HttpError(413, f"the body has more than {self._max_body_bytes} bytes", closes=closes)

    # -- the answer

    async def _answer(self, call: HttpCall) -> None:
        """Answer, also after any error."""
        reply: Reply | None = FAILED
        try:
            reply = await self._reply(call)
        except (RequestError, HttpError) as error:
            reply = _told(call, error)
        except ApiError as error:
            reply = error.reply
        except Exception:
            _log.exception("a request failed by a fault of the server; its client is told INTERNAL")
        if reply is not None:
            call.finish(reply)

    async def _reply(self, call: HttpCall) -> Reply | None:
        """Return the reply; None: it has been given. Raises RequestError, HttpError."""
        route, watchers = call.route, self._watchers
        if watchers is not None and route.operation in WATCHING:
            match route.operation:
                case "page":
                    return page("watch.html")
                case "model_page":
                    return self._model_page(route.model)
                case "model_state":
                    port, models = self._ports.metrics.rpartition(":")[2], self._models()
                    return await self._work.run(lambda: json_reply(described(models, route.model, route.version, port)))
                case "state":
                    return await watchers.state()
            await watchers.stream(call)
            return None
        if b"content-encoding" in call.headers and call.method == "POST":
            await self._inflate(call)
        match route.operation:
            case "infer":
                return await self._infer_reply(call)
            case "predict":
                return await self._predict_reply(call)
            case "first_ready":
                name = self._models().find(route.model, "").name
                return json_reply({"name": name, "ready": True, **listed_model(name)})
            case "embeddings":
                return await self._texts.embeddings(call)
            case "rerank":
                return await self._texts.rerank(call)
            case "openapi":
                models = self._models()
                usable = [each for each in models.served() if isinstance(models.state_of(each), ServedModel)]
                return await self._work.run(lambda: json_reply(openapi(usable, own_version())))
            case "generate" | "generate_stream":
                responses = await self._generate(call)
                if route.operation == "generate_stream":
                    return await self._stream(call, responses)
                return Reply(200, (await self._aside(generated, await only_one(responses)),), JSON)
        return await self._ask(route, call)

    def _model_page(self, name: str) -> Reply:
        """Return the page of a model, as 404 if there is none: then it lists those that are ready.

        Where something is restricted, the status says nothing of a model.
        """
        is_known = bool(self._restrictions.groups) or any(known == name for known, _ in self._models().entries)
        return page("model.html") if is_known else replace(page("model.html"), status=404)

    async def _inflate(self, call: HttpCall) -> None:
        """Put a body as it was before its compression in its place. Raises HttpError or RequestError."""
        encoding = call.headers[b"content-encoding"].decode("latin-1").strip().lower()
        most_bytes = self._most_bytes(call.route)
        if encoding == "identity" or (len(call.body) <= QUICK_BYTES and most_bytes <= QUICK_INFLATED_BYTES):
            call.body = inflate(call.body, encoding, most_bytes)
        else:
            call.body = await self._work.run(inflate, call.body, encoding, most_bytes)

    def _most_bytes(self, route: Route) -> int:
        """Return how long a body may be when it is inflated. Raises RequestError for inference with no such model."""
        if route.operation not in INFERENCES:
            return self._max_body_bytes
        most_bytes = most_body_bytes(self._models().find(route.model, route.version))
        return self._max_body_bytes if most_bytes is None else min(most_bytes, self._max_body_bytes)

    async def _ask(self, route: Route, call: HttpCall) -> Reply:
        """Have a method of the service answer. Raises RequestError."""
        operation = OPERATIONS[route.operation][call.method]
        is_short = call.method == "GET" or len(call.body) <= QUICK_BYTES
        method = self._methods.by_name.get(operation.method)
        if method is None:
            unsupported(f"{operation.method} is not supported by this server")

        def read() -> Message:
            request = operation.request(route, parse_object(call.body) if call.method == "POST" else {})
            call.drop()
            return request

        async def write(response: Message, slices: Slices) -> Reply:
            if operation.parts is None:
                return operation.reply(response)
            parts = []
            for part in operation.parts(response):
                parts.append(part)
                await slices.rest()
            return Reply(200, (b"".join(parts),))

        return await self._methods.ask(method, read, write, is_short)

    async def _infer_reply(self, call: HttpCall) -> Reply:
        body, model, version = memoryview(call.body), call.route.model, call.route.version
        served = self._models().find(model, version)  # a wrong name counts before a wrong body, as Triton has it
        json_bytes = _json_bytes(call.headers, len(body))
        request: HttpRequest
        if json_bytes or HEADER_LENGTH not in call.headers:
            request = await self._read(json_bytes, self._requests.read, model, version, body[:json_bytes])
            binary = body[json_bytes:]
        else:
            binary = memoryview(b"")
            request = await self._read(len(body), read_raw, served, version, body)
        wanted, answered = request.binary_outputs, call.expect_answer()
        self._start(call, request, binary)
        del body, binary, request  # many that wait would hold their tensors twice
        write = partial(self._responses.reply, binary_outputs=wanted)
        return await self._finished(call, await answered, write, _all_binary(wanted))

    async def _predict_reply(self, call: HttpCall) -> Reply:
        """Answer in KServe's first protocol."""
        body, model = call.body, self._models().find(call.route.model, call.route.version)
        asked: Predict = await self._read(len(body), read_predict, model, call.route.version, body)
        del body
        form, answered = asked.form, call.expect_answer()
        self._start(call, asked.request, memoryview(b""))
        del asked
        return await self._finished(call, await answered, lambda response: Reply(200, (predicted(response, form),)))

    async def _finished(
        self, call: HttpCall, response: bytes, write: Callable[[bytes], Reply], is_quick: bool = False
    ) -> Reply:
        """Return the reply, compressed as Triton does: clients ask for it by default, and expect it of tensors only.

        `is_quick`: writing it takes no time, however large it is.
        """
        encoding = ""
        if len(response) >= MIN_BYTES and b"accept-encoding" in call.headers:
            encoding = accepted(call.headers[b"accept-encoding"].decode("latin-1"))
        if encoding or (len(response) > QUICK_BYTES and not is_quick):
            return await self._work.run(_written, response, write, encoding)
        return write(response)

    async def _generate(self, call: HttpCall) -> CallResponses:
        """Have a generate request executed; return where its responses come. Raises RequestError."""
        body, model = call.body, self._models().find(call.route.model, call.route.version)
        request: HttpRequest = await self._read(len(body), read_generate, model, call.route.version, body)
        del body
        responses = call.expect_responses()
        self._start(call, request, memoryview(b""))
        return responses

    async def _stream(self, call: HttpCall, responses: CallResponses) -> Reply | None:
        """Send each response as an event; return the reply if the first one is the last.

        Raises RequestError if the first one has no JSON, or if it is an error and the last one.
        """
        first, is_last = await responses.next()
        if is_last and isinstance(first, RequestError):
            raise first.without_traceback()
        event = await self._aside(event_of, first)
        if is_last:
            return Reply(200, (event,), EVENTS)
        status = refusal(first).status if isinstance(first, RequestError) else 200
        del first
        slices = Slices(asyncio.get_running_loop())
        with self.streams.opened(call.begin_stream(EVENTS, status, closes=False)) as transport:
            call.send(event)
            while not call.is_answered:
                found = await responses.some()
                events = [await self._later_event(each.response) for each in found if not each.is_empty]
                call.send(*events, *[b""] * found[-1].is_last)
                del found, events  # while others are awaited
                self.streams.bound(transport)
                await slices.rest()
        return None

    async def _later_event(self, response: bytes | RequestError) -> bytes:
        try:
            return await self._aside(event_of, response)
        except RequestError as error:
            return event_of(error)

    async def _aside(self, write: Callable[[Any], bytes], response: bytes | RequestError) -> bytes:
        """Return a response as JSON; a thread makes it if it is long. Raises RequestError if it has none."""
        if isinstance(response, bytes) and len(response) > QUICK_BYTES:
            return await self._work.run(write, response)
        return write(response)

    async def _read(self, size_bytes: int, read: Callable[..., R], *arguments: Any) -> R:
        """Understand so many bytes of a request. Raises RequestError."""
        if size_bytes <= QUICK_BYTES:
            return read(*arguments)
        return await self._work.run(read, *arguments)

    def _start(self, call: HttpCall, request: HttpRequest, binary: memoryview) -> None:
        """Have the request executed, which answers the call. Raises RequestError."""
        header, request_id = request.header, request.request_id
        raws = request.raws(call.route.model, binary)
        call.drop()
        self._begin(header, request_id, raws, call, call.arrival_ns)


def _written(response: bytes, write: Callable[[bytes], Reply], encoding: str) -> Reply:
    reply = write(response)
    return deflate(reply, encoding) if encoding and reply.size_bytes >= MIN_BYTES else reply


def _told(call: HttpCall, error: RequestError | HttpError) -> Reply:
    """Return the answer to a request that is refused or has failed, in the shape that its path has."""
    if call.path.startswith(OPENAI_PATHS) or call.path in OPENAI_PATHS_WITHOUT_BASE:
        return refusal_of(error)
    return refusal(error) if isinstance(error, RequestError) else error.reply


def _unserved(call: HttpCall) -> HttpError | None:
    """Return why a request that KServe's first protocol, or TensorFlow Serving's, has beside `:predict` is refused."""
    verb = call.path.rpartition(b":")[2]
    if call.method != "POST" or verb not in UNSERVED or not call.path.startswith(b"/v1/models/"):
        return None
    return HttpError(501, f"':{verb.decode()}' is not supported, only '{PREDICT}'")


def _all_binary(wanted: BinaryOutputs) -> bool:
    """Whether no output is wanted as JSON."""
    return all(binary for _, binary in wanted.named) if wanted.named else wanted.binary


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
