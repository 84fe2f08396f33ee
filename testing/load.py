"""A client process that keeps N requests under way and notes how each of them ended. Cheap: raw bytes in and out."""

import multiprocessing as mp
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from types import TracebackType
from typing import Self

import grpc
import numpy as np

from gangway.clients.connection import SERVICE, UNLIMITED_MESSAGES
from gangway.clients.inputs import Array, outputs_of
from gangway.protos import grpc_service_pb2 as pb

# Try a broken connection again at once: how fast the server is back is measured, not gRPC's patience (1 s and more).
# gRPC's "min" is something else: what one attempt may take. A server on a busy machine needs more than these 20 ms.
EAGER = [(f"grpc.{which}_reconnect_backoff_ms", 20) for which in ("initial", "max")]
PAUSE_AFTER_FAILURE_S = 0.01
STOP_TIMEOUT_S = 60
TOLERANCE = 1e-4  # of the largest absolute output

RIGHT = "right"
WRONG = "wrong"


@dataclass(frozen=True)
class Load:
    """What to send, how often at once, and the answer that is right."""

    url: str
    request: bytes
    expected: Mapping[str, Array]
    clients: int
    timeout_s: float = 10
    pause_s: float = 0.0  # between an answer and the next request


@dataclass(frozen=True)
class Outcome:
    """One request, CLOCK_MONOTONIC ns. `result` is "right", "wrong" or the name of the gRPC status."""

    begin_ns: int
    end_ns: int
    result: str


@dataclass(frozen=True)
class LoadResult:
    """All outcomes in order of their ends, and what the client process itself spent."""

    outcomes: list[Outcome]
    client_cpu_ns: int
    elapsed_ns: int

    def latencies_ms(self) -> list[float]:
        """Return milliseconds of the requests that were answered rightly."""
        return [(o.end_ns - o.begin_ns) / 1e6 for o in self.outcomes if o.result == RIGHT]


class LoadProcess:
    """Runs a load in a process of its own while the block lasts; `stop` ends it and returns what happened."""

    def __init__(self, load: Load) -> None:
        # Never fork a process that has gRPC threads. This one's server has only imported what is needed, once for all.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=_run_load, args=(load, child), daemon=True)
        self._process.start()
        child.close()

    def __enter__(self) -> Self:
        if self._receive() != "running":
            raise RuntimeError("the load process did not start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.join()

    def stop(self) -> LoadResult:
        """Let the requests under way finish and return all outcomes."""
        self._pipe.send("stop")
        result = self._receive()
        assert isinstance(result, LoadResult)
        return result

    def _receive(self) -> object:
        if not self._pipe.poll(STOP_TIMEOUT_S):
            raise TimeoutError(f"the load process said nothing for {STOP_TIMEOUT_S} s")
        return self._pipe.recv()


def run_for(load: Load, seconds: float) -> LoadResult:
    """Run a load for some time."""
    with LoadProcess(load) as process:
        time.sleep(seconds)
        return process.stop()


def is_right(response: bytes, expected: Mapping[str, Array], tolerance: float = TOLERANCE) -> bool:
    """Compare an answer with the expected outputs: integers exactly, floats within a tolerance."""
    outputs = outputs_of(pb.ModelInferResponse.FromString(response))
    return outputs.keys() == expected.keys() and all(
        _close(outputs[name], expected[name], tolerance) for name in expected
    )


def _close(got: Array, wanted: Array, tolerance: float) -> bool:
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    if wanted.dtype.kind != "f":
        return np.array_equal(got, wanted)
    return relative_error(got, wanted) <= tolerance


def relative_error(got: Array, wanted: Array) -> float:
    """Return the largest difference, as a share of the largest absolute wanted value."""
    reference = wanted.astype(np.float64)
    return float(np.abs(got.astype(np.float64) - reference).max() / np.abs(reference).max())


@contextmanager
def running(loops: Sequence[Callable[[], None]], over: threading.Event) -> Iterator[None]:
    """Have a thread of each loop while the block lasts; `over`, set at its end, tells them to return."""
    threads = [threading.Thread(target=loop) for loop in loops]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def raw_channel(url: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.Channel:
    """Return a channel for messages of any size that reconnects without patience."""
    if credentials is not None:
        return grpc.secure_channel(url, credentials, options=UNLIMITED_MESSAGES + EAGER)
    return grpc.insecure_channel(url, options=UNLIMITED_MESSAGES + EAGER)


def raw_infer(channel: grpc.Channel) -> "grpc.UnaryUnaryMultiCallable[bytes, bytes]":
    """Return ModelInfer on serialised messages."""
    infer: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(SERVICE + "ModelInfer")
    return infer


def _run_load(load: Load, pipe: Pipe) -> None:
    stopping = threading.Event()
    outcomes: list[list[Outcome]] = [[] for _ in range(load.clients)]
    with raw_channel(load.url) as channel:
        infer = raw_infer(channel)
        infer(load.request, timeout=load.timeout_s)
        threads = [threading.Thread(target=_client, args=(infer, load, stopping, mine)) for mine in outcomes]
        begin_ns, begin_cpu_ns = time.monotonic_ns(), time.process_time_ns()
        for thread in threads:
            thread.start()
        pipe.send("running")
        pipe.recv()
        stopping.set()
        for thread in threads:
            thread.join()
        elapsed_ns, cpu_ns = time.monotonic_ns() - begin_ns, time.process_time_ns() - begin_cpu_ns
    merged = sorted((o for mine in outcomes for o in mine), key=lambda outcome: outcome.end_ns)
    pipe.send(LoadResult(merged, cpu_ns, elapsed_ns))


def _client(
    infer: "grpc.UnaryUnaryMultiCallable[bytes, bytes]", load: Load, stopping: threading.Event, outcomes: list[Outcome]
) -> None:
    """Send one request after the other. Answers equal to the last right one need no second look."""
    known = b""
    while not stopping.is_set():
        begin_ns = time.monotonic_ns()
        try:
            response = infer(load.request, timeout=load.timeout_s)
        except grpc.RpcError as error:
            outcomes.append(Outcome(begin_ns, time.monotonic_ns(), error.code().name))
            stopping.wait(PAUSE_AFTER_FAILURE_S)
            continue
        end_ns = time.monotonic_ns()
        right = response == known or is_right(response, load.expected)
        known = response if right else known
        outcomes.append(Outcome(begin_ns, end_ns, RIGHT if right else WRONG))
        if load.pause_s:
            stopping.wait(load.pause_s)
