"""Traces as spans, sent to a collector by OpenTelemetry's SDK (mode opentelemetry). Needs the extra `otel`.

The SDK's BatchSpanProcessor has the queue (bounded) and the thread that talks to the collector.
"""

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gangway.server.tracing.record import TraceRecord
from gangway.server.tracing.settings import TraceConfig

OUR_SERVICE: Final = "gangway"
CLOSE_SECONDS: Final = 3.0
REPORT_SECONDS: Final = 60.0
CLOCK_READINGS: Final = 3
_log = logging.getLogger(__name__)


def closest_offset_ns(readings: Iterable[tuple[int, int, int]]) -> int:
    """Return what CLOCK_REALTIME shows more than CLOCK_MONOTONIC.

    A reading has the latter before and after the former: a process may lose its core between two of them, for any time,
    and the reading that took the least time errs by no more than that.
    """
    before_ns, wall_ns, after_ns = min(readings, key=lambda reading: reading[2] - reading[0])
    return wall_ns - (before_ns + after_ns) // 2


class CountingExporter(SpanExporter):
    """Counts what another exporter sends and what it does not, and logs losses at most once a minute."""

    def __init__(self, exporter: SpanExporter, url: str) -> None:
        self._exporter = exporter
        self._url = url
        self.sent = 0
        self.lost = 0
        self._reported_seconds = -REPORT_SECONDS

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send, or count as lost."""
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self.sent += len(spans)
            return result
        self.lost += len(spans)
        if time.monotonic() - self._reported_seconds >= REPORT_SECONDS:
            self._reported_seconds = time.monotonic()
            _log.warning("%d spans were dropped, because the collector at %s does not take them", self.lost, self._url)
        return result

    def shutdown(self) -> None:
        """End the other one."""
        self._exporter.shutdown()


class Spans:
    """Sends traces to the collector of `config`; `first_id` is the number of the first trace."""

    def __init__(self, config: TraceConfig, first_id: int = 1) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # its complaints are ours, once a minute
        logging.getLogger("urllib3").setLevel(logging.CRITICAL)
        self._next_id = first_id
        self._ended = 0
        self._exporter = CountingExporter(OTLPSpanExporter(endpoint=config.url), config.url)
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=config.bsp_max_queue_size,
            schedule_delay_millis=config.bsp_schedule_delay,
            max_export_batch_size=config.bsp_max_export_batch_size,
        )
        provider = TracerProvider(sampler=ALWAYS_ON, resource=_resource_of(config), shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("triton-server")
        self._propagator = TraceContextTextMapPropagator()

    def take(self, record: TraceRecord) -> None:
        """Make three spans: request, way through the model, computation; two more for each step of an ensemble."""
        offset_ns = closest_offset_ns(
            (time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(CLOCK_READINGS)
        )
        root = self._span("InferRequest", self._parent_of(record), offset_ns, record.of_root(), SpanKind.SERVER)
        model = self._span(record.model, set_span_in_context(root, Context()), offset_ns, record.of_model())
        model.set_attributes(_attributes_of(record, self._next_id))
        number = self._next_id
        self._next_id += 1 + len(record.steps)
        self._compute(model, record.of_compute(), offset_ns)
        for place, step in enumerate(record.steps, number + 1):
            span = self._span(step.model, set_span_in_context(model, Context()), offset_ns, step.of_model())
            span.set_attributes(
                {
                    "triton.model_name": step.model,
                    "triton.model_version": step.version,
                    "triton.trace_id": place,
                    "triton.trace_parent_id": number,
                }
            )
            self._compute(span, step.of_compute(), offset_ns)
            self._end(span, step.end_ns + offset_ns)
        if record.status != "OK":
            for span in (model, root):
                span.set_status(Status(StatusCode.ERROR, record.message))
        for span in (model, root):
            self._end(span, record.end_ns + offset_ns)

    def _compute(self, model: Span, instants: Sequence[tuple[str, int]], offset_ns: int) -> None:
        """Make the span of a computation below that of its model, if there was one."""
        if instants:
            compute = self._span("compute", set_span_in_context(model, Context()), offset_ns, instants)
            self._end(compute, instants[-1][1] + offset_ns)

    def tick(self) -> None:
        """Nothing to do: the processor has a thread."""

    def close(self) -> None:
        """Send what is left, for CLOSE_SECONDS, and say how much was not."""
        flush = threading.Thread(target=self._processor.force_flush, daemon=True)  # does not honour a time-out
        try:
            flush.start()
            flush.join(CLOSE_SECONDS)
        except RuntimeError:  # no thread can be started
            self._processor.force_flush()
        if lost := self._ended - self._exporter.sent:
            _log.warning(
                "%d of %d spans were dropped, because the collector did not take them in time", lost, self._ended
            )

    def _span(
        self,
        name: str,
        context: Context,
        offset_ns: int,
        instants: Sequence[tuple[str, int]],
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        span = self._tracer.start_span(name, context, kind, start_time=instants[0][1] + offset_ns)
        for event, ns in instants:
            span.add_event(event, timestamp=ns + offset_ns)
        return span

    def _end(self, span: Span, at_ns: int) -> None:
        span.end(at_ns)
        self._ended += 1

    def _parent_of(self, record: TraceRecord) -> Context:
        if not record.parent:
            return Context()
        headers = {"traceparent": record.parent, "tracestate": record.tracestate}
        return self._propagator.extract(headers, Context())


def _attributes_of(record: TraceRecord, number: int) -> dict[str, str | int | float]:
    attributes: dict[str, str | int | float] = {
        "triton.model_name": record.model,
        "triton.model_version": record.version,
        "triton.trace_id": number,
        "triton.trace_parent_id": 0,
        "gangway.status": record.status,
        "gangway.rows": record.rows,
        "gangway.target_us": record.target_us,
    }
    if record.request_id:
        attributes["triton.request_id"] = record.request_id
    if record.start_ns:
        attributes |= {
            "gangway.queue_us": (record.start_ns - record.arrival_ns) / 1e3,
            "gangway.compute_us": (record.computed_ns - record.start_ns) / 1e3,
            "gangway.batch_rows": record.batch_rows or record.rows,
            "gangway.ranks": record.ranks,
            "gangway.attempts": record.attempts,
            "gangway.blocks": record.blocks,
            "gangway.conflicts": record.conflicts,
            "gangway.preemptions": record.preemptions,
            "gangway.versions": _numbers_in(record.versions),
        }
    if record.precision:
        attributes["gangway.precision"] = record.precision
    return attributes


def _numbers_in(mask: int) -> str:
    return ",".join(str(number) for number in range(mask.bit_length()) if mask >> number & 1)


def _resource_of(config: TraceConfig) -> Resource:
    """Return what the flags say, what OTEL_RESOURCE_ATTRIBUTES says, and a name of our own where neither has one."""
    resource = Resource.create(dict(config.resource))
    if str(resource.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: OUR_SERVICE}))
    return resource
