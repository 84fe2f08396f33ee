"""The gRPC server: methods of the protocol to functions, refusals to status codes. Nothing here knows what a tensor is.

Synchronous grpcio with a thread pool: measured, it needs 1.6 times less CPU per request than its asyncio sibling.
Handlers get and return bytes, so that ModelInfer can leave the tensors where they are. What comes before them is in
`grpc_gate.py`. Small requests of a known form do without a thread of the pool (`threadless/`).
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError

from gangway.executor.log_limit import OFTEN
from gangway.executor.memory_budget import memory_budget
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.counting_pool import CountingPool
from gangway.server.door import Door
from gangway.server.errors import RequestError, invalid
from gangway.server.grpc_channel import channel_options
from gangway.server.grpc_credentials import Certificates
from gangway.server.grpc_gate import MAX_ARRIVING, MAX_PLAIN, Gate, GatedService, MethodHandler, admit
from gangway.server.health import MAX_WATCHERS, Health
from gangway.server.inference import Inference
from gangway.server.listen_address import UNIX, port_of
from gangway.server.methods import AnyMethod
from gangway.server.options.grpc import GrpcOptions
from gangway.server.process import max_connections
from gangway.server.silent_connections import SilentConnections
from gangway.server.streams import Streams
from gangway.server.thread_share import scaled
from gangway.server.threadless.arrivals import Arrivals
from gangway.server.threadless.early_call import Begin, EarlyCall
from gangway.server.threadless.grpc_calls import AVAILABLE, EarlyCalls
from gangway.server.threadless.inference import ThreadlessInference

INFERENCE_SERVICE = "inference.GRPCInferenceService"
HEALTH_SERVICE = "grpc.health.v1.Health"
SPARE_THREADS = 16  # refuse what is too much while every slot's thread waits
READY_THREADS = 16  # are started before the first call
MAX_CALLS = 16384  # that have a thread or wait for one; gRPC answers RESOURCE_EXHAUSTED to more
HEALTH = ("ServerLive", "ServerReady", "ModelReady")  # besides Check; answered by gRPC's own thread
RESERVED_CALLS = 1024  # of health, above MAX_CALLS

_log = logging.getLogger(__name__)
Handler = Callable[[bytes, grpc.ServicerContext], bytes]
StreamHandler = Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]
Handlers: TypeAlias = dict[str, MethodHandler]


class GrpcFrontEnd:
    """Serves one address. `max_in_flight` requests may wait in a thread each; the data plane refuses further ones."""

    def __init__(
        self,
        inference: Inference,
        streams: Streams,
        methods: Mapping[str, AnyMethod],
        health: Health,
        max_in_flight: int,
        options: GrpcOptions,
        threadless: ThreadlessInference | None = None,
        thread_share: float = 1.0,
    ) -> None:
        """Make a server that does not listen yet. Raises TlsError or OSError if its certificates cannot be used.

        `threadless`: what answers requests that need no thread; None: each has one. `thread_share`: see there.
        """
        self._certificates = Certificates(options.tls) if options.tls else None
        self._gate = Gate(options.restrictions, thread_share=thread_share)
        # Further threads are started as they are needed. Each open stream keeps one.
        holding = sum(scaled(count, thread_share) for count in (MAX_PLAIN, MAX_ARRIVING, MAX_WATCHERS))
        threads = scaled(max_in_flight, thread_share) + holding + streams.limits.streams + SPARE_THREADS
        self._pool = CountingPool(threads, "grpc", READY_THREADS)
        pool = cast("ThreadPoolExecutor", self._pool)  # grpcio asks for nothing but `submit`
        limit = max_connections()
        self._connections = SilentConnections(limit)
        self._gate.watchman.watch(self._connections)
        self._server = grpc.server(pool, options=channel_options(options, limit), maximum_concurrent_rpcs=MAX_CALLS)
        handlers = _unimplemented_handlers() | {name: _message_handler(method) for name, method in methods.items()}
        handlers["ModelInfer"] = grpc.unary_unary_rpc_method_handler(_guarded(inference.infer))
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(_guarded_stream(streams.serve))
        self._add(INFERENCE_SERVICE, handlers)
        self._threadless = threadless if AVAILABLE else None
        self._arrivals = Arrivals(memory_budget(), options.max_message_bytes)
        watch: MethodHandler = grpc.unary_stream_rpc_method_handler(health.watch)
        self._add(HEALTH_SERVICE, {"Check": _message_handler(health.check), "Watch": watch})
        self._early = self._early_inference(handlers["ModelInfer"], inference)
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
        self._connections.port = port
        return port_of(target, port)

    def start(self) -> None:
        """Answer requests from now on."""
        self._gate.watchman.start()
        if self._threadless is not None:
            self._threadless.start()
        self._server.start()
        for early in self._early:
            early.start()

    def look_at_arrivals(self, error: RequestError) -> bool:
        """See to calls that wait for memory to receive their message; return whether there are any.

        Who has waited too long gets this error.
        """
        self._arrivals.look(error)
        return self._arrivals.waits

    def end_arriving(self, error: RequestError) -> int:
        """End the calls whose message has not come, with this error; return how many."""
        return self._gate.arriving.end_all(error)

    def stop(self, grace_seconds: float) -> None:
        """Accept nothing new, return when the running requests have ended, or cancel them after the grace time."""
        self._server.stop(grace_seconds).wait(grace_seconds + 1.0)
        self._gate.watchman.stop()
        if self._threadless is not None:
            self._threadless.stop()

    def _add(self, name: str, handlers: Handlers) -> None:
        self._server.add_generic_rpc_handlers((GatedService(name, handlers, self._gate, self._pool),))

    def _early_inference(self, handler: MethodHandler, inference: Inference) -> list[EarlyCalls]:
        """Have ModelInfer's messages received early, unless who may call it is restricted."""
        if self._threadless is None or not self._gate.lets_all_in("ModelInfer"):
            return []
        path, door = f"/{INFERENCE_SERVICE}/ModelInfer", inference.execution.plane.door
        return [self._early_calls(path, handler, self._threadless.begin, door, arrivals=self._arrivals)]

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

        always_open = Door(room=MAX_CALLS + RESERVED_CALLS)
        return self._early_calls(f"/{service}/{name}", _message_handler(method), begin, always_open, RESERVED_CALLS)

    def _early_calls(
        self,
        path: str,
        handler: MethodHandler,
        begin: Begin,
        door: Door,
        reserved_calls: int = 0,
        arrivals: Arrivals | None = None,
    ) -> EarlyCalls:
        behaviour = self._gate.plain(path.rpartition("/")[2], handler).unary_unary
        assert behaviour is not None, "one message in, one out"
        arriving = self._gate.arriving
        return EarlyCalls(self._server, path, begin, behaviour, self._pool, arriving, door, reserved_calls, arrivals)


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
            context.abort(error.code, error.message)
        except Exception:
            _log.exception("a request failed unexpectedly", extra=OFTEN)
            context.abort(grpc.StatusCode.INTERNAL, "internal error, see the server's log")

    return guard


def _guarded_stream(handle: StreamHandler) -> StreamHandler:
    """Do the same for one that gets and yields any number of messages."""

    def guard(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            yield from handle(messages, context)
        except RequestError as error:
            context.abort(error.code, error.message)
        except Exception:
            _log.exception("a stream failed unexpectedly")
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
