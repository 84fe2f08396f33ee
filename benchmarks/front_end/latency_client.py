"""The client whose requests are followed, and the load beside it: each a process of its own."""

import multiprocessing as mp
import random
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe

import grpc
import numpy as np

from benchmarks.front_end.latency_parts import ARRIVED, Instants, Trip
from gangway.clients.connection import SERVICE
from gangway.clients.open_loop import drive
from gangway.workload.arrivals import Arrivals
from testing.load import raw_channel, raw_infer
from testing.processes import CoreUse, core_use

TIMEOUT_S = 30.0
WARM_UP_REQUESTS = 20
_ID_TAG = 3 << 3 | 2  # of ModelInferRequest


@dataclass(frozen=True)
class Errand:
    """What a client is to do: send `request` (serialised, without an id) one at a time, so many or for so long.

    `prefix` begins the ids. Pauses are random, `pause_s` on average, so that they keep no step with anybody's timer.
    """

    url: str
    request: bytes
    prefix: str
    requests: int
    seconds: float
    pause_s: float

    def message(self, number: int) -> tuple[str, bytes]:
        """Return the id of a request, and its bytes."""
        request_id = f"{self.prefix}.{number}"
        return request_id, self.request + bytes((_ID_TAG, len(request_id))) + request_id.encode()


class Client:
    """A process with a blocking grpcio client, warmed up."""

    def __init__(self, errand: Errand) -> None:
        context = mp.get_context("forkserver")  # a process that has gRPC threads must not be forked
        context.set_forkserver_preload([__name__])
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=_run, args=(errand, child), daemon=True)
        self._process.start()
        child.close()
        self._receive()

    def run(self) -> tuple[list[Trip], CoreUse]:
        """Do the errand; return each request, and what the process used."""
        self._pipe.send("go")
        trips = self._receive()
        use = self._receive()
        assert isinstance(trips, list) and isinstance(use, CoreUse)
        self._process.join()
        return trips, use

    def _receive(self) -> object:
        if not self._pipe.poll(10 * TIMEOUT_S):
            raise TimeoutError("the client said nothing")
        return self._pipe.recv()


def _run(errand: Errand, pipe: Pipe) -> None:
    pauses = random.Random(errand.prefix)
    trips: list[Trip] = []
    with raw_channel(errand.url) as channel:
        infer = raw_infer(channel)
        for _ in range(WARM_UP_REQUESTS):
            infer(errand.request, timeout=TIMEOUT_S)
        pipe.send("warm")
        pipe.recv()
        before = core_use(mp.current_process().pid or 0)
        end_s = time.monotonic() + errand.seconds
        while len(trips) < errand.requests and time.monotonic() < end_s:
            if errand.pause_s:
                time.sleep(errand.pause_s * pauses.uniform(0.5, 1.5))
            request_id, message = errand.message(len(trips))
            sent_ns = time.monotonic_ns()
            infer(message, timeout=TIMEOUT_S)
            trips.append(Trip(request_id, sent_ns, time.monotonic_ns()))
        after = core_use(mp.current_process().pid or 0)
        pipe.send(trips)
        pipe.send(CoreUse(*(now - then for now, then in zip(after, before, strict=True))))


def floor_arrivals(url: str) -> Sequence[int]:
    """Return when messages have come to a server that does nothing, since the last time."""
    with raw_channel(url) as channel:
        ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(SERVICE + "ModelStatistics")
        return array("q", ask(b"", timeout=TIMEOUT_S))


def floor_traces(trips: list[Trip], came_ns: Sequence[int]) -> dict[str, Instants]:
    """Return when each request came to such a server, whose last ones these are."""
    return {
        trip.request_id: {ARRIVED: ns} for trip, ns in zip(trips, came_ns[len(came_ns) - len(trips) :], strict=True)
    }


@contextmanager
def background(url: str, model: str, request: bytes, rate_per_s: float, seconds: float) -> Iterator[None]:
    """Have another process send requests of one model at random times (Poisson), until the block or the time ends."""
    gaps_us = np.random.default_rng(1).exponential(1e6 / rate_per_s, int(2 * rate_per_s * seconds) + 20)
    times_us = np.cumsum(gaps_us)
    arrivals = Arrivals(times_us, np.zeros(len(times_us), dtype=np.int64)).until(seconds * 1e6)
    process = mp.get_context("forkserver").Process(target=drive, args=(url, {model: request}, arrivals), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()
