"""ModelInfer calls by grpcio's futures: a channel as a user's Python program has it, for an open loop.

It does what `async_infer` of Triton's client library does, by `stub.ModelInfer.future`: each request is serialised when
it leaves, each answer parsed when it comes. Callbacks in grpcio's thread hand results over by an eventfd. The sender
waits for that with a resolution of microseconds, where the timers of asyncio have one of milliseconds.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import grpc

from gangway.clients.channel import INFER_METHOD, CallResult
from gangway.clients.connection import NO_CONNECTION, SERVICE, grpc_channel
from gangway.clients.errors import UnreachableError
from gangway.clients.tls import Tls
from gangway.protos import grpc_service_pb2 as pb

# Channels of one process with the same address and options share a connection otherwise.
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


class GrpcioChannel:
    """A `Channel` of grpcio. A lost connection ends calls as UNAVAILABLE; grpcio connects again by itself."""

    wants_write = False
    usable = True

    def __init__(
        self, url: str, requests: Sequence[bytes], timeout_s: float, connect_timeout_s: float, tls: Tls | None = None
    ) -> None:
        """Connect within `connect_timeout_s`; each of the serialised `requests` has `timeout_s`.

        Raises UnreachableError; InputError for unusable TLS files.
        """
        self._requests = [pb.ModelInferRequest.FromString(request) for request in requests]
        self._timeout_s = timeout_s
        self._calls: dict[int, grpc.Call] = {}
        self._ended: deque[CallResult] = deque()
        self._lock = threading.Lock()  # of `_event` against its end: callbacks come after it, too
        self._channel = grpc_channel(url, tls, OWN_CONNECTION)
        try:
            _await_server(self._channel, url, connect_timeout_s)
        except UnreachableError:
            self._channel.close()
            raise
        self._infer: grpc.UnaryUnaryMultiCallable[pb.ModelInferRequest, pb.ModelInferResponse] = (
            self._channel.unary_unary(
                INFER_METHOD,
                request_serializer=pb.ModelInferRequest.SerializeToString,
                response_deserializer=pb.ModelInferResponse.FromString,
            )
        )
        self._event: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the eventfd, which is readable while results wait."""
        assert self._event is not None
        return self._event

    def start(self, call: int, request: int) -> None:
        """Start a call with a number of the caller's choice. `request` indexes the requests of the constructor."""
        future = self._infer.future(self._requests[request], timeout=self._timeout_s)
        self._calls[call] = future
        future.add_done_callback(lambda _: self._end(call, future))

    def cancel(self, call: int) -> None:
        """Drop a call and tell the server."""
        if (future := self._calls.pop(call, None)) is not None:
            future.cancel()

    def flush(self) -> None:
        """Do nothing: grpcio's threads send."""

    def receive(self) -> list[CallResult]:
        """Return the calls that ended, except cancelled ones."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fileno())
        ended = []
        while self._ended:
            result = self._ended.popleft()
            if self._calls.pop(result.call, None) is not None:
                ended.append(result)
        return ended

    def close(self) -> None:
        """Cancel what is outstanding and close the connection."""
        with self._lock:
            if self._event is not None:
                os.close(self._event)
            self._event = None
        self._channel.close()

    def _end(self, call: int, future: grpc.Call) -> None:
        """Take the end of a call, in a thread of grpcio."""
        self._ended.append(CallResult(call, future.code().name, future.details() or "", time.monotonic_ns()))
        with self._lock:
            if self._event is not None:
                os.eventfd_write(self._event, 1)


def _await_server(channel: grpc.Channel, url: str, timeout_s: float) -> None:
    """Wait for any answer, which says that the connection stands: grpcio gives no reason why it does not stand."""
    ask: Callable[..., bytes] = channel.unary_unary(SERVICE + "ServerLive")
    try:
        ask(b"", timeout=timeout_s)
    except grpc.RpcError as error:
        status, details = error.code(), error.details() or "no details"
        if status is grpc.StatusCode.DEADLINE_EXCEEDED or (
            status is grpc.StatusCode.UNAVAILABLE and details.startswith(NO_CONNECTION)
        ):
            raise UnreachableError(f"no server answers at {url} ({details})") from error
