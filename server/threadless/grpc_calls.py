"""Unary calls whose message is received before a thread takes them, or without one that does.

grpcio gives a call to a thread of its pool, which asks for the message and sleeps until gRPC's own thread has handed it
over. Here gRPC's thread asks, and when the message has come it may deal with the call itself (`begin`), or else give it
to the pool. This saves two changes of threads for each request, which with one interpreter lock are dear, and no thread
waits for a client. It also does without what grpcio keeps for each call: a condition, a context, a Future, and a lock
that all calls share.

grpcio has no public way to this. What is used of its inside is named here and in `early_call.py`, and where another
version lacks it, calls go the ordinary way.
"""

from typing import Any

import grpc
from grpc import _server
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from gangway.server.counting_pool import CountingPool
from gangway.server.door import Door
from gangway.server.stalled_calls import StalledCalls
from gangway.server.threadless.arrivals import Arrivals
from gangway.server.threadless.early_call import Begin, Behaviour, EarlyCall, Returned

inside: Any = _server  # has no types
_FUNCTIONS = ("_RPCState", "_RECEIVE_CLOSE_ON_SERVER_TOKEN", "_receive_close_on_server", "_unary_response_in_pool")
_OTHERS = ("_reject_rpc", "_ServerStage", "_ServerState", "_Server")
_SERVER = ("register_method", "request_registered_call")
AVAILABLE = all(hasattr(inside, name) for name in (*_FUNCTIONS, *_OTHERS)) and all(
    hasattr(cygrpc.Server, name) for name in _SERVER
)


class EarlyCalls:
    """All calls of one method of a server that has not been started. What else has the method's name gets none of them.

    `path`: "/SERVICE/METHOD". `begin` deals with messages; `behaviour` with those that it does not want, in a thread of
    `pool`. `arriving`: calls whose message has not come. `door`: says who is received at all, `arrivals`: when.
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
        door: Door,
        reserved_calls: int = 0,
        arrivals: Arrivals | None = None,
    ) -> None:
        self.path, self.begin, self.arriving, self.door, self.arrivals = path, begin, arriving, door, arrivals
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
            elif not self.door.admits():
                self._reject(event, cygrpc.StatusCode.unavailable, self.door.refusal.encode())
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
            self.door.leave(answered)
