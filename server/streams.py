"""All ModelStreamInfer calls of a front end: how many there may be, their threads, and what becomes of stalled ones.

A stream keeps one thread of the gRPC server, which has that many more, so that streams take none from other calls; and
one of the threads here, which waits for its next request. Each request that is executed needs a further one.
"""

import logging
import threading
import time
from collections.abc import Iterator

import grpc

from gangway.server.counting_pool import CountingPool
from gangway.server.errors import RequestError, unavailable
from gangway.server.stream import Infer, OrderOf, Stream, StreamLimits
from gangway.server.stream_call import StreamContext

PERIOD_S = 1.0
READY_THREADS = 4  # are started before the first stream
WORTH_BYTES = 1 << 20  # a stream that holds less is not ended for its memory

_log = logging.getLogger(__name__)


class Streams:
    """Safe for threads. `max_in_flight`: how many requests can be executed at a time."""

    def __init__(self, infer: Infer, order_of: OrderOf, max_in_flight: int, limits: StreamLimits) -> None:
        self.limits = limits
        self._infer = infer
        self._order_of = order_of
        self._threads = CountingPool(limits.streams + max_in_flight, "stream", READY_THREADS)
        self._lock = threading.Lock()
        self._streams: set[Stream] = set()
        self._refusal = ""

    def serve(self, messages: Iterator[bytes], context: StreamContext) -> Iterator[bytes]:
        """Answer one call's requests. Raises RequestError (UNAVAILABLE) for one stream too many."""
        stream = Stream(messages, context, self._infer, self._order_of, self._threads.submit, self.limits)
        with self._lock:
            if self._refusal:
                unavailable(self._refusal)
            if len(self._streams) >= self.limits.streams:
                unavailable(f"{self.limits.streams} streams are open already")
            self._streams.add(stream)
        if not context.add_callback(lambda: self._over(stream)):
            self._over(stream)
        return stream.answers()

    def refuse(self, reason: str) -> None:
        """Accept no further stream and no further request; end the streams when what is under way is answered."""
        with self._lock:
            self._refusal = reason
            streams = list(self._streams)
        for stream in streams:
            stream.refuse(RequestError(grpc.StatusCode.UNAVAILABLE, reason))

    @property
    def idle(self) -> bool:
        """Whether there is no stream any more, so that every answer has been sent."""
        return not self._streams

    def watch(self) -> None:
        """Look after the streams for ever."""
        while True:
            time.sleep(PERIOD_S)
            self.end_stalled()
            self.bound_unsent()

    def end_stalled(self) -> int:
        """End the streams whose clients do not take their answers; return how many."""
        now_s = time.monotonic()
        stalled = [stream for stream in self._snapshot() if stream.stalled(now_s)]
        for stream in stalled:
            _log.info("a stream is ended: no answer could be sent for %.0f s", self.limits.stall_seconds)
            stream.cancel()
        return len(stalled)

    def bound_unsent(self) -> bool:
        """End the stream with most unsent answers if there are too many of them altogether; say whether it was so."""
        streams = self._snapshot()
        if sum(stream.unsent_bytes for stream in streams) <= self.limits.unsent_bytes:
            return False
        largest = max(streams, key=lambda stream: stream.unsent_bytes)
        _log.warning("a stream is ended: answers of %d bytes wait to be sent", largest.unsent_bytes)
        largest.cancel()
        return True

    def end_largest(self) -> bool:
        """End the stream that holds most, because memory is full; False if none holds much."""
        largest = max(self._snapshot(), key=lambda stream: stream.held_bytes, default=None)
        if largest is None or largest.held_bytes < WORTH_BYTES:
            return False
        _log.warning("a stream is ended: it holds %d bytes, and memory is full", largest.held_bytes)
        largest.cancel()
        return True

    def _snapshot(self) -> list[Stream]:
        with self._lock:
            return list(self._streams)

    def _over(self, stream: Stream) -> None:
        with self._lock:
            self._streams.discard(stream)
        stream.end()
