"""What servers say of themselves: cores, memory, how many requests of each model, what a model's times are.

Rates are differences of two readings of /metrics. A counter that has become smaller has begun anew.
"""

import http.client
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from gangway.clients.connection import ServerConnection
from gangway.clients.errors import RefusedError, UnreachableError
from gangway.clients.tls import Tls
from gangway.cluster.repository import READY
from gangway.cluster.server_address import ServerAddress
from gangway.simulator.measured import MeasuredModel
from gangway.workload.qos import Qos, WorkloadError, parse_qos

QOS_PARAMETER = "qos_ms"
PIECES = 10  # layers of a model of which only the whole time is known
_SAMPLE = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")
_MODEL = re.compile(r'(?:^|,)model="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class ModelObservation:
    """A model on one server, all versions. Counts since it was loaded. `requests`: with those under way."""

    requests: float = 0.0
    compute_s: float = 0.0
    answered: float = 0.0
    met: float = 0.0
    missed: float = 0.0
    memory_bytes: float = 0.0


@dataclass(frozen=True)
class ServerReading:
    """One server at one moment. `models`: by name, those that it has loaded or had. `ready`, `known`: names."""

    cores: int
    memory_total_bytes: float
    memory_used_bytes: float
    models: Mapping[str, ModelObservation]
    ready: frozenset[str] = frozenset()
    known: frozenset[str] = frozenset()
    targets: Mapping[str, Qos] = field(default_factory=dict)  # of ready models that have one


@dataclass(frozen=True)
class Demand:
    """What came for a model between two readings, from all servers. `met`: share in time, None if nothing counted."""

    rate_per_s: float
    met: float | None


def read_server(server: ServerAddress, tls: Tls | None, timeout_s: float) -> ServerReading:
    """Ask a server for everything. Raises UnreachableError, RefusedError."""
    reading = parse_metrics(_fetch_metrics(server, timeout_s))
    with ServerConnection(server.url, timeout_s, tls) as connection:
        index = connection.repository_index().models
        ready = frozenset(model.name for model in index if model.state == READY)
        targets = {name: target for name in sorted(ready) if (target := _target(connection, name)) is not None}
    return ServerReading(
        reading.cores, reading.memory_total_bytes, reading.memory_used_bytes, reading.models,
        ready, frozenset(model.name for model in index), targets,
    )  # fmt: skip


def parse_metrics(text: str) -> ServerReading:
    """Read what /metrics says. Raises UnreachableError if it is not that of a Gangway server."""
    totals: dict[str, float] = {}
    models: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        if line.startswith("#") or (sample := _SAMPLE.fullmatch(line)) is None:
            continue
        name, labels, value = sample[1], sample[2] or "", float(sample[3])
        if (model := _MODEL.search(labels)) is None:
            totals[name] = totals.get(name, 0.0) + value
        else:
            of_model = models.setdefault(re.sub(r"\\(.)", r"\1", model[1]), {})
            of_model[name] = of_model.get(name, 0.0) + value
    if "gangway_cores" not in totals:
        raise UnreachableError("/metrics are not those of a Gangway server")
    return ServerReading(
        cores=int(totals["gangway_cores"]),
        memory_total_bytes=totals.get("nv_cpu_memory_total_bytes", 0.0),
        memory_used_bytes=totals.get("nv_cpu_memory_used_bytes", 0.0),
        models={name: _model_reading(values) for name, values in models.items()},
    )


def demands(before: Mapping[str, ServerReading], now: Mapping[str, ServerReading], seconds: float) -> dict[str, Demand]:
    """Return the demand for each model between two readings of the servers, by name."""
    counts: dict[str, list[float]] = {}
    for server, reading in now.items():
        former = before.get(server)
        for name, model in reading.models.items():
            earlier = former.models.get(name, ModelObservation()) if former else ModelObservation()
            of_model = counts.setdefault(name, [0.0, 0.0, 0.0])
            pairs = ((earlier.requests, model.requests), (earlier.met, model.met), (earlier.missed, model.missed))
            for place, (old, new) in enumerate(pairs):
                of_model[place] += new - old if new >= old else new
    return {
        name: Demand(requests / seconds, met / (met + missed) if met + missed else None)
        for name, (requests, met, missed) in counts.items()
    }


def guessed_model(name: str, request_us: float) -> MeasuredModel:
    """Return a model of which only the time of a request is known, and taken to be that on one core."""
    piece_us = request_us / PIECES
    layers = (((piece_us,),),) * PIECES
    return MeasuredModel(
        model_name=name, cpu="", target="", cores=(1,), latency_us=layers, slope=((0.0,),) * PIECES,
        tasks=((1,),) * PIECES, memory_us=(0.0,) * PIECES, compute_us=(piece_us,) * PIECES, batches=(1,),
        batch_us=layers, isolated_us=((request_us,),), together_us=((request_us,),),
        kernel_rows=(0,) * PIECES, kernel_tasks=(0,) * PIECES,
    )  # fmt: skip


def _model_reading(values: Mapping[str, float]) -> ModelObservation:
    def sum_of(*names: str) -> float:
        return sum(values.get(name, 0.0) for name in names)

    return ModelObservation(
        requests=sum_of("nv_inference_request_success", "nv_inference_request_failure", "gangway_requests_in_flight"),
        compute_s=sum_of("gangway_compute_duration_seconds_sum"),
        answered=sum_of("gangway_compute_duration_seconds_count"),
        met=sum_of("gangway_qos_met_total"),
        missed=sum_of("gangway_qos_missed_total"),
        memory_bytes=sum_of("gangway_weights_bytes", "gangway_arena_bytes"),
    )


def _fetch_metrics(server: ServerAddress, timeout_s: float) -> str:
    where = f"{server.bracketed}:{server.metrics_port}"
    connection = http.client.HTTPConnection(server.host, server.metrics_port, timeout=timeout_s)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            raise UnreachableError(f"http://{where}/metrics answers with status {answer.status}")
        return answer.read().decode()
    except (OSError, http.client.HTTPException) as error:
        raise UnreachableError(f"no metrics at http://{where}/metrics ({error or type(error).__name__})") from error
    finally:
        connection.close()


def _target(connection: ServerConnection, model: str) -> Qos | None:
    """Return a model's latency target, None if it has none or has just been unloaded."""
    try:
        config = connection.model_config(model).config
        text = config.parameters[QOS_PARAMETER].string_value if QOS_PARAMETER in config.parameters else ""
        return parse_qos(text) if text else None
    except (RefusedError, WorkloadError):
        return None
