"""The front end's side of tracing: picks requests, and sends what is known of them to the exporter's process.

A request pays for one look at `active` while nobody traces. One that is picked is put into a queue; a thread empties
that a few times a second. Nothing ever waits for the exporter: what it does not take is dropped and counted.
"""

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence

from gangway.executor.slots import SlotOutcome
from gangway.server.calls import Contents
from gangway.server.counting_pool import NO_THREAD
from gangway.server.ensemble.spans import StepSpan
from gangway.server.errors import RequestError, unavailable
from gangway.server.plan import Plan
from gangway.server.tracing.config import TraceConfig
from gangway.server.tracing.sampled import (
    MAX_TENSORS_BYTES,
    Instants,
    Parent,
    Sampled,
    front_end_of,
    parent_of,
    small_copies,
)
from gangway.server.tracing.settings import Sampler, TraceOverrides, TraceSettings

MAX_QUEUED = 4096
PERIOD_SECONDS = 0.05
IDLE_PERIOD_SECONDS = 1.0  # while nobody traces (any more)
PACKET_BYTES = 48 * 1024
REPORT_SECONDS = 60.0
_log = logging.getLogger(__name__)


class Tracer:
    """`active` says whether any request may be traced, `wants_tensors` whether some are with their tensors.

    `exporter`: a SOCK_SEQPACKET socket; None: traces are lost.
    """

    def __init__(self, config: TraceConfig, exporter: socket.socket | None = None) -> None:
        self.active = self.wants_tensors = False
        self.settings = TraceSettings(config)
        self._exporter = exporter
        self._queue: deque[Sampled] = deque()
        self._unsent: tuple[bytes, int] | None = None  # a packet that there was no room for, and its traces
        self._sending = threading.Lock()
        self._activated = threading.Event()
        self._thread: threading.Thread | None = None
        self._dropped = 0
        self._reported_seconds = -REPORT_SECONDS
        self._settle()

    # -- settings

    def override(self, new: TraceOverrides, restarts: bool = True) -> None:
        """Change settings that have been checked; see TraceSettings. Raises RequestError if no thread can be had."""
        if new.level:
            self._have_thread()
        self.settings.override(new, restarts)
        self._settle()

    def _settle(self) -> None:
        self.active, self.wants_tensors = self.settings.active, self.settings.wants_tensors
        if not self.active:
            self._activated.clear()
            return
        self._have_thread()
        self._activated.set()

    def _have_thread(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="traces", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                unavailable(NO_THREAD)
            self._thread = thread

    # -- requests, by any thread

    def answered(
        self,
        plan: Plan,
        request_id: bytes,
        call: object,
        instants: Instants,
        outcome: SlotOutcome,
        contents: Contents,
        response: bytes,
        steps: Sequence[StepSpan] = (),
    ) -> None:
        """Note a request that was answered, if it is one to trace. `steps`: of an ensemble."""
        picked, sampler, parent = self._pick(plan, call)
        if picked:
            inputs = small_copies(contents) if sampler.tensors else None
            outputs = response if sampler.tensors and len(response) <= MAX_TENSORS_BYTES else None
            front_end = front_end_of(call)
            self._put(
                Sampled(plan, request_id, front_end, parent, sampler, instants, outcome, None, inputs, outputs, steps)
            )

    def not_executed(
        self, plan: Plan, request_id: bytes, call: object, arrival_ns: int, error: RequestError | None = None
    ) -> None:
        """Note a request that failed, or whose answer was in the cache, if it is one to trace."""
        picked, sampler, parent = self._pick(plan, call)
        if picked:
            instants = Instants(arrival_ns, 0, 0, time.monotonic_ns())
            front_end = front_end_of(call)
            self._put(Sampled(plan, request_id, front_end, parent, sampler, instants, None, error, None, None))

    def _pick(self, plan: Plan, call: object) -> tuple[bool, Sampler, Parent | None]:
        """Say whether to trace. Who came with a context has decided that already; others are sampled."""
        sampler = self.settings.sampler(plan.model.name)
        if sampler.off:
            return False, sampler, None
        parent = parent_of(call) if self.settings.propagates else None
        return (sampler.take() if parent is None else parent.sampled), sampler, parent

    def _put(self, sampled: Sampled) -> None:
        if len(self._queue) < MAX_QUEUED:
            self._queue.append(sampled)
        else:
            self._dropped += 1

    # -- the way out

    def finish(self, timeout_seconds: float) -> None:
        """Send what is left, for so long."""
        end = time.monotonic() + timeout_seconds
        while not self._flush() and time.monotonic() < end:
            time.sleep(0.01)
        self._dropped += len(self._queue) + (self._unsent[1] if self._unsent else 0)
        self._report(now=True)

    def _run(self) -> None:
        while True:
            self._activated.wait(IDLE_PERIOD_SECONDS)
            time.sleep(PERIOD_SECONDS)
            self._flush()
            self._report()

    def _flush(self) -> bool:
        """Send what there is room for; say whether that was all."""
        with self._sending:
            while self._queue or self._unsent:
                packet, traces = self._unsent or self._packed()
                self._unsent = None
                try:
                    if self._exporter is None:
                        raise ConnectionError
                    self._exporter.send(packet, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    self._unsent = packet, traces
                    return False
                except OSError:
                    self._dropped += traces
            return True

    def _packed(self) -> tuple[bytes, int]:
        parts: list[str] = []
        size = 0
        while self._queue and size < PACKET_BYTES:
            parts.append(self._queue.popleft().record().encode())
            size += len(parts[-1])
        return f"[{','.join(parts)}]".encode(), len(parts)

    def _report(self, now: bool = False) -> None:
        seconds = time.monotonic()
        if self._dropped and (now or seconds - self._reported_seconds >= REPORT_SECONDS):
            dropped, self._dropped, self._reported_seconds = self._dropped, 0, seconds
            _log.warning("%d traces were dropped: requests were traced faster than traces are written", dropped)
