"""The gRPC server of a front end: methods of the protocol to functions, refusals to status codes, on the event loop.

All of it is on the loop: inference, and the table of all other methods (`protocol.py`).
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from socket import socket
from typing import Final, Protocol

from google.protobuf.message import DecodeError, Message

from gangway.base.logs import OFTEN
from gangway.base.memory_budget import memory_budget
from gangway.protos import StatusCode, health_pb2
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.access import CATEGORY_OF_METHOD, GRPC_KEY_PREFIX, Ports, Restriction
from gangway.server.descriptors import max_connections
from gangway.server.errors import RequestError, invalid, unavailable
from gangway.server.options.endpoints import GrpcOptions
from gangway.server.requests.admission import AdmissionController
from gangway.server.serving.access_log import AccessLog
from gangway.server.serving.call import Begin
from gangway.server.serving.grpc.call import (
    EXPIRED,
    INTERNAL,
    Arriving,
    GrpcCall,
    GrpcMethod,
    MessageArrivals,
    Sharing,
    method_name,
    refusal_headers,
)
from gangway.server.serving.grpc.http2 import INTERNAL_ERROR, WINDOW_BYTES, Connections, Http2Connection, StreamUser
from gangway.server.serving.grpc.messages import MAX_METADATA_BYTES, CallHead, Headers
from gangway.server.serving.grpc.streams import Stream, Streams
from gangway.server.serving.limits import ConnectionLimit, StalledCalls
from gangway.server.serving.listeners import BACKLOG, listen
from gangway.server.serving.loop import ServingLoop
from gangway.server.serving.pending import pause
from gangway.server.serving.protocol import MAX_WATCHERS, PERIOD_S, AnyMethod, Health, Methods, RequestT
from gangway.server.serving.tls import Certificates, TlsListener
from gangway.server.serving.turns import Slices, drive_for
from gangway.server.serving.wrong_port import http1_answer
from gangway.server.tracing.record import GRPC

_log = logging.getLogger(__name__)

INFERENCE_SERVICE: Final = "inference.GRPCInferenceService"
HEALTH_SERVICE: Final = "grpc.health.v1.Health"
HEALTH: Final = ("ServerLive", "ServerReady", "ModelReady")  # besides Check; answered by the loop
MAX_CALLS: Final = 16384  # at a time; gRPC answers RESOURCE_EXHAUSTED to more
RESERVED_CALLS: Final = 1024  # of health, above MAX_CALLS
SHORT_BYTES: Final = 64 * 1024  # of a request to another method than inference, are understood at once
AMPLE_BYTES: Final = 4 << 30  # of memory: what clients send unasked may be as much as a window has
NARROW_WINDOW_BYTES: Final = 64 << 10  # of a stream, where there is less memory
MAX_ARRIVING: Final = 4096  # calls whose message has not come
MAX_UNREAD: Final = 8192  # calls whose answer has not been taken
MAX_UNREAD_BYTES: Final = 1 << 30
GRACE_S: Final = 5.0
POLL_S: Final = 0.5
KEPT_HEADS: Final = 1024  # equal headers are understood once
KEPT_HEAD_BYTES: Final = 1024
SILENT_S: Final = 5.0  # an idle connection is closed after so long where descriptors lack
END_TIMEOUT_S: Final = 5.0


class GrpcInference(Protocol):
    """What executes requests; `call.answer` is told of the end."""

    @property
    def begin(self) -> Begin:
        """Executes a request in parts."""
        ...

    def begin_message(self, message: bytes, call: GrpcCall) -> None:
        """Execute one serialised ModelInferRequest."""

    def arriving(self, begin: bytes, size_bytes: int) -> Arriving | None:
        """Return what takes the rest of a ModelInferRequest that begins so; None if nothing does, or does yet."""
        ...


class GrpcFrontEnd:
    """Serves one address."""

    def __init__(
        self,
        serving: ServingLoop,
        inference: GrpcInference,
        streams: Streams,
        methods: Methods,
        health: Health,
        options: GrpcOptions,
        admission: AdmissionController | None = None,
        is_short: Callable[[], bool] = lambda: False,
        access_log: AccessLog | None = None,
        ports: Ports | None = None,
    ) -> None:
        """Make a server that does not listen yet. Raises TlsError or OSError if its certificates cannot be used.

        `admission` lets calls of ModelInfer in. `is_short`: see ConnectionLimit. `ports`: clients of HTTP are told.
        """
        self._serving = serving
        self._inference = inference
        self._streams = streams
        self._health = health
        self._watchers = 0
        self._options = options
        self._certificates = Certificates(options.tls, ("h2",)) if options.tls else None
        self._shared = Sharing(
            serving,
            MessageArrivals(memory_budget()),
            StalledCalls(MAX_ARRIVING, 0, GRACE_S),
            StalledCalls(MAX_UNREAD, MAX_UNREAD_BYTES, GRACE_S),
            options.max_message_bytes,
            options.compression,
            access_log,
        )
        self._heads: dict[Headers, CallHead] = {}
        self._methods = methods
        self._by_path = self._all_methods(admission)
        self._limit = ConnectionLimit(max_connections(), is_short)
        ample = memory_budget().limit.size_bytes >= AMPLE_BYTES
        window_bytes = WINDOW_BYTES if ample else NARROW_WINDOW_BYTES
        self._ports = ports or Ports()
        self._connections = Connections(
            serving.loop,
            serving.turn,
            self,
            self._limit,
            options.keepalive,
            MAX_METADATA_BYTES,
            window_bytes,
            lambda: http1_answer(self._elsewhere),
        )
        self._sockets: list[socket] = []
        self._listeners: list[asyncio.Server | TlsListener] = []

    # -- from any thread

    def bind(self, target: str) -> str:
        """Take the address ("host:port" or "unix:PATH") and return it with the port that it has got.

        Raises OSError if it cannot be had.
        """
        self._sockets, address = listen(target, self._options.reuse_port)
        return address

    def start(self) -> None:
        """Answer requests from now on."""
        self._serving.run(self._start())
        self._serving.every(POLL_S, self._poll)

    def stop(self, grace_seconds: float) -> None:
        """Accept nothing new, return when the running requests have ended, or cancel them after the grace time."""
        self._serving.run(self._stop(grace_seconds))

    @property
    def idle(self) -> bool:
        """Whether the system has every byte of every answer."""
        return self._connections.idle

    @property
    def arriving_calls(self) -> int:
        """How many calls there are whose message has not come."""
        return self._shared.arriving.count

    def poll_arrivals(self, error: RequestError) -> bool:
        """See to calls that wait for memory to receive their message; return whether there are any.

        Calls that have waited too long get this error.
        """
        waits = self._shared.arrivals.waits
        if waits:
            self._serving.call(self._shared.arrivals.poll, error)
        return waits

    def end_arriving(self, error: RequestError) -> None:
        """End the calls whose message has not come, with this error."""
        self._serving.call(self._end_arriving, error)

    def end_silent(self, descriptors: Sequence[int], wanted: int) -> int:
        """Close so many connections that have been idle for long, as descriptors lack; return how many."""
        if wanted <= 0:
            return 0
        try:
            return self._serving.run(self._end_idle(wanted), END_TIMEOUT_S)
        except TimeoutError:
            return 0

    # -- on the loop

    def begin(self, connection: Http2Connection, stream: int, headers: Headers) -> StreamUser | None:
        """Take a call, or refuse it by its headers."""
        head = self._heads.get(headers)
        if head is None:
            head = self._understood(headers)
        if head.is_http:
            kind = (b"content-type", b"text/plain; charset=utf-8")
            connection.respond(stream, [(b":status", b"415"), kind], (f"{self._elsewhere}\n".encode(),))
            return None
        if head.resets:
            connection.reset(stream, INTERNAL_ERROR)
            return None
        method, access_log = self._by_path.get(head.path), self._shared.access_log
        try:
            if head.refusal is not None:
                raise head.refusal
            if method is None:
                raise RequestError(StatusCode.UNIMPLEMENTED, "Method not found!")
            self._admit(method, connection, head)
        except RequestError as error:
            connection.refuse(stream, refusal_headers(error))
            if access_log is not None and (access := access_log.begin(GRPC, connection.peer, method_name(head.path))):
                access.end(error.code.name)
            return None
        call = GrpcCall(self._shared, connection, stream, head, method)
        try:
            if method.open is not None:
                call.open(method.open(call))
        except RequestError as error:
            call.answer(error)
        return call

    @property
    def _elsewhere(self) -> str:
        """What a client of HTTP is told."""
        return f"this port speaks gRPC, not HTTP: {self._ports.text}"

    def _understood(self, headers: Headers) -> CallHead:
        head = CallHead.of(headers)
        if sum(len(name) + len(value) for name, value in headers) <= KEPT_HEAD_BYTES:
            if len(self._heads) >= KEPT_HEADS:
                self._heads.clear()
            self._heads[headers] = head
        return head

    def _admit(self, method: GrpcMethod, connection: Http2Connection, head: CallHead) -> None:
        """Raise RequestError unless a call may be received."""
        if head.timeout_s is not None and head.timeout_s <= 0:
            raise EXPIRED
        if connection.is_for_health and not method.is_health:
            unavailable("too many connections")
        if self._shared.count >= MAX_CALLS + RESERVED_CALLS * method.is_health:
            raise RequestError(StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")
        if method.restriction is not None:
            admit(method.restriction, head)
        if method.admission is not None and not method.admission.admits():
            unavailable(method.admission.refusal)

    async def _start(self) -> None:
        loop = self._serving.loop
        make, certificates = self._connections.make, self._certificates
        for each in self._sockets:
            if certificates is not None:
                self._listeners.append(TlsListener(loop, each, certificates, make))
            else:
                self._listeners.append(await loop.create_server(make, sock=each, backlog=BACKLOG))

    async def _stop(self, grace_seconds: float) -> None:
        for listener in self._listeners:
            listener.close()
        for connection in tuple(self._connections.open):
            connection.go_away()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                while self._shared.count:
                    await asyncio.sleep(0.01)
        for connection in tuple(self._connections.open):
            connection.abort()

    async def _end_idle(self, wanted: int) -> int:
        ended = self._limit.end_idle(wanted, self._serving.loop.time() - SILENT_S)
        if ended:
            _log.warning("%d idle gRPC connections are closed, because descriptors lack", ended, extra=OFTEN)
        return ended

    def _end_arriving(self, error: RequestError) -> None:
        for call in self._shared.arriving:
            assert isinstance(call, GrpcCall)
            call.answer(error)

    def _poll(self) -> None:
        self._shared.arriving.poll()
        self._shared.unread.poll()

    # -- methods

    def _all_methods(self, admission: AdmissionController | None) -> dict[str, GrpcMethod]:
        found = []
        for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
            served, is_health = self._methods.by_name.get(method.name), method.name in HEALTH
            if method.name == "ModelInfer":
                made = self._method(INFERENCE_SERVICE, method.name, take=self._begin_message, admission=admission)
            elif method.name == "ModelStreamInfer":
                opens = partial(self._streams.open, begin=self._inference.begin)
                made = self._method(INFERENCE_SERVICE, method.name, open=opens)
            elif served is None:
                made = self._method(INFERENCE_SERVICE, method.name, take=partial(_refuse, method.name))
            else:
                made = self._method(INFERENCE_SERVICE, method.name, take=partial(self._take, served), health=is_health)
            found.append(made)
        found.append(self._method(HEALTH_SERVICE, "Check", take=partial(self._take, self._health.check), health=True))
        found.append(self._method(HEALTH_SERVICE, "Watch", take=self._watch))
        return {method.path: method for method in found}

    def _method(
        self,
        service: str,
        name: str,
        take: Callable[[GrpcCall, bytes], None] | None = None,
        open: Callable[[GrpcCall], Stream] | None = None,
        admission: AdmissionController | None = None,
        health: bool = False,
    ) -> GrpcMethod:
        category = CATEGORY_OF_METHOD.get(name)
        restriction = self._options.restrictions.of(category) if category else None
        arriving = self._inference.arriving if name == "ModelInfer" else None
        return GrpcMethod(f"/{service}/{name}", take, open, restriction, admission, health, arriving)

    def _begin_message(self, call: GrpcCall, message: bytes) -> None:
        self._inference.begin_message(message, call)

    def _take(self, method: AnyMethod, call: GrpcCall, message: bytes) -> None:
        drive_for(call, self._answer(method, call, message))

    async def _answer(self, method: AnyMethod, call: GrpcCall, message: bytes) -> None:
        """Answer a call, also after any error."""
        read, is_short = partial(_understood, method.request, message), len(message) <= SHORT_BYTES
        asking = self._methods.ask(method, read, _serialised, is_short)
        del message, read  # which may be much, and it may wait for long
        try:
            call.answer(await asking)
        except RequestError as error:
            call.answer(error)
        except Exception:
            _log.exception("a request failed by a fault of the server; its client is told INTERNAL", extra=OFTEN)
            call.answer(INTERNAL)

    def _watch(self, call: GrpcCall, message: bytes) -> None:
        """Send the status of a service whenever it has changed, until the call ends. Raises RequestError."""
        request = _understood(health_pb2.HealthCheckRequest, message)
        if self._watchers >= MAX_WATCHERS:
            unavailable(f"{MAX_WATCHERS} watch the health already")
        drive_for(call, self._tell_changes(call, request))

    async def _tell_changes(self, call: GrpcCall, request: health_pb2.HealthCheckRequest) -> None:
        told: health_pb2.HealthCheckResponse | None = None
        self._watchers += 1
        try:
            while True:
                status = self._health.status(request)
                if status != told and not call.unsent_bytes:
                    told = status
                    call.send([[status.SerializeToString()]])
                await pause(self._serving.loop, PERIOD_S)
        finally:
            self._watchers -= 1


def admit(restriction: Restriction, head: CallHead) -> None:
    """Return if the caller has sent what the restriction asks for. Raises RequestError, as Triton words it."""
    key = GRPC_KEY_PREFIX + restriction.key
    if not restriction.admits(value for name, value in head.metadata if name == key):
        unavailable(f"This protocol is restricted, expecting header '{key}'")


def _understood(kind: type[RequestT], message: bytes) -> RequestT:
    """Return the request of a message. Raises RequestError."""
    try:
        return kind.FromString(bytes(message))
    except DecodeError:  # whose text differs between versions of protobuf
        invalid(f"not a {kind.__name__}")


async def _serialised(response: Message, _slices: Slices) -> bytes:
    return response.SerializeToString()


def _refuse(name: str, call: GrpcCall, _message: bytes) -> None:
    call.answer(RequestError(StatusCode.UNIMPLEMENTED, f"{name} is not supported by this server"))
