"""The server scenario of MLPerf's load generator in place of ours, with its verdict. Imports mlcommons-loadgen.

Its queries are Poisson arrivals of samples; here a sample stands for a model, and the library has as many samples of a
model as its share of the mix. The load generator has one target for all samples: the widest of the mix.
"""

import os
import re
import select
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlperf_loadgen as loadgen
import numpy as np

from gangway.clients.channel import ready_of
from gangway.clients.errors import ClientError, UnreachableError
from gangway.clients.open_loop import CLIENTS, OpenLoopRun
from gangway.clients.perf.measure import LoadRun, Session
from gangway.workload.outcomes import OK, Outcomes
from gangway.workload.qos import WorkloadError

SAMPLES = 1000
VALID = "Result is : VALID"


def run_server_scenario(session: Session, rate_per_s: float, percentile: float) -> tuple[LoadRun, dict[str, Any]]:
    """Run loadgen's server scenario; return the run as we saw it, and its verdict: `valid` and lines of its summary.

    Our latencies count from the moment when loadgen issued a query; its own from its schedule. Raises ClientError.
    """
    targets = [us for us in next(iter(session.workload.targets_us.values())) if us is not None]
    if not targets:
        raise WorkloadError("--scenario mlperf-server needs a target: give --qos")
    samples = samples_of(session.workload.mix.shares, SAMPLES)
    with tempfile.TemporaryDirectory() as folder, _Sender(session, samples) as sender:
        begin_cpu_s, begin_s = time.process_time(), time.monotonic()
        _start_test(sender, _settings(session, rate_per_s, max(targets), percentile), Path(folder))
        cpu_s, seconds = time.process_time() - begin_cpu_s, time.monotonic() - begin_s
        summary = (Path(folder) / "mlperf_log_summary.txt").read_text()
        outcomes, messages = sender.outcomes()
    load = OpenLoopRun(outcomes, np.empty(0), cpu_s, seconds, messages)  # loadgen does not report its lag
    run = LoadRun(rate_per_s, session.seed, load, outcomes, session.summarise(outcomes), {})
    session.runs.append(run)
    if sender.failure:
        raise UnreachableError(sender.failure)
    return run, {"valid": VALID in summary, "summary": _lines(summary), "target_us": max(targets)}


def samples_of(shares: Sequence[float], count: int) -> list[int]:
    """Return which model each of `count` samples stands for: by shares, at least one each."""
    bounds = np.rint(np.cumsum(shares) * (count - len(shares))).astype(int)
    counts = np.diff(bounds, prepend=0) + 1
    return np.repeat(np.arange(len(shares)), counts).tolist()


def _settings(session: Session, rate_per_s: float, target_us: float, percentile: float) -> Any:
    settings = loadgen.TestSettings()
    settings.scenario = loadgen.TestScenario.Server
    settings.mode = loadgen.TestMode.PerformanceOnly
    settings.server_target_qps = rate_per_s
    settings.server_target_latency_ns = round(target_us * 1000)
    settings.server_target_latency_percentile = percentile
    settings.min_duration_ms = 0 if session.length.queries else round(session.length.seconds * 1000)
    settings.min_query_count = session.length.queries or 1
    settings.max_query_count = session.length.queries or 0
    for name in ("qsl_rng_seed", "sample_index_rng_seed", "schedule_rng_seed"):
        setattr(settings, name, session.seed + 1)
    return settings


def _start_test(sender: "_Sender", settings: Any, folder: Path) -> None:
    logs = loadgen.LogSettings()
    logs.log_output.outdir = str(folder)
    logs.log_output.copy_summary_to_stdout = False
    sut = loadgen.ConstructSUT(sender.issue, lambda: None)
    library = loadgen.ConstructQSL(SAMPLES, SAMPLES, lambda indices: None, lambda indices: None)
    try:
        loadgen.StartTestWithLogSettings(sut, library, settings, logs)
    finally:
        loadgen.DestroyQSL(library)
        loadgen.DestroySUT(sut)


def _lines(summary: str) -> list[str]:
    """Return the lines between the title and the list of settings."""
    head = summary.split("Test Parameters Used", maxsplit=1)[0]
    return [re.sub(r"\s*:\s*", ": ", line.strip()) for line in head.splitlines() if re.search(r"\S\s*:\s*\S", line)]


class _Sender:
    """A thread that sends the queries that loadgen issues, and reports their completion to it."""

    def __init__(self, session: Session, samples: Sequence[int]) -> None:
        self._names = tuple(session.requests)
        self._samples = samples
        self._timeout_s = session.timeout_s
        requests = list(session.requests.values())
        self._channel = CLIENTS[session.client](
            session.url, requests, session.timeout_s, session.timeout_s, session.tls
        )
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._issued: deque[tuple[int, int, float]] = deque()  # loadgen's id, model, time
        self._waiting: dict[int, tuple[int, int, float]] = {}  # by call
        self._done: list[tuple[int, float, float, str]] = []  # model, issued, ended, status
        self._messages: dict[str, str] = {}
        self._stopping = False
        self.failure = ""
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "_Sender":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping = True
        os.eventfd_write(self._wakeup, 1)
        self._thread.join()
        self._channel.close()
        os.close(self._wakeup)

    def issue(self, samples: Sequence[Any]) -> None:
        """Take queries from loadgen, in its thread."""
        now_s = time.monotonic()
        self._issued.extend((sample.id, self._samples[sample.index], now_s) for sample in samples)
        os.eventfd_write(self._wakeup, 1)

    def outcomes(self) -> tuple[Outcomes, Mapping[str, str]]:
        """Return how all queries ended, and the first message of each error. Raises ClientError if there are none."""
        if not self._done:
            raise UnreachableError(self.failure) if self.failure else ClientError("loadgen issued no query")
        done = sorted(self._done, key=lambda entry: entry[1])
        statuses = {OK: 0}
        status = [statuses.setdefault(entry[3], len(statuses)) for entry in done]
        issued_us = np.array([entry[1] for entry in done]) * 1e6
        latency_us = np.array([entry[2] for entry in done]) * 1e6 - issued_us
        models = np.array([entry[0] for entry in done], dtype=np.int64)
        return (
            Outcomes(self._names, models, issued_us - issued_us[0], latency_us, np.array(status), tuple(statuses)),
            self._messages,
        )

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._step()
        except OSError as error:
            self.failure = f"connection lost: {error}"
        except UnreachableError as error:
            self.failure = str(error)
        except Exception as error:
            self.failure = f"a fault of the load: {type(error).__name__}: {error}"
        while not self._stopping:  # loadgen waits for an answer to everything it issues
            self._answer_all("UNAVAILABLE")
            ready_of({self._wakeup: select.POLLIN}, None)
            self._clear_wakeup()

    def _step(self) -> None:
        channel = self._channel
        socket = channel.fileno()
        wanted = select.POLLIN | (select.POLLOUT if channel.wants_write else 0)
        ready = ready_of({socket: wanted, self._wakeup: select.POLLIN}, self._timeout_s)
        if not ready and self._waiting:
            raise UnreachableError(f"the server answered nothing for {self._timeout_s:g} s")
        if ready.get(socket, 0) & select.POLLOUT:
            channel.flush()
        if self._wakeup in ready:
            self._clear_wakeup()
        while self._issued:
            query = self._issued.popleft()
            call = len(self._done) + len(self._waiting)
            self._waiting[call] = query
            channel.start(call, query[1])
        if ready.get(socket, 0) & ~select.POLLOUT:
            for ended in channel.receive():
                if ended.status != OK:
                    self._messages.setdefault(ended.status, ended.message)
                self._complete(self._waiting.pop(ended.call), ended.status, ended.ended_ns)

    def _complete(self, query: tuple[int, int, float], status: str, ended_ns: int) -> None:
        identifier, model, issued_s = query
        self._done.append((model, issued_s, ended_ns / 1e9, status))
        loadgen.QuerySamplesComplete([loadgen.QuerySampleResponse(identifier, 0, 0)])

    def _answer_all(self, status: str) -> None:
        while self._waiting:
            self._complete(self._waiting.popitem()[1], status, time.monotonic_ns())
        while self._issued:
            self._complete(self._issued.popleft(), status, time.monotonic_ns())

    def _clear_wakeup(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wakeup)
