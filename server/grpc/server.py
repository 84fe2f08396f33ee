"""The gRPC server: methods of the protocol to functions, refusals to status codes. It knows nothing of tensors.

It is synchronous grpcio with a thread pool, which needs less CPU per request than grpcio's asyncio server. Handlers get
and return bytes, so that ModelInfer leaves the tensors where they are. `gate.py` stands before them. Small requests of
a known form need no thread of the pool (`front_end/inference.py`).
"""

import logging
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError

from gangway.executor.logs import OFTEN
from gangway.executor.memory_budget import memory_budget
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.access import UNIX, TlsError, TlsFiles, check_files, port_of, stamp
from gangway.server.descriptors import borrowed_socket, max_connections
from gangway.server.errors import RequestError, invalid
from gangway.server.front_end.protocol import MAX_WATCHERS, AnyMethod, Health
from gangway.server.grpc.early_calls import AVAILABLE, Arrivals, Begin, EarlyCall, EarlyCalls
from gangway.server.grpc.gate import MAX_ARRIVING, MAX_PLAIN, Gate, GatedService, MethodHandler, admit, as_grpc
from gangway.server.grpc.streams import Streams
from gangway.server.options.endpoints import Compression, GrpcOptions
from gangway.server.requests.admission import AdmissionController
from gangway.server.threads import CountingPool, scaled

_log = logging.getLogger(__name__)

AMPLE_BYTES = 4 << 30  # of memory: what clients send unasked may be as much as the speed of their links suggests
MAX_METADATA_BYTES = 16 * 1024  # of one call; traces and tokens fit
MAX_STREAMS_PER_CONNECTION = 1024  # as many as request slots; those of one connection come before those of the next
HANDSHAKE_TIMEOUT_MS = 20_000  # of a client that connects and sends nothing
SETTINGS_TIMEOUT_MS = 20_000  # of a client that does not acknowledge what it may send
TABLE_BYTES = 4096  # of headers that a connection's client may refer to, and the server: HTTP/2's own
# Core's levels. It chooses the algorithm among those that the client accepts: gzip, for higher levels deflate.
_LEVELS = {Compression.LOW: 1, Compression.MEDIUM: 2, Compression.HIGH: 3}


def channel_options(options: GrpcOptions, max_connections: int | None = None) -> list[tuple[str, int]]:
    """Return the arguments for grpc.server: limits of messages, metadata and streams, keepalive, compression."""
    keepalive = options.keepalive
    found: dict[str, int | None] = {
        # By default a second server on the same port would silently get every other connection.
        "grpc.so_reuseport": options.reuse_port,
        # Also of a message after decompression: core (1.85) stops inflating there.
        "grpc.max_receive_message_length": options.max_message_bytes,
        "grpc.max_send_message_length": options.max_message_bytes,
        # Without it a client sends no more than 64 KiB of a message before it is asked for (`early_calls.Arrivals`).
        # A large one then takes another round trip, and more of the front end's CPU.
        "grpc.http2.bdp_probe": memory_budget().limit.size_bytes >= AMPLE_BYTES,
        "grpc.max_metadata_size": MAX_METADATA_BYTES,
        "grpc.absolute_max_metadata_size": MAX_METADATA_BYTES,
        "grpc.max_concurrent_streams": MAX_STREAMS_PER_CONNECTION,
        "grpc.http2.hpack_table_size.decoder": TABLE_BYTES,
        "grpc.http2.hpack_table_size.encoder": TABLE_BYTES,
        "grpc.http2.settings_timeout": SETTINGS_TIMEOUT_MS,
        "grpc.server_handshake_timeout_ms": HANDSHAKE_TIMEOUT_MS,
        "grpc.max_allowed_incoming_connections": max_connections,
        "grpc.default_compression_level": _LEVELS.get(options.compression),
        "grpc.keepalive_time_ms": keepalive.time_ms,
        "grpc.keepalive_timeout_ms": keepalive.timeout_ms,
        "grpc.keepalive_permit_without_calls": keepalive.permit_without_calls,
        "grpc.http2.max_pings_without_data": keepalive.max_pings_without_data,
        "grpc.http2.min_ping_interval_without_data_ms": keepalive.min_recv_ping_interval_without_data_ms,
        "grpc.http2.max_ping_strikes": keepalive.max_ping_strikes,
        "grpc.max_connection_age_ms": keepalive.max_connection_age_ms,
        "grpc.max_connection_age_grace_ms": keepalive.max_connection_age_grace_ms,
    }
    return [(name, int(value)) for name, value in found.items() if value is not None]


class Certificates:
    """TLS of the gRPC server. Its files are read again when they have changed, for connections made from then on.

    Files that cannot be used (half written, say) leave everything as it was.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Read the files. Raises TlsError or OSError."""
        self._files = files
        self._lock = threading.Lock()
        check_files(files)
        self._stamp = stamp(files)
        self._tried = self._stamp  # do not complain at every connection about the same files
        self._configuration = self._read()

    def credentials(self) -> grpc.ServerCredentials:
        """Return what a port is opened with."""
        changed = cast("Callable[[], grpc.ServerCertificateConfiguration]", self.changed)  # None is allowed, too
        return grpc.dynamic_ssl_server_credentials(self._configuration, changed, self._files.mutual)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return what new connections shall use, None if that is what the last ones used. Called at each handshake."""
        with self._lock:
            try:
                now = stamp(self._files)
                if now == self._tried:
                    return None
                self._tried = now
                if now == self._stamp:
                    return None
                check_files(self._files)
                configuration = self._read()
                if stamp(self._files) != now:
                    return None  # written just now; the next connection looks again
            except (TlsError, OSError) as error:
                _log.error("new TLS certificates cannot be used, so TLS goes on with the old ones: %s", error)
                return None
            self._stamp, self._configuration = now, configuration
            _log.info("TLS uses the certificates in %s from now on", self._files.certificate)
            return configuration

    def _read(self) -> grpc.ServerCertificateConfiguration:
        files = self._files
        pair = (files.key.read_bytes(), files.certificate.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], files.root.read_bytes() if files.root else None)


KEPT_FREE: Final = 1 / 8  # of the connections that there may be
SILENT_MS: Final = 5000  # a connection that is silent for so long is closed where descriptors lack
LEAST_CALL_BYTES: Final = 128  # a preface, settings and half a call's headers take 42, a whole call takes more
# Of Linux: milliseconds since data were sent, milliseconds since data came, bytes that have come.
_TCP_INFO: Final = struct.Struct("44xI4xI72xQ")


@dataclass(frozen=True)
class _Connection:
    """A client's connection: whether a call has come over it, as far as the kernel tells, and how long it is silent."""

    descriptor: int
    peer: Any  # a client's address and port
    has_called: bool
    silent_ms: int

    @property
    def order(self) -> tuple[bool, int]:
        """Which one goes first: those without a call, the most silent ones before others."""
        return self.has_called, -self.silent_ms


class SilentConnections:
    """Closes silent connections when there are nearly as many as there may be, or no descriptors are left.

    Those go first over which no call has come, but none that the last look has not seen: it has had no time to call.
    Only then others go, the most silent one first. So a client that calls seldom keeps its connection.

    gRPC's core refuses further connections at its limit and closes none, so silent clients could keep all others out,
    questions about health included. It has no method to close one. But its connections are sockets of this process, and
    core takes one that is shut down for one whose client has gone. `limit`: how many connections core accepts. `port`:
    where it listens, 0: not by TCP.
    """

    def __init__(self, limit: int) -> None:
        self.port = 0
        self._most = limit - max(1, int(limit * KEPT_FREE))
        self._seen: set[Any] = set()  # peers of the last look

    def end_silent(self, descriptors: Sequence[int], wanted: int) -> int:
        """Close some of these while there are too many; return how many were closed.

        `wanted`: so many descriptors lack, for which only connections go that have been silent for SILENT_MS.
        """
        if not self.port or (len(descriptors) <= self._most and wanted <= 0):
            self._seen.clear()
            return 0
        found = sorted(filter(None, map(self._connection, descriptors)), key=lambda each: each.order)
        too_many = max(len(found) - self._most, 0)
        ended = [each for each in found[:too_many] if each.has_called or each.peer in self._seen]
        idle = [each for each in found[too_many:] if each.silent_ms >= SILENT_MS]
        ended += idle[: max(wanted - len(ended), 0)]
        self._seen = {each.peer for each in found}
        for each in ended:
            with suppress(OSError), borrowed_socket(each.descriptor) as connection:
                connection.shutdown(socket.SHUT_RDWR)
        if ended:
            _log.warning(
                "%d idle gRPC connections are closed, because more clients connect than fit", len(ended), extra=OFTEN
            )
        return len(ended)

    def _connection(self, descriptor: int) -> _Connection | None:
        """Return what is known of a connection, None for what is none of ours."""
        try:
            with borrowed_socket(descriptor) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    return None
                if connection.getsockname()[1] != self.port:
                    return None
                peer = connection.getpeername()  # a listener has none
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
                sent_ms, received_ms, received_bytes = _TCP_INFO.unpack(info)
                return _Connection(descriptor, peer, received_bytes >= LEAST_CALL_BYTES, min(sent_ms, received_ms))
        except OSError:
            return None


INFERENCE_SERVICE = "inference.GRPCInferenceService"
HEALTH_SERVICE = "grpc.health.v1.Health"
SPARE_THREADS = 16  # refuse what is too much while every slot's thread waits
READY_THREADS = 16  # are started before the first call
MAX_CALLS = 16384  # that have a thread or wait for one; gRPC answers RESOURCE_EXHAUSTED to more
HEALTH = ("ServerLive", "ServerReady", "ModelReady")  # besides Check; answered by gRPC's own thread
RESERVED_CALLS = 1024  # of health, above MAX_CALLS
Handler = Callable[[bytes, grpc.ServicerContext], bytes]
StreamHandler = Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]
Handlers: TypeAlias = dict[str, MethodHandler]


class NonBlocking(Protocol):
    """`NonBlockingInference`."""

    def begin(self, message: bytes, call: EarlyCall) -> bool:
        """Hand a request to the scheduler, which is answered later; False: a thread has to see to it."""
        ...


class GrpcFrontEnd:
    """Serves one address. `max_in_flight` requests may wait in a thread each; the data plane refuses further ones."""

    def __init__(
        self,
        infer: Handler,
        streams: Streams,
        methods: Mapping[str, AnyMethod],
        health: Health,
        max_in_flight: int,
        options: GrpcOptions,
        non_blocking: NonBlocking | None = None,
        admission: AdmissionController | None = None,
        thread_share: float = 1.0,
    ) -> None:
        """Make a server that does not listen yet. Raises TlsError or OSError if its certificates cannot be used.

        `infer`: answers ModelInfer in the caller's thread. `non_blocking`: answers requests that need no thread, whose
        calls `admission` lets in; None: each has a thread. `thread_share`: see there.
        """
        self._certificates = Certificates(options.tls) if options.tls else None
        self._gate = Gate(options.restrictions, thread_share=thread_share)
        # Further threads are started as they are needed. Each open stream keeps one.
        holding = sum(scaled(count, thread_share) for count in (MAX_PLAIN, MAX_ARRIVING, MAX_WATCHERS))
        threads = scaled(max_in_flight, thread_share) + holding + streams.limits.streams + SPARE_THREADS
        self._pool = CountingPool(threads, "grpc", READY_THREADS)
        pool = cast("ThreadPoolExecutor", self._pool)  # grpcio asks for nothing but `submit`
        limit = max_connections()
        self.connections = SilentConnections(limit)
        self._server = grpc.server(pool, options=channel_options(options, limit), maximum_concurrent_rpcs=MAX_CALLS)
        handlers = _unimplemented_handlers() | {name: _message_handler(method) for name, method in methods.items()}
        handlers["ModelInfer"] = grpc.unary_unary_rpc_method_handler(_guarded(infer))
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(_guarded_stream(streams.serve))
        self._add(INFERENCE_SERVICE, handlers)
        self._non_blocking = non_blocking if AVAILABLE else None
        self._arrivals = Arrivals(memory_budget(), options.max_message_bytes)
        watch: MethodHandler = grpc.unary_stream_rpc_method_handler(health.watch)
        self._add(HEALTH_SERVICE, {"Check": _message_handler(health.check), "Watch": watch})
        self._early = self._early_inference(handlers["ModelInfer"], admission)
        if AVAILABLE:
            self._early += [
                self._early_health(INFERENCE_SERVICE, name, methods[name]) for name in HEALTH if name in methods
            ]
            self._early.append(self._early_health(HEALTH_SERVICE, "Check", health.check))

    def bind(self, target: str) -> str:
        """Take the address ("host:port" or "unix:PATH") and return it with the port that it has got.

        Raises RuntimeError if it cannot be had.
        """
        if self._certificates is None:
            port = self._server.add_insecure_port(target)
        else:
            port = self._server.add_secure_port(target, self._certificates.credentials())
        if target.startswith(UNIX):
            return target
        self.connections.port = port
        return port_of(target, port)

    @property
    def calls_in_threads(self) -> int:
        """How many calls a thread was given so far."""
        return self._pool.submitted

    @property
    def arriving_calls(self) -> int:
        """How many calls there are whose message has not come."""
        return self._gate.arriving.count

    def start(self) -> None:
        """Answer requests from now on."""
        self._gate.cleaner.start()
        self._server.start()
        for early in self._early:
            early.start()

    def look_at_arrivals(self, error: RequestError) -> bool:
        """See to calls that wait for memory to receive their message; return whether there are any.

        Calls that have waited too long get this error.
        """
        self._arrivals.look(error)
        return self._arrivals.waits

    def end_arriving(self, error: RequestError) -> int:
        """End the calls whose message has not come, with this error; return how many."""
        return self._gate.arriving.end_all(error)

    def stop(self, grace_seconds: float) -> None:
        """Accept nothing new, return when the running requests have ended, or cancel them after the grace time."""
        self._server.stop(grace_seconds).wait(grace_seconds + 1.0)
        self._gate.cleaner.stop()

    def _add(self, name: str, handlers: Handlers) -> None:
        self._server.add_generic_rpc_handlers((GatedService(name, handlers, self._gate, self._pool),))

    def _early_inference(self, handler: MethodHandler, admission: AdmissionController | None) -> list[EarlyCalls]:
        """Have ModelInfer's messages received early, unless ModelInfer is restricted."""
        if self._non_blocking is None or admission is None or not self._gate.lets_all_in("ModelInfer"):
            return []
        path, begin = f"/{INFERENCE_SERVICE}/ModelInfer", self._non_blocking.begin
        return [self._early_calls(path, handler, begin, admission, arrivals=self._arrivals)]

    def _early_health(self, service: str, name: str, method: AnyMethod) -> EarlyCalls:
        """Have questions about health answered by gRPC's own thread: whatever is taken, they need nothing of it."""
        restriction = self._gate.restriction(name)

        def begin(message: bytes, call: EarlyCall) -> bool:
            try:
                if restriction is not None:
                    admit(restriction, call)
                call.answer(_answer(method, message))
            except RequestError as error:
                call.answer(error)
            return True

        always_open = AdmissionController(room=MAX_CALLS + RESERVED_CALLS)
        return self._early_calls(f"/{service}/{name}", _message_handler(method), begin, always_open, RESERVED_CALLS)

    def _early_calls(
        self,
        path: str,
        handler: MethodHandler,
        begin: Begin,
        admission: AdmissionController,
        reserved_calls: int = 0,
        arrivals: Arrivals | None = None,
    ) -> EarlyCalls:
        behaviour = self._gate.plain(path.rpartition("/")[2], handler).unary_unary
        assert behaviour is not None, "one message in, one out"
        arriving = self._gate.arriving
        return EarlyCalls(
            self._server, path, begin, behaviour, self._pool, arriving, admission, reserved_calls, arrivals
        )


def _message_handler(method: AnyMethod) -> MethodHandler:
    return grpc.unary_unary_rpc_method_handler(_guarded(lambda message, _context: _answer(method, message)))


def _answer(method: AnyMethod, message: bytes) -> bytes:
    """Return the serialised answer. Raises RequestError."""
    try:
        request = method.request.FromString(message)
    except DecodeError as error:
        invalid(f"not a {method.request.__name__}: {error}")
    return method.answer(request).SerializeToString()


def _guarded(handle: Handler) -> Handler:
    """Turn what a handler raises into the status that the client sees."""

    def guard(message: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            return handle(message, context)
        except RequestError as error:
            _log.debug("refused: %s: %s", error.code.name, error.message, extra=OFTEN)
            context.abort(as_grpc(error.code), error.message)
        except Exception:
            _log.exception("a request failed by a fault of the server; its client is told INTERNAL", extra=OFTEN)
            context.abort(grpc.StatusCode.INTERNAL, "internal error, see the server's log")

    return guard


def _guarded_stream(handle: StreamHandler) -> StreamHandler:
    """Do the same for one that gets and yields any number of messages."""

    def guard(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            yield from handle(messages, context)
        except RequestError as error:
            context.abort(as_grpc(error.code), error.message)
        except Exception:
            _log.exception("a stream failed by a fault of the server; its client is told INTERNAL")
            context.abort(grpc.StatusCode.INTERNAL, "internal error, see the server's log")

    return guard


def _unimplemented_handlers() -> Handlers:
    """Every method of the service, answering that it is not served."""
    methods = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
    return {method.name: _unimplemented(method.name, method.client_streaming) for method in methods}


def _unimplemented(name: str, streaming: bool) -> MethodHandler:
    def refuse(_message: bytes | Iterator[bytes], context: grpc.ServicerContext) -> NoReturn:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{name} is not supported by this server")

    return grpc.stream_stream_rpc_method_handler(refuse) if streaming else grpc.unary_unary_rpc_method_handler(refuse)
