"""Unary calls whose message is received before a thread takes them, or without one that does.

grpcio gives a call to a thread of its pool, which asks for the message and sleeps until gRPC's own thread has handed it
over. Here gRPC's thread asks for the message. When it has come, this thread answers the call (`begin`), or gives it to
the pool. That saves two changes of threads for each request, which are expensive under one interpreter lock. No thread
waits for a client, and a call needs none of grpcio's own objects: a condition, a context, a Future, and a lock that all
calls share.

grpcio has no public interface for this. The private parts that are used are named here. Where another version lacks one
of them, each call has a thread.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias

import grpc
from grpc import _server
from grpc._cython import cygrpc as _cygrpc  # type: ignore[attr-defined]

from gangway.executor.logs import OFTEN
from gangway.executor.memory_budget import SMALL_BYTES, MemoryBudget
from gangway.protos import StatusCode
from gangway.server.errors import RequestError
from gangway.server.grpc.gate import StalledCalls
from gangway.server.requests.admission import AdmissionController
from gangway.server.threads import NO_THREAD, CountingPool

_log = logging.getLogger(__name__)

inside: Any = _server  # has no types
cygrpc: Any = _cygrpc
Behaviour: TypeAlias = Callable[[bytes, grpc.ServicerContext], bytes]
Returned: TypeAlias = tuple[Any, Sequence[Callable[[], None]]]  # what gRPC is to forget, and what to call then
_FLAGS = 0
_MESSAGE_EXPECTED = '"{}" requires exactly one request message.'  # as grpcio says it


class Begin(Protocol):
    """Deals with a message at once, and calls `call.answer` sometime; False: a thread has to."""

    def __call__(self, message: bytes, call: "EarlyCall") -> bool:
        """Say whether it has."""
        ...


class EarlyCall:
    """One call to a method of `EarlyCalls`, from its headers to its end.

    gRPC's core is asked for three things: the message, the call's end, and to send the answer. It reports each by
    calling a method here, in gRPC's own thread, one after the other. Only `answer` is for any thread.
    """

    __slots__ = ("_callbacks", "_calls", "_due", "_entered", "_event", "_in_pool", "_unanswered")

    def __init__(self, calls: "EarlyCalls", event: Any) -> None:
        self._calls = calls
        self._event = event
        self._due = 3  # of the things that core is asked for
        self._callbacks: list[Callable[[], None]] | None = []
        self._unanswered = threading.Lock()  # taken for good by what ends the call: the answer, or the client
        self._entered = False  # the message has come, and counts as one that waits for its answer
        self._in_pool: Any = None  # what grpcio keeps of it, from when a thread deals with it

    def receive(self) -> None:
        """Ask for the message, and to hear of the end."""
        self._calls.arriving.enter(self)
        self._event.call.start_server_batch((cygrpc.ReceiveCloseOnServerOperation(_FLAGS),), self._closed)
        if self._calls.arrivals is None:
            self.ask()
        else:
            self._calls.arrivals.enter(self)

    def ask(self) -> None:
        """Ask for the message alone."""
        self._event.call.start_server_batch((cygrpc.ReceiveMessageOperation(_FLAGS),), self._arrived)

    def time_remaining(self) -> float:
        """Return the seconds until the client's deadline, a huge number without one."""
        return max(float(self._event.call_details.deadline) - time.time(), 0.0)

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """Return the call's headers."""
        metadata: Sequence[tuple[str, str | bytes]] = self._event.invocation_metadata
        return metadata

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Have `callback` called when the call has ended; False if it has: then it may have been called, too."""
        callbacks = self._callbacks
        if callbacks is None:
            return False
        callbacks.append(callback)
        return self._callbacks is not None

    def cancel(self) -> None:
        """End the call."""
        self._event.call.cancel()

    def answer(self, result: bytes | RequestError) -> None:
        """Send the answer, unless the client has gone. From any thread, once."""
        if not self._unanswered.acquire(blocking=False):
            return
        self._leave(isinstance(result, bytes))
        if isinstance(result, bytes):
            message: tuple[Any, ...] = (cygrpc.SendMessageOperation(result, _FLAGS),)
            status = cygrpc.SendStatusFromServerOperation(None, cygrpc.StatusCode.ok, b"", _FLAGS)
        else:
            message = ()
            code, details = int(result.code), result.message.encode()
            status = cygrpc.SendStatusFromServerOperation(None, code, details, _FLAGS)
        headers = cygrpc.SendInitialMetadataOperation(None, _FLAGS)
        self._event.call.start_server_batch((headers, *message, status), self._sent)

    def _leave(self, answered: bool) -> None:
        """The call is answered or cancelled. A client that does not take its answer occupies no room."""
        if self._entered:
            self._calls.admission.leave(answered)

    def _arrived(self, received: Any) -> Returned:
        self._calls.arriving.leave(self)
        self._due -= 1
        message = received.batch_operations[0].message()
        if self._calls.arrivals is not None:
            self._calls.arrivals.leave(self, len(message or b""))
        if message is None:  # the call has ended, or the client sends none
            details = _MESSAGE_EXPECTED.format(self._calls.path)
            self.answer(RequestError(StatusCode.UNIMPLEMENTED, details))
            return self._ended()
        if not self._unanswered.locked():
            self._entered = True
            self._calls.admission.enter()
        if self._has_begun(message):
            return self._ended()
        if not self._calls.has_thread():
            self.answer(RequestError(StatusCode.UNAVAILABLE, NO_THREAD))
        elif self._unanswered.acquire(blocking=False):
            self._in_pool = self._calls.give_to_pool(self, self._event, message)
            return None, ()
        return self._ended()

    def _has_begun(self, message: bytes) -> bool:
        try:
            return self._calls.begin(message, self)
        except Exception:  # would end the thread that all calls need
            _log.exception("a request failed by a fault of the server; its client is told INTERNAL", extra=OFTEN)
            return False

    def _closed(self, event: Any) -> Returned:
        if self._in_pool is not None:
            forgotten: Returned = inside._receive_close_on_server(self._in_pool)(event)
            return forgotten
        self._due -= 1
        if event.batch_operations[0].cancelled() and self._unanswered.acquire(blocking=False):
            self._due -= 1  # nothing will be sent
            self._leave(False)
        return self._ended()

    def _sent(self, _event: Any) -> Returned:
        self._due -= 1
        return self._ended()

    def _ended(self) -> Returned:
        if self._due:
            return None, ()
        callbacks, self._callbacks = self._callbacks or (), None
        return self, callbacks


COPIES: Final = 4  # pieces, all of them joined while that grows, and what Python gets
SLOW_S: Final = 0.5  # a call that has its place for longer loses it; `MemoryGuard` watches what it takes
MAX_WAIT_S: Final = 1.0  # that a call waits for its place


class ArrivingCall(Protocol):
    """The part of an early call that is used."""

    def ask(self) -> None:
        """Ask gRPC for the message."""

    def answer(self, result: RequestError) -> object:
        """End the call with an error."""


class Arrivals:
    """Which calls may receive their message, where memory could not hold all that clients may send at once.

    gRPC takes a message in as soon as it is asked for, of any size, and reports it only when it is complete. So a call
    asks only while the memory budget has room for the largest possible message, as gRPC holds it and as it is put
    together for Python. Other calls wait in their order. Their messages stay with the clients, but for the first 64
    KiB. A slow client holds a place only as long as no other call needs it. Safe for threads. `message_bytes`: of the
    largest possible message.
    """

    def __init__(self, budget: MemoryBudget, message_bytes: int) -> None:
        self._budget = budget
        self._place_bytes = COPIES * message_bytes
        self._lock = threading.Lock()
        self._begun: dict[ArrivingCall, float] = {}  # calls that have a place, since when
        self._waiting: deque[tuple[ArrivingCall, float]] = deque()

    def enter(self, call: ArrivingCall) -> None:
        """Have a call ask for its message as soon as there is room."""
        with self._lock:
            if self._waiting or not self._has_place():
                self._waiting.append((call, time.monotonic()))
                return
            self._begun[call] = time.monotonic()
        call.ask()

    def leave(self, call: ArrivingCall, message_bytes: int) -> None:
        """The message has come, or there is none (0 bytes)."""
        if message_bytes > SMALL_BYTES:
            self._budget.note(message_bytes)
        with self._lock:
            self._begun.pop(call, None)
            called = self._next() if self._waiting else ()
        for other in called:
            other.ask()

    @property
    def waits(self) -> bool:
        """Whether any call waits for a place."""
        return bool(self._waiting)

    def look(self, error: RequestError) -> None:
        """Take their places from slow calls, and end those with this error that have waited for too long for one."""
        now_s = time.monotonic()
        refused = []
        with self._lock:
            for call, since_s in list(self._begun.items()):
                if since_s + SLOW_S > now_s:
                    break
                del self._begun[call]
            called = self._next()
            while self._waiting and self._waiting[0][1] + MAX_WAIT_S <= now_s:
                refused.append(self._waiting.popleft()[0])
        for call in refused:
            call.answer(error)
        for call in (*called, *refused):
            call.ask()  # also for refused calls: gRPC reports the end of a call by that

    def _has_place(self) -> bool:
        """Whether there is room for one more. For the first one the reserve is enough."""
        return self._budget.fits((len(self._begun) + 1) * self._place_bytes if self._begun else 0)

    def _next(self) -> list[ArrivingCall]:
        """Give places to waiting calls, as far as there are any; return these calls. The caller holds the lock."""
        called = []
        while self._waiting and self._has_place():
            call, _ = self._waiting.popleft()
            self._begun[call] = time.monotonic()
            called.append(call)
        return called


_FUNCTIONS = ("_RPCState", "_RECEIVE_CLOSE_ON_SERVER_TOKEN", "_receive_close_on_server", "_unary_response_in_pool")
_OTHERS = ("_reject_rpc", "_ServerStage", "_ServerState", "_Server")
_SERVER = ("register_method", "request_registered_call")
AVAILABLE = all(hasattr(inside, name) for name in (*_FUNCTIONS, *_OTHERS)) and all(
    hasattr(cygrpc.Server, name) for name in _SERVER
)


class EarlyCalls:
    """All calls of one method of a server that has not been started. What else has the method's name gets none of them.

    `path`: "/SERVICE/METHOD". `begin` deals with messages; `behaviour` with those that it does not want, in a thread of
    `pool`. `arriving`: calls whose message has not come. `admission` says which are received, `arrivals` when.
    `reserved_calls`: as many are taken above the server's limit. `has_thread`: see CountingPool.
    """

    def __init__(
        self,
        server: grpc.Server,
        path: str,
        begin: Begin,
        behaviour: Behaviour,
        pool: CountingPool,
        arriving: StalledCalls,
        admission: AdmissionController,
        reserved_calls: int = 0,
        arrivals: Arrivals | None = None,
    ) -> None:
        self.path, self.begin, self.arriving, self.admission, self.arrivals = path, begin, arriving, admission, arrivals
        self._behaviour = behaviour
        self._pool = pool
        self.has_thread = pool.has_thread
        self._reserved_calls = reserved_calls
        self._server: Any = server._state  # type: ignore[attr-defined]
        self._tag = self._called  # the same object each time
        self._server.server.register_method(path)

    def start(self) -> None:
        """Take calls. The server has been started."""
        with self._server.lock:
            self._ask_for_call()

    def _ask_for_call(self) -> None:
        """gRPC calls `_called` once. The caller holds the server's lock."""
        server = self._server
        server.server.request_registered_call(server.completion_queue, server.completion_queue, self.path, self._tag)
        server.due.add(self._tag)

    def _called(self, event: Any) -> Returned:
        """A call has come, or the server is stopping. In gRPC's thread, as all that it calls."""
        server = self._server
        with server.lock:
            server.due.discard(self._tag)
            if not event.success:
                server.rpc_states.add(self)  # only for gRPC to look whether the server can be stopped now
                return self, ()
            limit = server.maximum_concurrent_rpcs
            if limit is not None and len(server.rpc_states) >= limit + self._reserved_calls:
                self._reject(event, cygrpc.StatusCode.resource_exhausted, b"Concurrent RPC limit exceeded!")
            elif not self.admission.admits():
                self._reject(event, cygrpc.StatusCode.unavailable, self.admission.refusal.encode())
            else:
                call = EarlyCall(self, event)
                server.rpc_states.add(call)
                call.receive()
            if server.stage is inside._ServerStage.STARTED:
                self._ask_for_call()
        return None, ()

    def _reject(self, event: Any, code: Any, details: bytes) -> None:
        rejected = inside._RPCState()
        self._server.rpc_states.add(rejected)
        inside._reject_rpc(event, rejected, code, details)

    def give_to_pool(self, call: EarlyCall, event: Any, message: bytes) -> Any:
        """Have a thread deal with a call; return what gRPC knows of it from then on, in its place."""
        state = inside._RPCState()
        state.due.add(inside._RECEIVE_CLOSE_ON_SERVER_TOKEN)
        with self._server.lock:
            self._server.rpc_states.remove(call)
            self._server.rpc_states.add(state)
        self._pool.submit(
            state.context.run,
            inside._unary_response_in_pool,
            event,
            state,
            self._behave,
            lambda: message,
            None,
            None,
        )
        return state

    def _behave(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        answered = False
        try:
            response = self._behaviour(message, context)
            answered = True
            return response
        finally:
            self.admission.leave(answered)
