"""Our own metrics: what Triton does not have. Base units in the names, as Prometheus wants them."""

from collections.abc import Callable, Iterator
from importlib.metadata import version

from gangway.server.counting.figures import VERSION_PREFIX, Figures
from gangway.server.histogram import ROW_BOUNDS, TIME_BOUNDS_NS
from gangway.server.metrics.families import HistogramFamily, Kind, family, labels, single
from gangway.server.metrics.reading import ModelReading, Reading

Value = Callable[[ModelReading], float]

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
        "Layer blocks that answered requests were executed in",
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
        "Weights of the compiled model, one copy for all workers; 0 where onnxruntime has them",
        lambda model: model.model.weights_bytes,
    ),
)


def gangway_families(reading: Reading) -> Iterator[str]:
    """Yield our families."""
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
