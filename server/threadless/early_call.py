"""One call to a method whose messages are received early (`grpc_calls.py`), from its headers to its end.

gRPC's core is asked for three things: the message, news of the call's end, and to send the answer. It tells of each by
calling a method here, in gRPC's own thread, one after the other; only `answer` is for any thread.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import grpc
from grpc import _server
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from gangway.executor.log_limit import OFTEN
from gangway.server.counting_pool import NO_THREAD
from gangway.server.errors import RequestError

if TYPE_CHECKING:
    from gangway.server.threadless.grpc_calls import EarlyCalls

inside: Any = _server  # has no types
Behaviour: TypeAlias = Callable[[bytes, grpc.ServicerContext], bytes]
Returned: TypeAlias = tuple[Any, Sequence[Callable[[], None]]]  # what gRPC is to forget, and what to call then
_FLAGS = 0
_MESSAGE_EXPECTED = '"{}" requires exactly one request message.'  # as grpcio says it

_log = logging.getLogger(__name__)


class Begin(Protocol):
    """Deals with a message at once, and calls `call.answer` sometime; False: a thread has to."""

    def __call__(self, message: bytes, call: "EarlyCall") -> bool:
        """Say whether it has."""


class EarlyCall:
    """What inference must know of a call, and what gRPC's core calls."""

    __slots__ = ("_callbacks", "_calls", "_due", "_entered", "_event", "_in_pool", "_unanswered")

    def __init__(self, calls: "EarlyCalls", event: Any) -> None:
        self._calls = calls
        self._event = event
        self._due = 3  # of the things that core is asked for
        self._callbacks: list[Callable[[], None]] | None = []
        self._unanswered = threading.Lock()  # taken for good by whoever ends the call: the answer, or the client
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
            code, details = result.code.value[0], result.message.encode()
            status = cygrpc.SendStatusFromServerOperation(None, code, details, _FLAGS)
        headers = cygrpc.SendInitialMetadataOperation(None, _FLAGS)
        self._event.call.start_server_batch((headers, *message, status), self._sent)

    def _leave(self, answered: bool) -> None:
        """There is an answer, or nobody who waits for it: a client that does not take it keeps nobody out."""
        if self._entered:
            self._calls.door.leave(answered)

    def _arrived(self, received: Any) -> Returned:
        self._calls.arriving.leave(self)
        self._due -= 1
        message = received.batch_operations[0].message()
        if self._calls.arrivals is not None:
            self._calls.arrivals.leave(self, len(message or b""))
        if message is None:  # the call has ended, or the client sends none
            details = _MESSAGE_EXPECTED.format(self._calls.path)
            self.answer(RequestError(grpc.StatusCode.UNIMPLEMENTED, details))
            return self._ended()
        if not self._unanswered.locked():
            self._entered = True
            self._calls.door.enter()
        if self._has_begun(message):
            return self._ended()
        if not self._calls.has_thread():
            self.answer(RequestError(grpc.StatusCode.UNAVAILABLE, NO_THREAD))
        elif self._unanswered.acquire(blocking=False):
            self._in_pool = self._calls.give_to_pool(self, self._event, message)
            return None, ()
        return self._ended()

    def _has_begun(self, message: bytes) -> bool:
        try:
            return self._calls.begin(message, self)
        except Exception:  # would end the thread that all calls need
            _log.exception("a request failed unexpectedly", extra=OFTEN)
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
