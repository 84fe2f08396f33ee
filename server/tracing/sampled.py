"""A request that was picked, as it waits for the thread that sends it on: references, and little work."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from gangway.executor.slots import SlotOutcome
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.calls import Contents
from gangway.server.ensemble.spans import StepSpan
from gangway.server.errors import RequestError
from gangway.server.plan import Plan
from gangway.server.tracing.record import GRPC, StepRecord, TensorRecord, TraceRecord
from gangway.server.tracing.settings import Sampler

MAX_TENSORS_BYTES = 16 * 1024  # of all inputs, and of the response: larger ones are left out
MAX_HEADER_CHARACTERS = 512
MAX_TEXT_CHARACTERS = 256
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})(-.*)?")


class Parent(NamedTuple):
    """The context that a request came with: W3C's headers, and whether its sender wants it traced."""

    traceparent: str
    tracestate: str
    sampled: bool


class Instants(NamedTuple):
    """Of a request that was answered; CLOCK_MONOTONIC, nanoseconds."""

    arrival_ns: int
    submitted_ns: int
    finished_ns: int  # the front end knows that it is computed
    end_ns: int


class Sampled(NamedTuple):
    """One request. `outcome` None: it failed with `error`, or its answer was in the cache."""

    plan: Plan
    request_id: bytes
    front_end: str
    parent: Parent | None
    sampler: Sampler
    instants: Instants
    outcome: SlotOutcome | None
    error: RequestError | None
    inputs: tuple[bytes, ...] | None  # None: not wanted, or too large
    response: bytes | None
    steps: Sequence[StepSpan] = ()  # of an ensemble

    def record(self) -> TraceRecord:
        """Return what the exporter gets."""
        plan, outcome, error, instants = self.plan, self.outcome, self.error, self.instants
        parent = self.parent or Parent("", "", False)
        start_ns = instants.arrival_ns + round(outcome.queue_us * 1000) if outcome else 0
        return TraceRecord(
            model=plan.model.name,
            version=plan.model.version,
            request_id=self.request_id[:MAX_TEXT_CHARACTERS].decode(errors="replace"),
            front_end=self.front_end,
            parent=parent.traceparent,
            tracestate=parent.tracestate,
            arrival_ns=instants.arrival_ns,
            submitted_ns=instants.submitted_ns,
            start_ns=start_ns,
            computed_ns=start_ns + round(outcome.compute_us * 1000) if outcome else 0,
            end_ns=instants.end_ns,
            status=error.code.name if error else "OK",
            message=error.message[:MAX_TEXT_CHARACTERS] if error else "",
            rows=plan.shapes.rows,
            batch_rows=outcome.batch_rows if outcome else 0,
            target_us=plan.terms.target_us,
            ranks=outcome.ranks if outcome else 0,
            attempts=outcome.attempts if outcome else 0,
            blocks=outcome.counts.blocks if outcome else 0,
            conflicts=outcome.counts.conflicts if outcome else 0,
            preemptions=outcome.counts.preemptions if outcome else 0,
            versions=outcome.counts.versions if outcome else 0,
            log_frequency=self.sampler.setting.log_frequency,
            timestamps="TIMESTAMPS" in self.sampler.setting.level,
            tensors=self._tensors(),
            steps=[_step_record(span) for span in self.steps],
        )

    def _tensors(self) -> list[TensorRecord]:
        tensors = []
        if self.inputs is not None:
            for (tensor, shape), data in zip(self.plan.shapes.inputs, self.inputs, strict=False):
                tensors.append(TensorRecord.of("TENSOR_QUEUE_INPUT", tensor.name, tensor.datatype, shape, data))
        if self.response is not None:
            message = pb.ModelInferResponse.FromString(self.response)
            if len(message.outputs) == len(message.raw_output_contents):
                for output, data in zip(message.outputs, message.raw_output_contents, strict=True):
                    activity = "TENSOR_BACKEND_OUTPUT"
                    tensors.append(TensorRecord.of(activity, output.name, output.datatype, output.shape, data))
        return tensors


def _step_record(span: StepSpan) -> StepRecord:
    model = span.step.model
    instants = span.begin_ns, span.submitted_ns, span.start_ns, span.computed_ns, span.end_ns
    return StepRecord(model.name, model.version, *instants)


def front_end_of(call: object) -> str:
    """Return which protocol a call came by; one that does not say came by gRPC."""
    return str(getattr(call, "front_end", GRPC))


def parent_of(call: object) -> Parent | None:
    """Return the context that came with a call; None without one, or if it makes no sense (W3C: ignore it then)."""
    ask = getattr(call, "invocation_metadata", None)
    if ask is None:
        return None
    traceparent = tracestate = ""
    for key, value in ask() or ():
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
