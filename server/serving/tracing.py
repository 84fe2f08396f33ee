"""The front end's side of tracing: picks requests, and sends what is known of them to the exporter's process.

A request reads `active` once while no trace is wanted. One that is picked is put into a queue; one of the loop's
threads empties that a few times a second. Nothing ever waits for the exporter: what it does not take is dropped and
counted.
"""

import logging
import re
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from gangway.executor.slots import SlotOutcome, SlotStatus
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import RequestError
from gangway.server.models.served import ServedModel
from gangway.server.models.tensors import Shapes
from gangway.server.requests.codecs import PRECISIONS_USED
from gangway.server.requests.regions import REGION, Contents
from gangway.server.serving.call import Call
from gangway.server.serving.inference.model_run import ModelRun
from gangway.server.serving.loop import ServingLoop
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


def record_of(
    request: Traced,
    setting: TraceConfig,
    parent: Parent | None,
    outcome: SlotOutcome | None = None,
    error: RequestError | None = None,
    tensors: Sequence[TensorRecord] = (),
    steps: Sequence[ModelRun] = (),
) -> TraceRecord:
    """Return what the exporter gets. `outcome` None: it failed with `error`, or its answer was in the cache."""
    known = outcome or SlotOutcome(SlotStatus.OK, 0, 0, 0, 0)
    start_ns = request.begin_ns + round(known.queue_us * 1000)
    return TraceRecord(
        model=request.model.name,
        version=request.model.version,
        request_id=request.request_id[:MAX_TEXT_CHARACTERS].decode(errors="replace"),
        front_end=request.call.front_end,
        parent=parent.traceparent if parent else "",
        tracestate=parent.tracestate if parent else "",
        arrival_ns=request.begin_ns,
        submitted_ns=request.submitted_ns if outcome else 0,
        start_ns=start_ns if outcome else 0,
        computed_ns=start_ns + round(known.compute_us * 1000) if outcome else 0,
        end_ns=request.end_ns if outcome else time.monotonic_ns(),
        status=error.code.name if error else "OK",
        message=error.message[:MAX_TEXT_CHARACTERS] if error else "",
        rows=request.shapes.rows,
        batch_rows=known.batch_rows,
        target_us=request.target_us,
        ranks=known.ranks,
        attempts=known.attempts,
        blocks=known.counts.blocks,
        conflicts=known.counts.conflicts,
        preemptions=known.counts.preemptions,
        versions=known.counts.versions,
        log_frequency=setting.log_frequency,
        timestamps="TIMESTAMPS" in setting.level,
        tensors=tuple(tensors),
        steps=tuple(map(_step_record, steps)),
        seen_ns=known.seen_ns,
        started_ns=known.started_ns,
        finished_ns=request.finished_ns if outcome else 0,
        precision=PRECISIONS_USED[known.counts.bf16] if outcome and request.model.chooses_precision else "",
    )


def _step_record(step: ModelRun) -> StepRecord:
    instants = step.begin_ns, step.submitted_ns, step.start_ns, step.computed_ns, step.end_ns
    return StepRecord(step.model.name, step.model.version, *instants)


def tensors_of(request: Traced, contents: Contents, response: bytes) -> list[TensorRecord]:
    """Return the inputs and outputs of a request, unless they are too large together, or in the client's memory."""
    tensors = []
    held = [bytes(content) for content in contents if isinstance(content, bytes | memoryview)]
    if len(held) == len(contents) and sum(map(len, held)) <= MAX_TENSORS_BYTES:
        for (tensor, shape), data in zip(request.shapes.inputs, held, strict=False):
            tensors.append(TensorRecord("TENSOR_QUEUE_INPUT", tensor.name, tensor.datatype, shape, data))
    if len(response) <= MAX_TENSORS_BYTES:
        message = pb.ModelInferResponse.FromString(response)
        if len(message.outputs) == len(message.raw_output_contents):
            for output, data in zip(message.outputs, message.raw_output_contents, strict=True):
                if REGION not in output.parameters:
                    place = output.name, output.datatype, tuple(output.shape)
                    tensors.append(TensorRecord("TENSOR_BACKEND_OUTPUT", *place, data))
    return tensors


def parent_of(call: Call) -> Parent | None:
    """Return the context that came with a call; None without one, or if it makes no sense (W3C: ignore it then)."""
    traceparent = tracestate = ""
    for key, value in call.invocation_metadata():
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


MAX_QUEUED = 4096
PERIOD_SECONDS = 0.05
PACKET_BYTES = 48 * 1024
REPORT_SECONDS = 60.0


class Tracer:
    """`active` says whether any request may be traced, `wants_tensors` whether some are with their tensors.

    `exporter`: a SOCK_SEQPACKET socket; None: traces are lost.
    """

    def __init__(self, config: TraceConfig, serving: ServingLoop, exporter: socket.socket | None = None) -> None:
        self.active = self.wants_tensors = False
        self.settings = TraceSettings(config)
        self._serving = serving
        self._exporter = exporter
        self._queue: deque[TraceRecord] = deque()
        self._unsent: tuple[bytes, int] | None = None  # a packet that there was no room for, and its traces
        self._is_polled = self._is_sending = False
        self._dropped = 0
        self._reported_seconds = -REPORT_SECONDS
        self._settle()

    # -- settings

    def override(self, new: TraceOverrides, restarts: bool = True) -> None:
        """Change settings that have been checked; see TraceSettings."""
        self.settings.override(new, restarts)
        self._settle()

    def _settle(self) -> None:
        self.active, self.wants_tensors = self.settings.active, self.settings.wants_tensors
        if self.active and not self._is_polled:
            self._is_polled = True
            self._serving.every(PERIOD_SECONDS, self._poll)

    # -- requests

    def answered(self, request: Traced, contents: Contents, response: bytes, steps: Sequence[ModelRun] = ()) -> None:
        """Note a request that was answered, if it is one to trace. `steps`: of an ensemble."""
        picked, sampler, parent = self._pick(request)
        if picked:
            tensors = tensors_of(request, contents, response) if sampler.tensors else ()
            outcome = request.outcome
            self._put(record_of(request, sampler.setting, parent, outcome, tensors=tensors, steps=steps))

    def not_executed(self, request: Traced, error: RequestError | None = None) -> None:
        """Note a request that failed, or whose answer was in the cache, if it is one to trace."""
        picked, sampler, parent = self._pick(request)
        if picked:
            self._put(record_of(request, sampler.setting, parent, error=error))

    def _pick(self, request: Traced) -> tuple[bool, Sampler, Parent | None]:
        """Say whether to trace. A client that sends a trace context decides for itself; other requests are sampled."""
        sampler = self.settings.sampler(request.model.name)
        if sampler.off:
            return False, sampler, None
        parent = parent_of(request.call) if self.settings.propagates else None
        return (sampler.take() if parent is None else parent.sampled), sampler, parent

    def _put(self, record: TraceRecord) -> None:
        if len(self._queue) < MAX_QUEUED:
            self._queue.append(record)
        else:
            self._dropped += 1

    # -- the way out

    def flush(self) -> bool:
        """Send what there is room for; say whether nothing is left."""
        return not self._is_sending and self._send()

    def close(self) -> None:
        """Give up what could not be sent."""
        self._dropped += len(self._queue) + (self._unsent[1] if self._unsent else 0)
        self._report(now=True)

    def _poll(self) -> None:
        if (self._queue or self._unsent) and not self._is_sending:
            self._is_sending = True
            self._serving.aside(self._work)
        self._report()

    def _work(self) -> None:
        try:
            self._send()
        finally:
            self._is_sending = False

    def _send(self) -> bool:
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
        parts: list[bytes] = []
        size_bytes = 0
        while self._queue and size_bytes < PACKET_BYTES:
            parts.append(self._queue.popleft().encode())
            size_bytes += len(parts[-1])
        return b"[" + b",".join(parts) + b"]", len(parts)

    def _report(self, now: bool = False) -> None:
        seconds = time.monotonic()
        if self._dropped and (now or seconds - self._reported_seconds >= REPORT_SECONDS):
            dropped, self._dropped, self._reported_seconds = self._dropped, 0, seconds
            _log.warning(
                "%d traces were dropped: requests are traced faster than traces are written; raise trace_rate", dropped
            )
