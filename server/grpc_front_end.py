"""The gRPC server: methods of the protocol to functions, refusals to status codes. Nothing here knows what a tensor is.

Synchronous grpcio with a thread pool: measured, it needs 1.6 times less CPU per request than its asyncio sibling.
Handlers get and return bytes, so that ModelInfer can leave the tensors where they are. What comes before them is in
`grpc_gate.py`. Small requests of a known form do without a thread of the pool (`threadless/`).
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn, TypeAlias

import grpc
from gangway.executor.log_limit import OFTEN
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.counting_pool import CountingPool
from gangway.server.errors import RequestError, invalid
from gangway.server.grpc_channel import channel_options
from gangway.server.grpc_credentials import Certificates
from gangway.server.grpc_gate import MAX_ARRIVING, MAX_PLAIN, Gate, GatedService, MethodHandler
from gangway.server.health import MAX_WATCHERS, Health
from gangway.server.inference import Inference
from gangway.server.listen_address import UNIX, port_of
from gangway.server.methods import AnyMethod
from gangway.server.options.grpc import GrpcOptions
from gangway.server.streams import Streams
from gangway.server.threadless.grpc_calls import AVAILABLE, EarlyCalls
from gangway.server.threadless.inference import ThreadlessInference
from google.protobuf.message import DecodeError

INFERENCE_SERVICE = "inference.GRPCInferenceService"
HEALTH_SERVICE = "grpc.health.v1.Health"
SPARE_THREADS = 16  # refuse what is too much, and answer health checks, while every slot's thread waits
MAX_CALLS = 16384  # that have a thread or wait for one; gRPC answers RESOURCE_EXHAUSTED to more

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
    ) -> None:
        """Make a server that does not listen yet. Raises TlsError or OSError if its certificates cannot be used.

        `threadless`: what answers requests that need no thread; None: each has one.
        """
        self._certificates = Certificates(options.tls) if options.tls else None
        self._gate = Gate(options.restrictions)
        # Threads are started as they are needed. Each open stream keeps one.
        waiting = MAX_PLAIN + MAX_ARRIVING + streams.limits.streams + MAX_WATCHERS
        self._pool = CountingPool(max_in_flight + waiting + SPARE_THREADS, "grpc")
        self._server = grpc.server(self._pool, options=channel_options(options), maximum_concurrent_rpcs=MAX_CALLS)
        handlers = _unimplemented_handlers() | {name: _message_handler(method) for name, method in methods.items()}
        handlers["ModelInfer"] = grpc.unary_unary_rpc_method_handler(_guarded(inference.infer))
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(_guarded_stream(streams.serve))
        self._add(INFERENCE_SERVICE, handlers)
        self._threadless = threadless if AVAILABLE else None
        self._early = self._early_calls(handlers["ModelInfer"], inference)
        watch: MethodHandler = grpc.unary_stream_rpc_method_handler(health.watch)
        self._add(HEALTH_SERVICE, {"Check": _message_handler(health.check), "Watch": watch})

    def bind(self, target: str) -> str:
        """Take the address ("host:port" or "unix:PATH") and return it with the port that it has got.

        Raises RuntimeError if it cannot be had.
        """
        if self._certificates is None:
            port = self._server.add_insecure_port(target)
        else:
            port = self._server.add_secure_port(target, self._certificates.credentials())
        return target if target.startswith(UNIX) else port_of(target, port)

    def start(self) -> None:
        """Answer requests from now on."""
        self._gate.watchman.start()
        if self._threadless is not None:
            self._threadless.start()
        self._server.start()
        if self._early is not None:
            self._early.start()

    def stop(self, grace_seconds: float) -> None:
        """Accept nothing new, return when the running requests have ended, or cancel them after the grace time."""
        self._server.stop(grace_seconds).wait(grace_seconds + 1.0)
        self._gate.watchman.stop()
        if self._threadless is not None:
            self._threadless.stop()

    def _add(self, name: str, handlers: Handlers) -> None:
        self._server.add_generic_rpc_handlers((GatedService(name, handlers, self._gate, self._pool),))

    def _early_calls(self, handler: MethodHandler, inference: Inference) -> EarlyCalls | None:
        """Have ModelInfer's messages received early, unless who may call it is restricted."""
        behaviour = self._gate.plain("ModelInfer", handler).unary_unary
        if self._threadless is None or behaviour is None or not self._gate.lets_all_in("ModelInfer"):
            return None
        path = f"/{INFERENCE_SERVICE}/ModelInfer"
        return EarlyCalls(
            self._server,
            path,
            self._threadless.begin,
            behaviour,
            self._pool,
            self._gate.arriving,
            inference.execution.plane.door,
        )


def _message_handler(method: AnyMethod) -> MethodHandler:
    def handle(message: bytes, _context: grpc.ServicerContext) -> bytes:
        try:
            request = method.request.FromString(message)
        except DecodeError as error:
            invalid(f"not a {method.request.__name__}: {error}")
        return method.answer(request).SerializeToString()

    return grpc.unary_unary_rpc_method_handler(_guarded(handle))


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
