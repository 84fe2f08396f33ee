"""The metrics of the server: families in Prometheus' text format, and the port that serves them.

Triton's metrics have its names, labels and meanings, so that dashboards made for it work unchanged. Our own ones are
what Triton does not have, with base units in their names, as Prometheus wants them.
"""

import errno
import gzip
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from itertools import accumulate, chain
from typing import Any, Literal

from gangway.artifact.precision import BF16
from gangway.executor.control import COMPOUND_RESULTS, ControlSegment
from gangway.server.access import HTTP2_PREFACE, Ports, socket_address
from gangway.server.custom_metrics import HISTOGRAM, KINDS, CustomMetric, CustomMetricsTable
from gangway.server.front_end.metrics_reading import (
    Labels,
    Machine,
    ModelReading,
    Peers,
    Reading,
    Source,
    labels,
)
from gangway.server.models.config import precisions_of
from gangway.server.models.served import Models
from gangway.server.models.settings import FIRST_RESPONSE
from gangway.server.options.endpoints import MetricsOptions
from gangway.server.requests.data_plane import DataPlane
from gangway.server.statistics import REASONS, ROW_BOUNDS, TIME_BOUNDS_NS, VERSION_PREFIX, Figures

_log = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Kind = Literal["counter", "gauge"]


def family(name: str, help_text: str, kind: str, samples: Iterable[tuple[Labels, float]]) -> str:
    """Return a family with one sample for each set of labels."""
    return _head(name, help_text, kind) + "".join([f"{name}{_braced(own)} {value}\n" for own, value in samples])


def single(name: str, help_text: str, kind: Kind, value: float) -> str:
    """Return a family of one sample without labels."""
    return f"{_head(name, help_text, kind)}{name} {value}\n"


class HistogramFamily:
    """Histograms of one name. Bounds are in the unit of the name."""

    def __init__(self, name: str, help_text: str) -> None:
        self._name = name
        self._parts = [_head(name, help_text, "histogram")]

    def add(self, own: Labels, bounds: Sequence[float], counts: Sequence[int], total: float) -> None:
        """Add the histogram of one set of labels: values in each range, and the sum of all values."""
        begin = f"{self._name}_bucket{{{own}{',' if own else ''}"
        ends = _ends(tuple(bounds))
        sums = list(accumulate(counts))
        self._parts += [f"{begin}{end}{count}\n" for end, count in zip(ends, sums, strict=True)]
        own = _braced(own)
        self._parts.append(f"{self._name}_count{own} {sums[-1]}\n{self._name}_sum{own} {total}\n")

    def text(self) -> str:
        """Return the family."""
        return "".join(self._parts)


@lru_cache(maxsize=256)
def _ends(bounds: tuple[float, ...]) -> tuple[str, ...]:
    """Return what stands behind the other labels of each bucket."""
    return tuple([f'le="{edge}"}} ' for edge in (*map(float, bounds), "+Inf")])


def _braced(own: Labels) -> str:
    return f"{{{own}}}" if own else ""


def _head(name: str, help_text: str, kind: str) -> str:
    return f"# HELP {name} {help_text}\n# TYPE {name} {kind}\n"


def custom_families(metrics: Iterable[CustomMetric]) -> Iterator[str]:
    """Return the families that Python models have made."""
    by_name: dict[str, list[CustomMetric]] = {}
    for metric in metrics:
        by_name.setdefault(metric.about.name, []).append(metric)
        yield ""  # there may be many, and requests are answered in between
    for name, members in by_name.items():
        about = members[0].about
        if about.kind == HISTOGRAM:
            made = HistogramFamily(name, about.help)
            for each in members:
                made.add(each.about.labels, each.about.bounds, each.counts, each.value)
            yield made.text()
        else:
            yield family(name, about.help, KINDS[about.kind], [(each.about.labels, each.value) for each in members])


Value = Callable[[ModelReading], float]

_COUNTS: tuple[tuple[str, str, Value], ...] = (
    (
        "nv_inference_request_success",
        "Number of requests that were answered, whatever their batch size",
        lambda model: model.figures.success.count,
    ),
    (
        "nv_inference_count",
        "Number of inferences executed: a batch of n counts n, an answer from the response cache counts 0",
        lambda model: model.figures.inferences,
    ),
    (
        "nv_inference_exec_count",
        "Number of executions of the model",
        lambda model: model.figures.executions,
    ),
)
_LATENCIES: tuple[tuple[str, str, Value], ...] = (
    (
        "nv_inference_request_duration_us",
        "Time of answered requests from arrival to answer, summed up, in microseconds",
        lambda model: model.figures.success.ns // 1000,
    ),
    (
        "nv_inference_queue_duration_us",
        "Time that answered requests waited to be executed, summed up, in microseconds",
        lambda model: model.figures.queue.ns // 1000,
    ),
    (
        "nv_inference_compute_input_duration_us",
        "Time of checking requests and copying their inputs, summed up, in microseconds",
        lambda model: model.figures.compute("compute_input").ns // 1000,
    ),
    (
        "nv_inference_compute_infer_duration_us",
        "Time of executing the model, summed up, in microseconds",
        lambda model: model.figures.compute("compute_infer").ns // 1000,
    ),
    (
        "nv_inference_compute_output_duration_us",
        "Time of copying outputs and making responses, summed up, in microseconds",
        lambda model: model.figures.compute("compute_output").ns // 1000,
    ),
)
_CACHE: tuple[tuple[str, str, Value], ...] = (
    (
        "nv_cache_num_hits_per_model",
        "Number of answers that the response cache had",
        lambda model: model.figures.cache_hit.count,
    ),
    (
        "nv_cache_num_misses_per_model",
        "Number of answers that the response cache did not have",
        lambda model: model.figures.cache_miss.count,
    ),
    (
        "nv_cache_hit_duration_per_model",
        "Time of finding answers in the response cache, summed up, in microseconds",
        lambda model: model.figures.cache_hit.ns // 1000,
    ),
    (
        "nv_cache_miss_duration_per_model",
        "Time of looking for answers in the response cache in vain and of keeping them, summed up, in microseconds",
        lambda model: model.figures.cache_miss.ns // 1000,
    ),
)
_GAUGES: tuple[tuple[str, str, Value], ...] = (
    (
        "nv_inference_pending_request_count",
        "Number of requests that wait and have not been begun, at this moment",
        lambda model: model.waiting,
    ),
    (
        "nv_model_load_duration_secs",
        "Time that loading the model took, compiling and measuring included, in seconds",
        lambda model: model.model.load_seconds,
    ),
)


def triton_families(reading: Reading, options: MetricsOptions) -> Iterator[str]:
    """Yield what Triton serves on a machine without GPU. Every model has every reason of failure from the beginning."""
    models = reading.models
    cached = [model for model in models if model.model.config.response_cache.enable]
    counters = [(_COUNTS, models)]
    if options.counters:
        counters.append((_LATENCIES, models))
    if cached:
        counters.append((_CACHE, tuple(cached)))
    for table, counted in counters:
        for name, help_text, value in table:
            yield family(name, help_text, "counter", ((model.labels, value(model)) for model in counted))
    yield family(
        "nv_inference_request_failure",
        "Number of requests that reached the model and were not answered, by reason",
        "counter",
        (
            (f'{model.labels},reason="{reason}"', model.figures.failures[reason])
            for model in models
            for reason in REASONS
        ),
    )
    for name, help_text, value in _GAUGES:
        yield family(name, help_text, "gauge", ((model.labels, value(model)) for model in models))
    if options.histograms:
        yield _first_response(models)
    if reading.machine is not None:
        machine = reading.machine
        text = "Share of the time of all the machine's cores that was not idle, 0.0 to 1.0"
        yield single("nv_cpu_utilization", text, "gauge", machine.utilization)
        yield single(
            "nv_cpu_memory_total_bytes", "Memory of the machine, in bytes", "gauge", machine.memory_total_bytes
        )
        yield single(
            "nv_cpu_memory_used_bytes", "Memory of the machine in use, in bytes", "gauge", machine.memory_used_bytes
        )


def _first_response(models: tuple[ModelReading, ...]) -> str:
    made = HistogramFamily(FIRST_RESPONSE, "Time from arrival to the first response, in milliseconds")
    for model in models:
        figures = model.figures
        bounds_ms = [bound / 1e6 for bound in figures.response_bounds_ns]
        made.add(model.labels, bounds_ms, figures.response_counts, figures.success.ns / 1e6)
    return made.text()


_MODEL: tuple[tuple[str, Kind, str, Value], ...] = (
    (
        "gangway_qos_met_total",
        "counter",
        "Requests with a latency target that were answered in time",
        lambda model: model.figures.own["qos_met"],
    ),
    (
        "gangway_qos_missed_total",
        "counter",
        "Requests with a latency target that were answered late, refused, failed, or given up at the call's deadline",
        lambda model: model.figures.own["qos_missed"],
    ),
    (
        "gangway_requests_refused_total",
        "counter",
        "Requests answered UNAVAILABLE: late, queue or server full, server stopping",
        lambda model: model.figures.own["refused"],
    ),
    (
        "gangway_blocks_total",
        "counter",
        "Layer blocks that answered requests were executed in, started or planned",
        lambda model: model.figures.own["blocks"],
    ),
    (
        "gangway_conflicts_total",
        "counter",
        "Layer blocks of answered requests that got fewer cores than the policy wanted",
        lambda model: model.figures.own["conflicts"],
    ),
    (
        "gangway_preemptions_total",
        "counter",
        "Times that answered requests were stopped to make room for others",
        lambda model: model.figures.own["preemptions"],
    ),
    (
        "gangway_growths_total",
        "counter",
        "Times that running gangs got more cores",
        lambda model: model.account.growths,
    ),
    (
        "gangway_shrinks_total",
        "counter",
        "Times that running gangs had to give up cores",
        lambda model: model.account.shrinks,
    ),
    (
        "gangway_layers_total",
        "counter",
        "Layers that were executed",
        lambda model: model.account.layers,
    ),
    (
        "gangway_version_layers_total",
        "counter",
        "Layers that were executed in another version than the static choice",
        lambda model: model.account.version_layers,
    ),
    (
        "gangway_requests_in_flight",
        "gauge",
        "Requests that wait, run or are being answered",
        lambda model: model.in_flight,
    ),
    (
        "gangway_arenas_in_use",
        "gauge",
        "Arenas (memory for activations) that requests under way hold",
        lambda model: model.account.arenas,
    ),
    (
        "gangway_arena_bytes",
        "gauge",
        "Memory of the model's arenas, idle ones included",
        lambda model: model.account.arena_bytes,
    ),
    (
        "gangway_weights_bytes",
        "gauge",
        "Weights that all workers map, one copy for all; onnxruntime may have copies beside it",
        lambda model: model.model.weights_bytes,
    ),
    (
        "gangway_bf16",
        "gauge",
        "1 if the model's kernels multiply bf16 numbers, for all requests or for some, else 0",
        lambda model: int(BF16 in precisions_of(model.model.config)),
    ),
)


def gangway_families(reading: Reading) -> Iterator[str]:
    """Yield the families that Triton does not have."""
    models = reading.models
    yield from _histograms(models)
    for name, kind, help_text, value in _MODEL:
        yield family(name, help_text, kind, ((model.labels, value(model)) for model in models))
    yield family(
        "gangway_version_requests_total",
        "Answered requests that used this version of a kernel in any layer; 0 is the static choice",
        "counter",
        (
            (f'{model.labels},kernel_version="{key.removeprefix(VERSION_PREFIX)}"', count)
            for model in models
            for key, count in model.figures.own.items()
            if key.startswith(VERSION_PREFIX)
        ),
    )
    yield family(
        "gangway_precision_requests_total",
        "Requests that were computed in this precision, of a model whose precision the scheduler chooses",
        "counter",
        (
            (f'{model.labels},precision="{precision}"', count)
            for model in models
            if model.model.chooses_precision
            for precision, count in model.figures.by_precision.items()
        ),
    )
    yield from _of_scheduler(reading)
    yield from _of_server(reading)


def _histograms(models: tuple[ModelReading, ...]) -> Iterator[str]:
    bounds_s = [bound / 1e9 for bound in TIME_BOUNDS_NS]
    times: tuple[tuple[str, str, Callable[[Figures], tuple[tuple[int, ...], int]]], ...] = (
        (
            "gangway_request_duration_seconds",
            "Time of answered requests from arrival to answer",
            lambda figures: (figures.request_counts, figures.success.ns),
        ),
        (
            "gangway_queue_duration_seconds",
            "Time that answered requests waited to be executed",
            lambda figures: (figures.queue_counts, figures.queue.ns),
        ),
        (
            "gangway_compute_duration_seconds",
            "Time of executing the model, from the first task to the last, stops included",
            lambda figures: (figures.compute_counts, figures.compute("compute_infer").ns),
        ),
    )
    for name, help_text, values in times:
        made = HistogramFamily(name, help_text)
        for model in models:
            counts, total_ns = values(model.figures)
            made.add(model.labels, bounds_s, counts, total_ns / 1e9)
        yield made.text()
    rows = HistogramFamily("gangway_batch_rows", "Rows of the batches that were executed, of one request or of several")
    for model in models:
        rows.add(model.labels, ROW_BOUNDS, model.figures.row_counts, model.figures.batch_rows)
    yield rows.text()


def _of_scheduler(reading: Reading) -> Iterator[str]:
    scheduler, server = reading.scheduler, reading.server
    text = "Requests that have no core at the moment, stopped ones included"
    yield single("gangway_queue_length", text, "gauge", scheduler.waiting)
    text = "How much running requests slow each other down; 1: as much as the profiles' slopes say"
    yield single("gangway_interference_level", text, "gauge", scheduler.level)
    yield family(
        "gangway_compound_tasks_total",
        "Groups of an ensemble's steps that have a schedule: run by it to their end, or not, and why",
        "counter",
        ((f'result="{result}"', count) for result, count in zip(COMPOUND_RESULTS, scheduler.compounds, strict=True)),
    )
    yield single("gangway_leases_in_use", "Requests under way: they have a lease", "gauge", scheduler.leases)
    yield single("gangway_leases", "Requests that can be under way at once", "gauge", reading.leases)
    busy = sum(worker.lease is not None for worker in reading.workers)
    yield single("gangway_cores_busy", "Workers that are in a gang at the moment", "gauge", busy)
    yield single("gangway_cores", "Workers, one per core", "gauge", len(reading.workers))
    yield family(
        "gangway_core_busy_seconds_total",
        "Time that the core's worker has spent in gangs, counted when it leaves them",
        "counter",
        ((f'core="{core}"', worker.busy_us / 1e6) for core, worker in zip(server.cores, reading.workers, strict=True)),
    )


def _of_server(reading: Reading) -> Iterator[str]:
    server = reading.server
    yield single("gangway_request_slots_in_use", "Request slots that are taken", "gauge", reading.slots_in_use)
    yield single("gangway_request_slots", "Requests that can be in flight at once", "gauge", reading.slots)
    text = "Calls answered UNAVAILABLE before their message was read, because the server was overloaded"
    yield single("gangway_calls_refused_unread_total", text, "counter", reading.refused_unread)
    text = "The most that a front end's event loop was late for a timer in the last 10 to 20 seconds"
    yield single("gangway_loop_lag_seconds", text, "gauge", reading.loop_lag_s)
    text = "Memory for tensors of requests in flight that is taken"
    yield single("gangway_heap_used_bytes", text, "gauge", reading.heap_bytes)
    text = "Memory for tensors of requests in flight that there can be"
    yield single("gangway_heap_size_bytes", text, "gauge", reading.heap_capacity_bytes)
    restarts = {
        "front end": server.front_end_restarts,
        "scheduler": server.scheduler_restarts,
        "worker": sum(server.worker_restarts),
    }
    yield family(
        "gangway_process_restarts_total",
        "Processes that died and were replaced",
        "counter",
        ((f'process="{process}"', count) for process, count in restarts.items()),
    )
    text = "When the server was started, in seconds since 1970"
    yield single("gangway_start_time_seconds", text, "gauge", server.started_s)
    text = "1, with the server's version as a label"
    yield family("gangway_build_info", text, "gauge", [(labels({"version": version("gangway-serve")}), 1)])


MAX_HELD_SECONDS = 0.0005  # that a scrape holds the interpreter at a time, about
PAUSE_SECONDS = 0.0002


class Exposition:
    """Writes what `source` reads, in Prometheus' text format, version 0.0.4. Safe for threads: they take turns.

    The text is made without prometheus_client, which holds the interpreter longer, and wants `_total` at the end of
    every counter's name, which Triton's names lack. Tests read it with that library.
    """

    def __init__(self, source: Source, options: MetricsOptions, custom: CustomMetricsTable | None = None) -> None:
        self._source = source
        self._options = options
        self._custom = custom
        self._lock = threading.Lock()

    def render(self) -> bytes:
        """Return the metrics as they are now. Raises OSError if the machine's cannot be read."""
        with self._lock:
            reading = self._source.read()
            custom = () if self._custom is None else custom_families(self._custom.read())
            families = chain(triton_families(reading, self._options), gangway_families(reading), custom)
            return _with_pauses(families).encode()


def _with_pauses(families: Iterable[str]) -> str:
    """Return the families, and let requests be answered in between."""
    texts = []
    begin_s = time.monotonic()
    for text in families:
        texts.append(text)
        if time.monotonic() - begin_s > MAX_HELD_SECONDS:
            time.sleep(PAUSE_SECONDS)
            begin_s = time.monotonic()
    return "".join(texts)


PATH = "/metrics"
MAX_CONNECTIONS = 16
NO_DESCRIPTOR_PAUSE_SECONDS = 0.1
IO_TIMEOUT_SECONDS = 10.0
MAX_READ_BYTES = 65536
COMPRESSION_LEVEL = 3  # of 1 to 9: text like this becomes a tenth at any level
_NO_THREAD = b"HTTP/1.0 503 Service Unavailable\r\nContent-Type: text/plain\r\n\r\nno thread can be started\n"


class MetricsEndpoint:
    """The port of the metrics: GET /metrics, and nothing else. `render` makes the text.

    It takes the address when it is made (port 0: any), and answers from `start` on. Each connection has a thread.
    Beyond MAX_CONNECTIONS the oldest one is closed, so a slow or silent client holds up no other. `reuse_port`: other
    processes may listen there, too. `ports`: where other requests are sent. Raises OSError if the address is not
    available.
    """

    def __init__(self, host: str, port: int, render: Callable[[], bytes], reuse_port: bool, ports: Ports) -> None:
        kind = _Server6 if ":" in host else _Server
        self._server = kind((host, port), reuse_port)
        self._server.render = render
        self._server.ports = ports

    @property
    def address(self) -> str:
        """ "host:port", the port as bound."""
        host, port = self._server.server_address[:2]
        return f"[{host!s}]:{port}" if ":" in str(host) else f"{host!s}:{port}"

    def start(self) -> None:
        """Answer from now on, in threads of its own."""
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        """Stop and give the port back. Only after `start`."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128  # with the usual 5, a client that is not accepted at once tries again after a second
    render: Callable[[], bytes]
    ports: Ports

    def __init__(self, address: tuple[str, int], reuse_port: bool) -> None:
        self._reuse_port = reuse_port
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, None] = {}  # the oldest first
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Take the address. Without the name of the host, which the base class looks up, and which can take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, self._reuse_port)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection. Raises OSError; where descriptors lack after a pause, since there will be a next try."""
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(NO_DESCRIPTOR_PAUSE_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer one connection in a thread of its own; if there are too many, cut off the oldest."""
        with self._lock:
            if len(self._connections) >= MAX_CONNECTIONS:
                oldest = next(iter(self._connections))
                del self._connections[oldest]
                _shut(oldest)
            self._connections[request] = None
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            with suppress(OSError):
                request.sendall(_NO_THREAD)
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """One connection has come to its end."""
        with self._lock:
            self._connections.pop(request, None)
            super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection broke off, or its client was too slow: not worth a line of the log."""
        _log.debug("metrics: a connection from %s ended early", client_address, exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    raw_requestline: bytes
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = IO_TIMEOUT_SECONDS
    server_version = "gangway"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer /metrics; 404 to everything else."""
        if self.path.partition("?")[0] != PATH:
            self._answer(HTTPStatus.NOT_FOUND, f"{self._elsewhere}\n".encode())
            return
        try:
            text = self.server.render()
        except Exception:
            _log.exception("metrics cannot be computed; the scraper is told 500")
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, b"internal error, see the server's log\n")
            return
        if _accepts_gzip(self.headers.get("Accept-Encoding", "")):
            packed = gzip.compress(text, COMPRESSION_LEVEL)  # without the interpreter's lock
            self._answer(HTTPStatus.OK, packed, ("Content-Encoding", "gzip"))
        else:
            self._answer(HTTPStatus.OK, text)

    do_HEAD = do_GET  # noqa: N815

    def parse_request(self) -> bool:
        """Read the head of a request. False if there is none, and the client has been told why."""
        if not self.raw_requestline.startswith(HTTP2_PREFACE):
            return super().parse_request()
        from gangway.server.grpc_refusal import GrpcRefusal  # noqa: PLC0415 - few clients ask the wrong port

        self.close_connection = True
        refusal = GrpcRefusal(self._elsewhere)
        data, ends = self.raw_requestline, False
        while data and not ends:
            answer, ends = refusal.receive(data)
            self.wfile.write(answer)
            data = b"" if ends else self.rfile.read1(MAX_READ_BYTES)
        return False

    @property
    def _elsewhere(self) -> str:
        return f"only {PATH} is served on this port: {self.server.ports.text}"

    def _refuse(self) -> None:
        if self.path.partition("?")[0] != PATH:
            self._answer(HTTPStatus.NOT_FOUND, f"{self._elsewhere}\n".encode())
            return
        self._answer(HTTPStatus.METHOD_NOT_ALLOWED, b"only GET and HEAD are allowed\n", ("Allow", "GET, HEAD"))

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _refuse  # noqa: N815

    def _answer(self, status: HTTPStatus, body: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        kind = CONTENT_TYPE if status is HTTPStatus.OK else "text/plain; charset=utf-8"
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), *headers):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: a scrape is no event."""


def _accepts_gzip(header: str) -> bool:
    encodings = [part.strip().lower().replace(" ", "") for part in header.split(",")]
    return any(name in ("gzip", "gzip;q=1", "gzip;q=1.0") for name in encodings)


def _shut(connection: socket.socket) -> None:
    """Close a connection; a thread that waits for it wakes up."""
    with suppress(OSError):  # it has just ended
        connection.shutdown(socket.SHUT_RDWR)


def serve_metrics(
    options: MetricsOptions,
    models: Callable[[], Models],
    plane: DataPlane,
    control: ControlSegment,
    peers: Peers,
    custom: CustomMetricsTable | None,
    ports: Ports,
) -> str:
    """Answer on the metrics' port from now on; return its address ("host:port"), "" if metrics are off.

    Raises OSError, which says why the port is not available.
    """
    if not options.target:
        return ""
    machine = Machine(options.interval_ms / 1000) if options.cpu else None
    exposition = Exposition(Source(models, plane, control, machine, peers), options, custom)
    try:
        host, port, _ = socket_address(options.target)
        endpoint = MetricsEndpoint(host, port, exposition.render, options.reuse_port, ports)
    except OSError as error:
        raise OSError(f"cannot serve metrics on {options.target}: {error.strerror or error}") from error
    endpoint.start()
    return endpoint.address
