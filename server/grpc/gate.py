"""What happens before every gRPC method: the check who may call it, and waiting for its message.

A gate wraps a handler in one of two forms. The plain form leaves waiting for the message to gRPC, which holds a thread
until it has come, however long that takes. The watched form reads the message itself, so that a call whose message does
not come can be found and ended (`StalledCalls`). It costs more CPU for each request, so calls get it only when many
threads are held.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, Protocol, TypeAlias, runtime_checkable

import grpc

from gangway.executor.logs import OFTEN
from gangway.protos import StatusCode
from gangway.server.access import CATEGORY_OF_METHOD, GRPC_KEY_PREFIX, Restriction, Restrictions
from gangway.server.errors import RequestError, unavailable
from gangway.server.threads import NO_THREAD, CountingPool, scaled, started_pool

_log = logging.getLogger(__name__)

PERIOD_S = 0.5


class StalledCall(Protocol):
    """The part of grpc.ServicerContext that is used."""

    def cancel(self) -> object:
        """End the call; a thread that waits in it gets an exception."""


@runtime_checkable
class AnswerableCall(Protocol):
    """A call that can be answered from any thread, also before its message has come (`EarlyCall`)."""

    def answer(self, result: RequestError) -> object:
        """End the call with an error."""


class StalledCalls:
    """Calls that wait for their client: for the rest of a request, or for an answer to be taken. Safe for threads.

    Such a call holds a thread of the server, or the bytes of the answer. When there are too many, those that have
    waited longest are ended. A slow client stays as long as there is room. `grace_s` seconds are granted to
    every call, whatever the others hold.
    """

    def __init__(self, max_calls: int, max_bytes: int, grace_s: float) -> None:
        self._max_calls = max_calls
        self._max_bytes = max_bytes
        self._grace_s = grace_s
        # In the order of their coming. Single operations on it are atomic, so requests need no lock here.
        self._calls: dict[StalledCall, tuple[float, int]] = {}

    @property
    def count(self) -> int:
        """How many calls wait now."""
        return len(self._calls)

    def enter(self, call: StalledCall, held_bytes: int = 0) -> None:
        """Note that a call waits from now on, and how much memory it holds."""
        self._calls[call] = (time.monotonic(), held_bytes)

    def leave(self, call: StalledCall) -> None:
        """Note that it does not wait any more."""
        self._calls.pop(call, None)

    def look(self) -> int:
        """End calls while there are too many; return how many were ended."""
        calls = self._calls.copy()  # at once: other threads come and go
        count, held_bytes = len(calls), sum(size for _, size in calls.values())
        now, ended = time.monotonic(), 0
        for call, (since, size) in calls.items():
            if (count <= self._max_calls and held_bytes <= self._max_bytes) or now - since < self._grace_s:
                break
            count, held_bytes, ended = count - 1, held_bytes - size, ended + 1
            self.leave(call)
            call.cancel()
        return ended

    def end_all(self, error: RequestError) -> int:
        """End all calls with this error, those that can have one, because there is no memory; return how many."""
        calls = self._calls.copy()
        for call in calls:
            self.leave(call)
            if isinstance(call, AnswerableCall):
                call.answer(error)
            else:
                call.cancel()
        return len(calls)


class Cleanable(Protocol):
    """What a PeriodicCleaner looks after."""

    def look(self) -> int:
        """End what there is too much of; return how many were ended."""
        ...


class PeriodicCleaner:
    """A thread that looks after stalled calls, and the like, while a server runs."""

    def __init__(self, *kinds: Cleanable) -> None:
        self._kinds = kinds
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stalled calls", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; return when the thread has."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            for kind in self._kinds:
                try:
                    kind.look()
                except Exception:  # of one that cannot be ended; the next ones can
                    _log.exception(
                        "a connection that makes no progress could not be ended: a fault of the server", extra=OFTEN
                    )


MAX_PLAIN = 256  # calls that hold a thread before others get the watched form
MAX_ARRIVING = 256  # calls whose message has not come, each has a thread
MAX_UNREAD = 8192  # calls whose answer has not been taken
MAX_UNREAD_BYTES = 1 << 30
LARGE_ANSWER_BYTES = 64 * 1024  # of smaller answers the limit of calls on a connection is enough
GRACE_S = 5.0

MethodHandler: TypeAlias = "grpc.RpcMethodHandler[bytes, bytes]"  # not subscriptable at run time
Context: TypeAlias = grpc.ServicerContext
Behaviour: TypeAlias = Callable[[Any, Context], Any]  # message or messages to answer or answers


class CallMetadata(Protocol):
    """The part of a call that says who calls."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """Return the call's headers."""


class Gate:
    """For one server. `grace_s`: see StalledCalls. `thread_share`: of the calls that may hold a thread, see
    `threads.thread_share`. `arriving`: calls whose message has not come. `refusal`: handles calls that get no thread.
    """

    def __init__(self, restrictions: Restrictions, grace_s: float = GRACE_S, thread_share: float = 1.0) -> None:
        self._restrictions = restrictions
        self.refusal = _refusal()
        self.max_plain = scaled(MAX_PLAIN, thread_share)
        self.arriving = StalledCalls(scaled(MAX_ARRIVING, thread_share), 0, grace_s)
        self._unread = StalledCalls(MAX_UNREAD, MAX_UNREAD_BYTES, grace_s)
        self.cleaner = PeriodicCleaner(self.arriving, self._unread)

    def plain(self, method: str, handler: MethodHandler) -> MethodHandler:
        """Return the handler of a method (by its name in the service) with the gate before it."""
        restriction = self.restriction(method)
        if handler.request_streaming:
            assert handler.stream_stream is not None, "no method of the protocol answers many messages with one"
            return grpc.stream_stream_rpc_method_handler(self._admitted(restriction, handler.stream_stream))
        if handler.response_streaming:
            return self.watched(method, handler)
        assert handler.unary_unary is not None
        return grpc.unary_unary_rpc_method_handler(self._admitted(restriction, self._tracked(handler.unary_unary)))

    def watched(self, method: str, handler: MethodHandler) -> MethodHandler:
        """Return the form that cannot hold a thread for ever."""
        restriction = self.restriction(method)
        if handler.unary_unary is not None:
            inner = self._arrived(self._tracked(handler.unary_unary))
            return grpc.stream_unary_rpc_method_handler(self._admitted(restriction, inner))
        if handler.unary_stream is not None:
            inner = self._arrived(handler.unary_stream)
            return grpc.stream_stream_rpc_method_handler(self._admitted(restriction, inner))
        return self.plain(method, handler)

    def lets_all_in(self, method: str) -> bool:
        """Whether the method is not restricted."""
        return self.restriction(method) is None

    def restriction(self, method: str) -> Restriction | None:
        """Return what a caller of the method must satisfy, if anything."""
        return self._restrictions.of(CATEGORY_OF_METHOD[method])

    def _admitted(self, restriction: Restriction | None, inner: Behaviour) -> Behaviour:
        """Refuse callers that may not call the method, before their message is waited for."""
        if restriction is None:
            return inner

        def answer(messages: Any, context: Context) -> Any:
            try:
                admit(restriction, context)
            except RequestError as error:
                context.abort(as_grpc(error.code), error.message)
            return inner(messages, context)

        return answer

    def _arrived(self, inner: Behaviour) -> Behaviour:
        """Wait for the one message of a call. What `messages` raises when the call ends is gRPC's own to catch."""

        def answer(messages: Iterator[bytes], context: Context) -> Any:
            self.arriving.enter(context)
            try:
                message = next(messages)
            except StopIteration:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call has no message")
            finally:
                self.arriving.leave(context)
            return inner(message, context)

        return answer

    def _tracked(self, inner: Behaviour) -> Behaviour:
        """Note a large answer until the client has taken it."""

        def answer(message: Any, context: Context) -> bytes:
            response: bytes = inner(message, context)
            if len(response) >= LARGE_ANSWER_BYTES:
                self._unread.enter(context, len(response))
                if not context.add_callback(lambda: self._unread.leave(context)):
                    self._unread.leave(context)  # the call has ended already
            return response

        return answer


def as_grpc(code: StatusCode) -> grpc.StatusCode:
    """Return the status as grpcio knows it."""
    return grpc.StatusCode[code.name]


class GatedService(grpc.GenericRpcHandler):
    """A service's methods, each with the gate before it; `pool` tells how many calls hold a thread."""

    def __init__(self, name: str, handlers: Mapping[str, MethodHandler], gate: Gate, pool: CountingPool) -> None:
        self._name = name
        self._gate = gate
        self._pool = pool
        self._plain = {f"/{name}/{method}": gate.plain(method, handler) for method, handler in handlers.items()}
        self._watched = {f"/{name}/{method}": gate.watched(method, handler) for method, handler in handlers.items()}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "MethodHandler | None":
        """Return the handler for a call that begins; None if the method is not this service's."""
        crowded = self._pool.busy > self._gate.max_plain
        handler = (self._watched if crowded else self._plain).get(handler_call_details.method)
        return handler if handler is None or self._pool.has_thread() else self._gate.refusal


def _refusal() -> MethodHandler:
    """Return the handler of calls that get no thread. It has a thread of its own, which no call holds.

    `experimental_thread_pool` is grpcio's name for it. An exception here would end gRPC's own thread.
    """

    def refuse(_messages: Any, context: Context) -> NoReturn:
        context.abort(grpc.StatusCode.UNAVAILABLE, NO_THREAD)

    refuse.experimental_thread_pool = started_pool(1, "refusals")  # type: ignore[attr-defined]
    return grpc.stream_stream_rpc_method_handler(refuse)


def admit(restriction: Restriction, call: CallMetadata) -> None:
    """Return if the caller has sent what the restriction asks for. Raises RequestError, as Triton words it."""
    key = GRPC_KEY_PREFIX + restriction.key
    if not restriction.admits(value for name, value in call.invocation_metadata() or () if name == key):
        unavailable(f"This protocol is restricted, expecting header '{key}'")
