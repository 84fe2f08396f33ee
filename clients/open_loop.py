"""Open-loop load: requests are sent at scheduled times, however slowly answers come.

Latency counts from the scheduled arrival, so neither a late sender nor a stalled server hides queueing.
"""

import gc
import os
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field

import numpy as np

from gangway.clients.channel import CallResult, Channel, Connect
from gangway.clients.errors import UnreachableError
from gangway.clients.grpcio_channel import GrpcioChannel
from gangway.clients.raw_channel import RawChannel
from gangway.clients.tls import Tls
from gangway.workload.arrivals import Arrivals, Floats
from gangway.workload.outcomes import OK, Outcomes

RAW, GRPCIO = "raw", "grpcio"
CLIENTS: Mapping[str, Connect] = {RAW: RawChannel, GRPCIO: GrpcioChannel}  # docs/reference/perf.md: which one when
START_DELAY_S = 0.02  # from the connection to the first scheduled moment
MAX_OUTSTANDING = 4096
NOT_SENT = "NOT_SENT"  # the status of requests beyond the limit of outstanding ones
TIMED_OUT = "DEADLINE_EXCEEDED"
LOST = "UNAVAILABLE"
RECONNECT_S = 0.1  # between attempts
MAX_RECONNECT_S = 1.0  # that connecting again may take
MAX_UNANSWERED = 10  # requests in a row, before the run is aborted


@dataclass(frozen=True)
class OpenLoopRun:
    """How the requests ended, and how well the sender kept to the schedule.

    `lag_us` [Q]: how much later than scheduled a request left. `cpu_s`: of this process during the run. `messages`:
    the first error of each status in the server's words. `ended_by`: what has ended the run early; queries that had not
    ended are missing then.
    """

    outcomes: Outcomes
    lag_us: Floats
    cpu_s: float
    seconds: float
    messages: Mapping[str, str] = field(default_factory=dict)
    ended_by: KeyboardInterrupt | UnreachableError | None = None


@dataclass(frozen=True)
class LoadProgress:
    """How far a run is: seconds since the first arrival, of all; queries by what has become of them."""

    seconds: float
    of_seconds: float
    answered: int
    waiting: int
    errors: int


Watch = Callable[[Callable[[], LoadProgress]], AbstractContextManager[None]]


def run_open_loop(
    url: str,
    requests: Mapping[str, bytes],
    arrivals: Arrivals,
    timeout_s: float = 30,
    tls: Tls | None = None,
    client: str = RAW,
) -> Outcomes:
    """Send serialised ModelInfer requests, by model in the order that `arrivals` indexes; return how each ended.

    A request without an answer after `timeout_s` counts as DEADLINE_EXCEEDED. Raises UnreachableError if no server
    speaks HTTP/2 at `url`, or if ten requests time out without any answer between them. `client`: one of CLIENTS.
    """
    return drive(url, requests, arrivals, timeout_s, tls=tls, client=client).outcomes


def drive(
    url: str,
    requests: Mapping[str, bytes],
    arrivals: Arrivals,
    timeout_s: float = 30,
    max_outstanding: int = MAX_OUTSTANDING,
    tls: Tls | None = None,
    client: str = RAW,
    watch: Watch | None = None,
) -> OpenLoopRun:
    """Do the same as `run_open_loop`, and report the sender, too. At most `max_outstanding` wait at once (NOT_SENT).

    `watch`: holds while the run lasts, and may ask how far it is. KeyboardInterrupt and UnreachableError then end the
    run, which returns what it has, unless no query has ended.
    """

    def connect(connect_timeout_s: float) -> Channel:
        return CLIENTS[client](url, list(requests.values()), timeout_s, connect_timeout_s, tls)

    loop = _Loop(url, connect, arrivals, timeout_s, max_outstanding)
    with _garbage_collection_off(), real_time_priority():
        begin_cpu_s, begin_s = time.process_time(), time.monotonic()
        ended_by: KeyboardInterrupt | UnreachableError | None = None
        try:
            with watch(loop.progress) if watch is not None else nullcontext():
                loop.run()
        except (KeyboardInterrupt, UnreachableError) as error:
            if watch is None or all(status < 0 for status in loop.status):
                raise
            ended_by = error
        cpu_s, seconds = time.process_time() - begin_cpu_s, time.monotonic() - begin_s
    statuses = list(loop.statuses)
    scheduled_ns = np.array(loop.due_ns, dtype=np.float64)
    outcomes = Outcomes(
        tuple(requests),
        arrivals.models,
        arrivals.times_us,
        (np.array(loop.ended_ns, dtype=np.float64) - scheduled_ns) / 1000,
        np.array(loop.status, dtype=np.int64),
        tuple(statuses),
    )
    lag_us = (np.array(loop.sent_ns, dtype=np.float64) - scheduled_ns) / 1000
    if ended_by is not None:
        ended = outcomes.status >= 0
        outcomes, lag_us = outcomes.select(ended), lag_us[ended]
    return OpenLoopRun(outcomes, lag_us, cpu_s, seconds, loop.messages, ended_by)


@contextmanager
def real_time_priority() -> Iterator[None]:
    """Give this thread a real-time priority, where the system allows it (root, CAP_SYS_NICE).

    The sender needs the core for microseconds, then sleeps: as if the client had a machine of its own. A negative nice
    value is not enough where all cores are busy.
    """
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    try:
        yield
    finally:
        with suppress(PermissionError):
            os.sched_setscheduler(0, policy, parameters)


@contextmanager
def _garbage_collection_off() -> Iterator[None]:
    """Switch the collection of cyclic garbage off: the loop makes none, and a collection delays requests."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Loop:
    """One run. Lists are indexed by query; times are CLOCK_MONOTONIC nanoseconds."""

    def __init__(
        self, url: str, connect: Callable[[float], Channel], arrivals: Arrivals, timeout_s: float, max_outstanding: int
    ) -> None:
        self._url = url
        self._connect = connect
        self._models: list[int] = arrivals.models.tolist()
        self._timeout_ns = int(timeout_s * 1e9)
        self._max_outstanding = max_outstanding
        self._offsets_ns = (arrivals.times_us * 1000).astype(np.int64).tolist()
        self.due_ns: list[int] = []
        self._sent = self._answered = self._errors = 0  # so far
        self.sent_ns = [0] * len(arrivals)
        self.ended_ns = [0] * len(arrivals)
        self.status = [-1] * len(arrivals)
        self.statuses = {OK: 0}
        self.messages: dict[str, str] = {}
        self._channel: Channel | None = None
        self._outstanding = 0
        self._oldest = 0  # no query before it is outstanding
        self._unanswered = 0  # requests that have timed out since the last answer
        self._retry_ns = 0

    def progress(self) -> LoadProgress:
        """Return how far the run is. Any thread may ask."""
        now_s, due_ns = time.monotonic_ns() / 1e9, self.due_ns or [0]
        seconds = min(max(now_s - due_ns[0] / 1e9, 0), self._offsets_ns[-1] / 1e9) if self.due_ns else 0.0
        waiting = self._sent - self._answered - self._errors
        return LoadProgress(seconds, self._offsets_ns[-1] / 1e9, self._answered, waiting, self._errors)

    def run(self) -> None:
        count, sent = len(self._models), 0
        self._channel = self._connect(self._timeout_ns / 1e9)
        begin_ns = time.monotonic_ns() + int(START_DELAY_S * 1e9)
        self.due_ns = [begin_ns + offset for offset in self._offsets_ns]
        due_ns = self.due_ns
        try:
            while sent < count or self._outstanding:
                now_ns = time.monotonic_ns()
                while sent < count and due_ns[sent] <= now_ns:
                    self._send(sent)
                    sent += 1
                    self._sent = sent
                    now_ns = time.monotonic_ns()
                self._expire(now_ns, sent)
                if sent < count or self._outstanding:
                    self._wait(due_ns[sent] if sent < count else None, now_ns)
        finally:
            self._close()

    def _send(self, query: int) -> None:
        now_ns = self.sent_ns[query] = time.monotonic_ns()
        if self._outstanding >= self._max_outstanding:
            self._record(query, NOT_SENT, f"{self._max_outstanding} requests were outstanding", now_ns)
            return
        channel = self._usable_channel(now_ns)
        if channel is None:
            self._record(query, LOST, "no connection", now_ns)
            return
        self._outstanding += 1
        try:
            channel.start(query, self._models[query])
        except OSError as error:
            self._fail_outstanding(str(error))

    def _usable_channel(self, now_ns: int) -> Channel | None:
        """Return the connection; connect again if it is lost, at most every RECONNECT_S. None: there is none."""
        if self._channel is not None and not self._channel.usable and not self._outstanding:
            self._close()
        if self._channel is None and now_ns >= self._retry_ns:
            self._retry_ns = now_ns + int(RECONNECT_S * 1e9)
            try:
                self._channel = self._connect(MAX_RECONNECT_S)
            except UnreachableError:
                return None
        return self._channel if self._channel is not None and self._channel.usable else None

    def _wait(self, until_ns: int | None, now_ns: int) -> None:
        """Wait for the next arrival or an answer. `select` has a resolution of microseconds, poll of milliseconds."""
        ends_ns = [until_ns] if until_ns is not None else []
        if self._outstanding:
            ends_ns.append(self.sent_ns[self._oldest] + self._timeout_ns)
        wait_s = max(min(ends_ns) - now_ns, 0) / 1e9
        channel = self._channel
        if channel is None:
            time.sleep(wait_s)
            return
        readable, writable, _ = select.select([channel], [channel] if channel.wants_write else [], [], wait_s)
        try:
            if writable:
                channel.flush()
            if readable:
                self._record_all(channel.receive())
        except OSError as error:
            self._fail_outstanding(str(error))

    def _record_all(self, ended: Sequence[CallResult]) -> None:
        for query, status, message, ended_ns in ended:
            if status == TIMED_OUT and ended_ns - self.sent_ns[query] >= self._timeout_ns:
                self._count_unanswered()  # by a timer of the client, which has come before ours
            else:
                self._unanswered = 0
            self._outstanding -= 1
            self._record(query, status, message, ended_ns)

    def _expire(self, now_ns: int, sent: int) -> None:
        """Cancel requests that have timed out. Raises UnreachableError if the server answers none."""
        if not self._outstanding:
            return
        while self._oldest < sent and (
            self.status[self._oldest] >= 0 or now_ns - self.sent_ns[self._oldest] >= self._timeout_ns
        ):
            if self.status[self._oldest] < 0:
                self._time_out(self._oldest, now_ns)
            self._oldest += 1

    def _time_out(self, query: int, now_ns: int) -> None:
        self._count_unanswered()
        self._outstanding -= 1
        self._record(query, TIMED_OUT, f"no answer within {self._timeout_ns / 1e9:g} s", now_ns)
        assert self._channel is not None
        try:
            self._channel.cancel(query)
        except OSError as error:
            self._fail_outstanding(str(error))

    def _count_unanswered(self) -> None:
        self._unanswered += 1
        if self._unanswered >= MAX_UNANSWERED:
            seconds = self._timeout_ns / 1e9
            raise UnreachableError(f"{self._url} answered nothing for {seconds:g} s; {self._outstanding} requests wait")

    def _fail_outstanding(self, why: str) -> None:
        """Record all outstanding requests as unavailable: their connection is lost."""
        self._close()
        now_ns = time.monotonic_ns()
        for query in range(self._oldest, len(self.status)):
            if self.status[query] < 0 and self.sent_ns[query]:
                self._record(query, LOST, f"connection lost: {why}", now_ns)
        self._outstanding = 0

    def _close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _record(self, query: int, status: str, message: str, now_ns: int) -> None:
        self.status[query] = self.statuses.setdefault(status, len(self.statuses))
        self.ended_ns[query] = now_ns
        if status == OK:
            self._answered += 1
        else:
            self._errors += 1
            self.messages.setdefault(status, message)
