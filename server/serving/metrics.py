"""The metrics of the server: families in Prometheus' text format.

Triton's metrics have its names, labels and meanings, so that dashboards made for it work unchanged. Our own ones are
what Triton does not have, with base units in their names, as Prometheus wants them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final, Literal

from gangway.artifact.precision import BF16
from gangway.executor.control import COMPOUND_RESULTS, ControlSegment
from gangway.server.custom_metrics import HISTOGRAM, KINDS, CustomMetric, CustomMetricsTable
from gangway.server.models.config import precisions_of
from gangway.server.models.served import Models
from gangway.server.models.settings import FIRST_RESPONSE
from gangway.server.options.endpoints import MetricsOptions
from gangway.server.requests.data_plane import DataPlane
from gangway.server.serving.metrics_reading import Labels, MachineMeter, ModelReading, Peers, Reading, Source, labels
from gangway.server.statistics import (
    REASONS,
    ROW_BOUNDS,
    TIME_BOUNDS_NS,
    VERSION_PREFIX,
    CacheFigures,
    ComputePart,
    VersionFigures,
)
from gangway.server.system import own_version

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
        """Return what has been added since the last call; the first one has the family's head, too."""
        parts, self._parts = self._parts, []
        return "".join(parts)


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


Table = Sequence[tuple[str, Kind, Callable[[ModelReading], float], str]]  # name, type, value of a model, help


def _time_us(part: ComputePart) -> Callable[[ModelReading], float]:
    return lambda model: model.figures.compute_ns[part] // 1000


# fmt: off
_COUNTS: Final[Table] = (
    ("nv_inference_request_success", "counter", lambda model: model.figures.success.count,
     "Number of requests that were answered, whatever their batch size"),
    ("nv_inference_count", "counter", lambda model: model.figures.inferences,
     "Number of inferences executed: a batch of n counts n, an answer from the response cache counts 0"),
    ("nv_inference_exec_count", "counter", lambda model: model.figures.executions,
     "Number of executions of the model"),
)
_LATENCIES: Final[Table] = (
    ("nv_inference_request_duration_us", "counter", lambda model: model.figures.success.ns // 1000,
     "Time of answered requests from arrival to answer, summed up, in microseconds"),
    ("nv_inference_queue_duration_us", "counter", lambda model: model.figures.queue.ns // 1000,
     "Time that answered requests waited to be executed, summed up, in microseconds"),
    ("nv_inference_compute_input_duration_us", "counter", _time_us("compute_input"),
     "Time of checking requests and copying their inputs, summed up, in microseconds"),
    ("nv_inference_compute_infer_duration_us", "counter", _time_us("compute_infer"),
     "Time of executing the model, summed up, in microseconds"),
    ("nv_inference_compute_output_duration_us", "counter", _time_us("compute_output"),
     "Time of copying outputs and making responses, summed up, in microseconds"),
)
_CACHE: Final[Table] = (
    ("nv_cache_num_hits_per_model", "counter", lambda model: model.figures.cache_hit.count,
     "Number of answers that the response cache had"),
    ("nv_cache_num_misses_per_model", "counter", lambda model: model.figures.cache_miss.count,
     "Number of answers that the response cache did not have"),
    ("nv_cache_hit_duration_per_model", "counter", lambda model: model.figures.cache_hit.ns // 1000,
     "Time of finding answers in the response cache, summed up, in microseconds"),
    ("nv_cache_miss_duration_per_model", "counter", lambda model: model.figures.cache_miss.ns // 1000,
     "Time of looking for answers in the response cache in vain and of keeping them, summed up, in microseconds"),
)
_GAUGES: Final[Table] = (
    ("nv_inference_pending_request_count", "gauge", lambda model: model.waiting,
     "Number of requests that wait and have not been begun, at this moment"),
    ("nv_model_load_duration_secs", "gauge", lambda model: model.model.load_seconds,
     "Time that loading the model took, compiling and measuring included, in seconds"),
)
_MODEL: Final[Table] = (
    ("gangway_qos_met_total", "counter", lambda model: model.figures.own["qos_met"],
     "Requests with a latency target that were answered in time"),
    ("gangway_qos_missed_total", "counter", lambda model: model.figures.own["qos_missed"],
     "Requests with a latency target that were answered late, refused, failed, or given up at the call's deadline"),
    ("gangway_requests_refused_total", "counter", lambda model: model.figures.own["refused"],
     "Requests answered UNAVAILABLE: late, queue or server full, server stopping"),
    ("gangway_blocks_total", "counter", lambda model: model.figures.own["blocks"],
     "Layer blocks that answered requests were executed in, started or planned"),
    ("gangway_conflicts_total", "counter", lambda model: model.figures.own["conflicts"],
     "Layer blocks of answered requests that got fewer cores than the policy wanted"),
    ("gangway_preemptions_total", "counter", lambda model: model.figures.own["preemptions"],
     "Times that answered requests were stopped to make room for others"),
    ("gangway_growths_total", "counter", lambda model: model.account.growths,
     "Times that running gangs got more cores"),
    ("gangway_shrinks_total", "counter", lambda model: model.account.shrinks,
     "Times that running gangs had to give up cores"),
    ("gangway_layers_total", "counter", lambda model: model.account.layers,
     "Layers that were executed"),
    ("gangway_version_layers_total", "counter", lambda model: model.account.version_layers,
     "Layers that were executed in another version than the static choice"),
    ("gangway_blocks_planned_total", "counter", lambda model: model.account.planned_blocks,
     "Layer blocks that began by the plan of Algorithm 2, without a decision"),
    ("gangway_requests_in_flight", "gauge", lambda model: model.in_flight,
     "Requests that wait, run or are being answered"),
    ("gangway_arenas_in_use", "gauge", lambda model: model.account.arenas,
     "Arenas (memory for activations) that requests under way hold"),
    ("gangway_arena_bytes", "gauge", lambda model: model.account.arena_bytes,
     "Memory of the model's arenas, idle ones included"),
    ("gangway_weights_bytes", "gauge", lambda model: model.weights_bytes,
     "Weights that all workers map, one copy for all, none while idle; onnxruntime may have copies beside it"),
    ("gangway_model_idle", "gauge", lambda model: int(model.is_idle),
     "1 if workers have given the model's memory back until its next request, else 0"),
    ("gangway_bf16", "gauge", lambda model: int(BF16 in precisions_of(model.model.config)),
     "1 if the model's kernels multiply bf16 numbers, for all requests or for some, else 0"),
)
# fmt: on


def _families(table: Table, models: Sequence[ModelReading]) -> Iterator[str]:
    for name, kind, value, help_text in table:
        yield family(name, help_text, kind, ((model.labels, value(model)) for model in models))


def triton_families(reading: Reading, options: MetricsOptions) -> Iterator[str]:
    """Yield what Triton serves on a machine without GPU. Every model has every reason of failure from the beginning."""
    models = reading.models
    cached = [model for model in models if model.model.config.response_cache.enable]
    yield from _families(_COUNTS, models)
    if options.counters:
        yield from _families(_LATENCIES, models)
    if cached:
        yield from _families(_CACHE, cached)
    if reading.cache is not None:
        yield from _of_cache(reading.cache)
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
    yield from _families(_GAUGES, models)
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


def _of_cache(cache: CacheFigures) -> Iterator[str]:
    values: Sequence[tuple[str, float, str]] = (
        ("util", cache.used_bytes / cache.size_bytes, "Share of the response cache's memory that is taken, 0.0 to 1.0"),
        ("num_entries", cache.entries, "Number of answers that the response cache holds"),
        ("num_lookups", cache.hits + cache.misses, "Number of answers that the response cache was asked for"),
        ("num_hits", cache.hits, "Number of answers that the response cache had"),
        ("num_misses", cache.misses, "Number of answers that the response cache did not have"),
        ("num_evictions", cache.evictions, "Number of answers that made room for others in the response cache"),
        ("lookup_duration", cache.lookup_ns // 1000, "Time of looking for answers, summed up, in microseconds"),
        ("insertion_duration", cache.insertion_ns // 1000, "Time of keeping answers, summed up, in microseconds"),
    )
    for name, value, text in values:
        yield single(f"nv_cache_{name}", text, "gauge", value)


def _first_response(models: tuple[ModelReading, ...]) -> str:
    made = HistogramFamily(FIRST_RESPONSE, "Time from arrival to the first response, in milliseconds")
    for model in models:
        figures = model.figures
        bounds_ms = [bound / 1e6 for bound in figures.response_bounds_ns]
        made.add(model.labels, bounds_ms, figures.response_counts, figures.success.ns / 1e6)
    return made.text()


def gangway_families(reading: Reading) -> Iterator[str]:
    """Yield the families that Triton does not have."""
    models = reading.models
    yield from _histograms(models)
    yield from _families(_MODEL, models)
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
    times: tuple[tuple[str, str, Callable[[VersionFigures], tuple[tuple[int, ...], int]]], ...] = (
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
        yield made.text()
    rows = HistogramFamily("gangway_batch_rows", "Rows of the batches that were executed, of one request or of several")
    for model in models:
        rows.add(model.labels, ROW_BOUNDS, model.figures.row_counts, model.figures.batch_rows)
        yield rows.text()
    yield rows.text()


def _of_scheduler(reading: Reading) -> Iterator[str]:
    scheduler = reading.scheduler
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
        ((f'core="{core}"', busy_us / 1e6) for core, busy_us in _busy_us(reading).items()),
    )


def _busy_us(reading: Reading) -> dict[int, float]:
    """Return the time of each core's workers: in tests several share one."""
    found = dict.fromkeys(reading.server.cores, 0.0)
    for core, worker in zip(reading.server.cores, reading.workers, strict=True):
        found[core] += worker.busy_us
    return found


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
    yield family("gangway_build_info", text, "gauge", [(labels({"version": own_version()}), 1)])


class Exposition:
    """Writes what `source` reads, in Prometheus' text format, version 0.0.4. For one thread.

    The text is made without prometheus_client, which holds the interpreter longer, and wants `_total` at the end of
    every counter's name, which Triton's names lack. Tests read it with that library.
    """

    def __init__(self, source: Source, options: MetricsOptions, custom: CustomMetricsTable | None = None) -> None:
        self._source = source
        self._options = options
        self._custom = custom

    def pieces(self) -> Iterator[str]:
        """Yield the metrics in short pieces, some of them empty. Raises OSError if /proc cannot be read."""
        for reading in self._source.steps():
            if reading is None:
                yield ""
            else:
                yield from triton_families(reading, self._options)
                yield from gangway_families(reading)
        if self._custom is not None:
            yield from custom_families(self._custom.read())


def exposition_of(
    options: MetricsOptions,
    models: Callable[[], Models],
    plane: DataPlane,
    control: ControlSegment,
    peers: Peers,
    custom: CustomMetricsTable | None,
) -> Exposition:
    """Return what writes the metrics of all front ends."""
    machine = MachineMeter(options.interval_ms / 1000) if options.cpu else None
    return Exposition(Source(models, plane, control, machine, peers), options, custom)
