"""A collector of OpenTelemetry's that keeps what it gets: OTLP over HTTP, protobuf, on a port of this machine."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

from testing.waiting import until

POLL_S = 0.01


@dataclass(frozen=True)
class CollectedSpan:
    """A span as it came over the wire; ids in hexadecimal digits, empty without a parent."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    trace_state: str
    kind: int
    start_ns: int
    end_ns: int
    status_code: int
    status_message: str
    attributes: dict[str, Any]
    events: list[tuple[str, int]]
    resource: dict[str, Any] = field(default_factory=dict)


class OtlpCollector:
    """A context manager. `delay_s`: how long it takes over every batch."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.spans: list[CollectedSpan] = []
        self._delay_s = delay_s
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.take(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(POLL_S,))
        self._thread.start()

    @property
    def url(self) -> str:
        """Where to send spans."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"

    def take(self, request: ExportTraceServiceRequest) -> None:
        """Keep a batch."""
        time.sleep(self._delay_s)
        for group in request.resource_spans:
            resource = _attributes(group.resource.attributes)
            for scope in group.scope_spans:
                self.spans += [_collected(span, resource) for span in scope.spans]

    def wait_for(self, enough: Callable[[Sequence[CollectedSpan]], bool]) -> list[CollectedSpan]:
        """Return the spans as soon as there are enough. Raises AssertionError."""
        until(lambda: enough(self.spans), lambda: f"only {len(self.spans)} spans: {self.spans[-6:]}")
        return list(self.spans)

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _collected(span: Any, resource: dict[str, Any]) -> CollectedSpan:
    return CollectedSpan(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        trace_state=span.trace_state,
        kind=span.kind,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        status_code=span.status.code,
        status_message=span.status.message,
        attributes=_attributes(span.attributes),
        events=[(event.name, event.time_unix_nano) for event in span.events],
        resource=resource,
    )


def _attributes(pairs: Sequence[KeyValue]) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, str(pair.value.WhichOneof("value"))) for pair in pairs}
