"""Triton's metrics: its names, its labels, its meanings, so that dashboards made for it show a Gangway, too."""

from collections.abc import Callable, Iterator

from gangway.server.counting.figures import REASONS
from gangway.server.metrics.families import HistogramFamily, family, single
from gangway.server.metrics.reading import ModelReading, Reading
from gangway.server.model_metrics import FIRST_RESPONSE
from gangway.server.options.metrics import MetricsOptions

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
