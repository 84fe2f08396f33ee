"""The live side of `benchmarks.simulator.replay`: lone requests, the trace, and who used the CPU meanwhile."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

import numpy as np

from gangway.clients.channel import Channel, call_blocking
from gangway.clients.connection import ServerConnection
from gangway.clients.open_loop import drive, real_time_priority
from gangway.clients.perf.prepare import prepare_requests
from gangway.clients.raw_channel import RawChannel
from gangway.scheduler.profiles import ModelProfile
from gangway.workload.arrivals import Arrivals
from gangway.workload.outcomes import Outcomes
from testing.live_server import LiveServer
from testing.processes import core_times, process_cpu_ns

LONE_REQUESTS = {"mobilenetv2": 15, "resnet50": 9}
TIMEOUT_S = 30.0  # of a lone request


@dataclass(frozen=True)
class Lone:
    """What a request takes when it is alone: computing, and the way to the scheduler and back."""

    compute_us: float
    way_us: float


@dataclass(frozen=True)
class LiveRun:
    """One run of the trace. `overhead_us`: CPU per query that is not the workers'.

    `others`: share of the cores that other processes used. `drift`: by how much lone requests before and after differ.
    """

    latency_us: np.ndarray
    overhead_us: float
    others: float
    drift: float = 0.0


class Replayed:
    """A server, and requests for it."""

    def __init__(self, server: LiveServer, connection: ServerConnection, names: Sequence[str]) -> None:
        self._server = server
        self._connection = connection
        self._requests = prepare_requests(connection, names, "random", 0)

    def all_lone(self, models: Sequence[ModelProfile]) -> dict[str, Lone]:
        """Measure lone requests of every model."""
        return {model.name: self.lone(model.name, 1.5 * model.isolated_us) for model in models}

    def lone(self, name: str, gap_us: float) -> Lone:
        """Send some requests, each a while after the answer to the one before.

        Medians of single requests: on a virtual machine one in ten may take twice the time, with nobody else at work.
        """
        request = self._requests[name]
        with closing(RawChannel(self._server.url, [request], TIMEOUT_S, TIMEOUT_S)) as channel, real_time_priority():
            self._one(channel, name)  # of a new connection
            seen = []
            for _ in range(LONE_REQUESTS[name]):
                time.sleep(gap_us / 1e6)
                seen.append(self._one(channel, name))
        return Lone(float(np.median([one.compute_us for one in seen])), float(np.median([one.way_us for one in seen])))

    def _one(self, channel: Channel, name: str) -> Lone:
        before_ns = self._compute_ns(name)
        begin_ns = time.monotonic_ns()
        call_blocking(channel, 0, 0, name, TIMEOUT_S)
        latency_ns = time.monotonic_ns() - begin_ns
        compute_ns = self._compute_ns(name) - before_ns
        return Lone(compute_ns / 1000, (latency_ns - compute_ns) / 1000)

    def replay(self, arrivals: Arrivals) -> tuple[Outcomes, LiveRun]:
        """Send the trace. Raises RuntimeError unless every query is answered."""
        meter = self.meter()
        run = drive(self._server.url, self._requests, arrivals)
        serving_s, others = meter.serving_s(), meter.others()
        if not run.outcomes.answered.all():
            raise RuntimeError(f"not every query was answered: {run.messages}")
        return run.outcomes, LiveRun(run.outcomes.latency_us, (serving_s + run.cpu_s) * 1e6 / len(arrivals), others)

    def meter(self) -> "Meter":
        """Begin to measure who uses the CPU."""
        return Meter(self._server.pids())

    def _compute_ns(self, name: str) -> int:
        return int(self._connection.model_statistics(name).model_stats[0].inference_stats.compute_infer.ns)


class Meter:
    """The CPU that has been used since this was made: by front end and scheduler, by others."""

    def __init__(self, pids: Mapping[str, Sequence[int]]) -> None:
        self._serving = _used_s([*pids["front end"], *pids["scheduler"]])
        self._ours = _used_s([os.getpid(), *(pid for same in pids.values() for pid in same)])
        self._busy_s, self._begin_s = core_times().busy_s, time.monotonic()

    def serving_s(self) -> float:
        """Return the seconds of front end and scheduler."""
        return _since(self._serving)

    def others(self) -> float:
        """Return the share of the cores that other processes used."""
        seconds = time.monotonic() - self._begin_s
        return (core_times().busy_s - self._busy_s - _since(self._ours)) / (seconds * (os.cpu_count() or 1))


def _used_s(pids: Sequence[int]) -> dict[int, float]:
    """Return the CPU of each process that is still there."""
    used = {}
    for pid in pids:
        with suppress(OSError):
            used[pid] = process_cpu_ns(pid) / 1e9
    return used


def _since(before: Mapping[int, float]) -> float:
    """Return the CPU that these processes have used since."""
    now = _used_s(list(before))
    return sum(now[pid] - before[pid] for pid in now)
