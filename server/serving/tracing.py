"""The front end's side of tracing: picks requests, and sends what is known of them to the exporter's process.

A request reads `active` once while no trace is wanted. One that is picked is put into a queue; a thread empties
that a few times a second. Nothing ever waits for the exporter: what it does not take is dropped and counted.
"""

import logging
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from gangway.executor.slots import SlotOutcome
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import RequestError, unavailable
from gangway.server.models.served import ServedModel
from gangway.server.models.tensors import Shapes
from gangway.server.requests.codecs import PRECISIONS_USED
from gangway.server.requests.regions import Contents
from gangway.server.serving.call import Call
from gangway.server.threads import NO_THREAD
from gangway.server.tracing.record import StepRecord, TensorRecord, TraceRecord
from gangway.server.tracing.settings import Sampler, TraceConfig, TraceOverrides, TraceSettings

_log = logging.getLogger(__name__)

MAX_TENSORS_BYTES = 16 * 1024  # of all inputs, and of the response: larger ones are left out
MAX_HEADER_CHARACTERS = 512
MAX_TEXT_CHARACTERS = 256
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})(-.*)?")


class Parent(NamedTuple):
    """The context that a request came with: W3C's headers, and whether its sender wants it traced."""

    traceparent: str
    tracestate: str
    sampled: bool


class Traced(Protocol):
    """A request that is answered, or not, as `ClientRequest` has it. Instants are CLOCK_MONOTONIC in nanoseconds."""

    model: ServedModel
    shapes: Shapes
    request_id: bytes
    call: Call
    begin_ns: int
    submitted_ns: int
    finished_ns: int
    end_ns: int

    @property
    def outcome(self) -> SlotOutcome | None:
        """How it was computed; None: it was not."""
        ...

    @property
    def target_us(self) -> float:
        """The latency target, 0: none."""
        ...


class TracedStep(Protocol):
    """A step of an ensemble, as `ModelRun` has it."""

    model: ServedModel
    begin_ns: int
    submitted_ns: int
    end_ns: int

    @property
    def start_ns(self) -> int:
        """When its first task began."""
        ...

    @property
    def computed_ns(self) -> int:
        """When its last task ended."""
        ...


class Sampled(NamedTuple):
    """A request that was picked, as it waits for the thread that sends it to the exporter.

    `outcome` None: it failed with `error`, or its answer was in the cache.
    """

    model: ServedModel
    shapes: Shapes
    target_us: float
    request_id: bytes
    front_end: str
    parent: Parent | None
    sampler: Sampler
    arrival_ns: int
    submitted_ns: int
    end_ns: int
    outcome: SlotOutcome | None = None
    error: RequestError | None = None
    inputs: tuple[bytes, ...] | None = None  # None: not wanted, or too large
    response: bytes | None = None
    steps: Sequence[TracedStep] = ()  # of an ensemble
    finished_ns: int = 0

    def record(self) -> TraceRecord:
        """Return what the exporter gets."""
        outcome, error = self.outcome, self.error
        parent = self.parent or Parent("", "", False)
        start_ns = self.arrival_ns + round(outcome.queue_us * 1000) if outcome else 0
        return TraceRecord(
            model=self.model.name,
            version=self.model.version,
            request_id=self.request_id[:MAX_TEXT_CHARACTERS].decode(errors="replace"),
            front_end=self.front_end,
            parent=parent.traceparent,
            tracestate=parent.tracestate,
            arrival_ns=self.arrival_ns,
            submitted_ns=self.submitted_ns,
            start_ns=start_ns,
            computed_ns=start_ns + round(outcome.compute_us * 1000) if outcome else 0,
            end_ns=self.end_ns,
            status=error.code.name if error else "OK",
            message=error.message[:MAX_TEXT_CHARACTERS] if error else "",
            rows=self.shapes.rows,
            batch_rows=outcome.batch_rows if outcome else 0,
            target_us=self.target_us,
            ranks=outcome.ranks if outcome else 0,
            attempts=outcome.attempts if outcome else 0,
            blocks=outcome.counts.blocks if outcome else 0,
            conflicts=outcome.counts.conflicts if outcome else 0,
            preemptions=outcome.counts.preemptions if outcome else 0,
            versions=outcome.counts.versions if outcome else 0,
            log_frequency=self.sampler.setting.log_frequency,
            timestamps="TIMESTAMPS" in self.sampler.setting.level,
            tensors=self._tensors(),
            steps=[_step_record(step) for step in self.steps],
            seen_ns=outcome.seen_ns if outcome else 0,
            started_ns=outcome.started_ns if outcome else 0,
            finished_ns=self.finished_ns,
            precision=PRECISIONS_USED[outcome.counts.bf16] if outcome and self.model.chooses_precision else "",
        )

    def _tensors(self) -> list[TensorRecord]:
        tensors = []
        if self.inputs is not None:
            for (tensor, shape), data in zip(self.shapes.inputs, self.inputs, strict=False):
                tensors.append(TensorRecord.of("TENSOR_QUEUE_INPUT", tensor.name, tensor.datatype, shape, data))
        if self.response is not None:
            message = pb.ModelInferResponse.FromString(self.response)
            if len(message.outputs) == len(message.raw_output_contents):
                for output, data in zip(message.outputs, message.raw_output_contents, strict=True):
                    activity = "TENSOR_BACKEND_OUTPUT"
                    tensors.append(TensorRecord.of(activity, output.name, output.datatype, output.shape, data))
        return tensors


def _step_record(step: TracedStep) -> StepRecord:
    instants = step.begin_ns, step.submitted_ns, step.start_ns, step.computed_ns, step.end_ns
    return StepRecord(step.model.name, step.model.version, *instants)


def _known(request: Traced, sampler: Sampler, parent: Parent | None) -> Sampled:
    return Sampled(
        request.model,
        request.shapes,
        request.target_us,
        request.request_id,
        request.call.front_end,
        parent,
        sampler,
        request.begin_ns,
        request.submitted_ns,
        request.end_ns,
    )


def parent_of(call: Call) -> Parent | None:
    """Return the context that came with a call; None without one, or if it makes no sense (W3C: ignore it then)."""
    traceparent = tracestate = ""
    for key, value in call.invocation_metadata() or ():
        if isinstance(value, bytes):
            continue
        if key == "traceparent":
            traceparent = value
        elif key == "tracestate" and len(value) <= MAX_HEADER_CHARACTERS:
            tracestate = value
    if not traceparent or len(traceparent) > MAX_HEADER_CHARACTERS:
        return None
    found = _TRACEPARENT.fullmatch(traceparent)
    return Parent(traceparent, tracestate, bool(int(found[1], 16) & 1)) if found else None


def small_copies(contents: Contents) -> tuple[bytes, ...] | None:
    """Return copies of a request's inputs; None if they are too large together, or in the client's shared memory."""
    held = [content for content in contents if isinstance(content, bytes | memoryview)]
    if len(held) < len(contents) or sum(map(len, held)) > MAX_TENSORS_BYTES:
        return None
    return tuple(bytes(content) for content in held)


MAX_QUEUED = 4096
PERIOD_SECONDS = 0.05
IDLE_PERIOD_SECONDS = 1.0  # while no trace is wanted
PACKET_BYTES = 48 * 1024
REPORT_SECONDS = 60.0


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

    def answered(self, request: Traced, contents: Contents, response: bytes, steps: Sequence[TracedStep] = ()) -> None:
        """Note a request that was answered, if it is one to trace. `steps`: of an ensemble."""
        picked, sampler, parent = self._pick(request)
        if picked:
            inputs = small_copies(contents) if sampler.tensors else None
            outputs = response if sampler.tensors and len(response) <= MAX_TENSORS_BYTES else None
            known = _known(request, sampler, parent)
            self._put(
                known._replace(
                    outcome=request.outcome,
                    inputs=inputs,
                    response=outputs,
                    steps=steps,
                    finished_ns=request.finished_ns,
                )
            )

    def not_executed(self, request: Traced, error: RequestError | None = None) -> None:
        """Note a request that failed, or whose answer was in the cache, if it is one to trace."""
        picked, sampler, parent = self._pick(request)
        if picked:
            known = _known(request, sampler, parent)
            self._put(known._replace(submitted_ns=0, end_ns=time.monotonic_ns(), error=error))

    def _pick(self, request: Traced) -> tuple[bool, Sampler, Parent | None]:
        """Say whether to trace. A client that sends a trace context decides for itself; other requests are sampled."""
        sampler = self.settings.sampler(request.model.name)
        if sampler.off:
            return False, sampler, None
        parent = parent_of(request.call) if self.settings.propagates else None
        return (sampler.take() if parent is None else parent.sampled), sampler, parent

    def _put(self, sampled: Sampled) -> None:
        if len(self._queue) < MAX_QUEUED:
            self._queue.append(sampled)
        else:
            self._dropped += 1

    # -- the way out

    def finish(self, timeout_seconds: float) -> None:
        """Send what is left, until the timeout."""
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
            _log.warning(
                "%d traces were dropped: requests are traced faster than traces are written; raise trace_rate", dropped
            )
