"""Unary calls whose message is received before a thread takes them, or without one that does.

grpcio gives a call to a thread of its pool, which asks for the message and sleeps until gRPC's own thread has handed it
over. Here gRPC's thread asks, and when the message has come it may deal with the call itself (`begin`), or else give it
to the pool. This saves two changes of threads for each request, which with one interpreter lock are dear, and no thread
waits for a client.

grpcio has no public way to this. What is used of its inside is named here, and where another version lacks it, calls
go the ordinary way.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeAlias

import grpc
from gangway.executor.log_limit import OFTEN
from gangway.server.errors import RequestError
from gangway.server.stalled_calls import StalledCalls
from grpc import _server as inside
from grpc._cython import cygrpc  # type: ignore[attr-defined]

AVAILABLE = all(hasattr(inside, name) for name in ("_Context", "_RECEIVE_MESSAGE_TOKEN", "_receive_message", "_status"))

_log = logging.getLogger(__name__)
Answer: TypeAlias = Callable[[bytes | RequestError], None]


class Begin(Protocol):
    """Deals with a message at once, and calls `answer` sometime; False: a thread has to."""

    def __call__(self, message: bytes, call: grpc.ServicerContext, answer: Answer) -> bool:
        """Say whether it has."""


class Ending:
    """What gRPC gets in place of a task's Future: it wants to know when the call has been dealt with."""

    def __init__(self) -> None:
        self._tell: Callable[[Any], None] = lambda ending: None

    def add_done_callback(self, tell: Callable[[Any], None]) -> None:
        """Have `tell` called. gRPC does this before its thread can receive the message."""
        self._tell = tell

    def end(self, _future: "Future[None] | None" = None) -> None:
        """The call has been dealt with."""
        self._tell(self)


class EarlyCalls(ThreadPoolExecutor):
    """To be the `experimental_thread_pool` of a method. Has no thread; `pool` has them.

    `arriving`: calls whose message has not come.
    """

    def __init__(self, pool: Executor, arriving: StalledCalls, begin: Begin) -> None:
        super().__init__(1)  # started with the first task, which never comes
        self._pool = pool
        self._arriving = arriving
        self._begin = begin

    def submit(  # type: ignore[override]
        self, run: Any, respond: Any, event: Any, state: Any, behaviour: Any, receive: Any, *rest: Any
    ) -> Any:
        """Ask for the message of a call. gRPC's thread calls this, and holds `state.condition`."""
        call, ending = inside._Context(event, state, None), Ending()

        def in_pool(handle: Any, message: Callable[[], bytes | None]) -> None:
            task = self._pool.submit(run, respond, event, state, handle, message, *rest)
            task.add_done_callback(ending.end)

        def answer(result: bytes | RequestError) -> None:
            if isinstance(result, RequestError) and call.is_active():
                in_pool(_refusing(result), lambda: b"")
                return
            if isinstance(result, bytes):
                inside._status(event, state, result)
            ending.end()

        def arrived(received: Any) -> Any:
            self._arriving.leave(call)
            over = receive_message(received)
            message, state.request = state.request, None
            if message is None:
                in_pool(behaviour, receive)  # finds out why, and tells the client
            elif not self._has_begun(message, call, answer):
                in_pool(behaviour, lambda: message)
            return over

        self._arriving.enter(call)
        receive_message = inside._receive_message(state, event.call, None)
        event.call.start_server_batch((cygrpc.ReceiveMessageOperation(0),), arrived)
        state.due.add(inside._RECEIVE_MESSAGE_TOKEN)
        return ending

    def _has_begun(self, message: bytes, call: grpc.ServicerContext, answer: Answer) -> bool:
        try:
            return self._begin(message, call, answer)
        except Exception:  # would end the thread that all calls need
            _log.exception("a request failed unexpectedly", extra=OFTEN)
            return False


def _refusing(error: RequestError) -> Callable[[bytes, grpc.ServicerContext], bytes]:
    def refuse(_message: bytes, context: grpc.ServicerContext) -> bytes:
        context.abort(error.code, error.message)

    return refuse
