"""What a run needs before the load begins: each model's request, isolated latency and target."""

import json
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType

from gangway.clients.channel import Connect, call_blocking
from gangway.clients.connection import ServerConnection
from gangway.clients.errors import InputError, RefusedError
from gangway.clients.inputs import (
    Array,
    TensorMetadata,
    file_tensors,
    infer_request,
    later_names,
    random_tensors,
    shaped,
    with_chosen_sizes,
    zero_tensor,
)
from gangway.clients.open_loop import CLIENTS, RAW, real_time_priority
from gangway.clients.tls import Tls
from gangway.protos import grpc_service_pb2 as pb
from gangway.workload.mix import Mix, MixModel
from gangway.workload.outcomes import Targets
from gangway.workload.qos import Qos, WorkloadError, parse_qos

QOS_PARAMETER = "qos_ms"  # of a model's configuration
LEAST_PARAMETER = "gangway_least_target_ms"  # of a configuration as a Gangway server completes it
REPORT_PARAMETER = "gangway_stats"  # of a request: its answer reports its target
ISOLATED_S, MIN_REQUESTS, MAX_REQUESTS = 1.0, 5, 100  # of a measurement: its time, and its requests
FROM_CONFIG = "config"
GENERATED = ("random", "zero")  # where values are from, if they are in no files


@dataclass(frozen=True)
class Workload:
    """A mix with shares as weights, one or several sets of targets by name, and isolated latencies (microseconds)."""

    mix: Mix
    targets_us: Mapping[str, Targets]
    isolated_us: Mapping[str, float]


def prepare_requests(
    connection: ServerConnection,
    names: Sequence[str],
    source: str,
    seed: int,
    shapes: Mapping[str, Sequence[int]] = MappingProxyType({}),
    left_out: dict[str, str] | None = None,
) -> dict[str, bytes]:
    """Return a serialised request of one row per model, after checking that each is answered.

    `left_out`: gets the models that are not, with the reason, unless all are; None: one that is not is an error.
    `source`: "random", "zero", or a folder with MODEL/INPUT.npy, or MODEL/INPUT for the one element of BYTES.
    `shapes`: of inputs or dimensions, by name. Raises RefusedError, InputError, UnreachableError.
    """
    requests = {}
    inputs_of = {name: connection.model_metadata(name).inputs for name in names}
    dimensions_of = {name: cache(partial(connection.open_dimensions, name)) for name in names}
    known = {name: {each.name for each in inputs} for name, inputs in inputs_of.items()}
    if shapes.keys() - set().union(*known.values()):
        known = {name: known[name] | later_names(inputs_of[name], dimensions_of[name]()) for name in names}
    if unknown := shapes.keys() - (all_known := set().union(*known.values())):
        raise InputError(f"--shape: no model has an input '{min(unknown)}'; they have {', '.join(sorted(all_known))}")
    for name, inputs in inputs_of.items():
        own = {key: sizes for key, sizes in shapes.items() if key in known[name]}
        try:
            tensors = shaped(inputs, own, dimensions_of[name])
            if source in GENERATED:
                tensors, _ = with_chosen_sizes(tensors, dimensions_of[name])
            requests[name] = _answered(connection, name, _values(name, tensors, source, seed), inputs)
        except (RefusedError, InputError) as error:
            if left_out is None or (name == names[-1] and not requests):
                raise
            left_out[name] = str(error)
    return requests


def _answered(
    connection: ServerConnection, name: str, values: Mapping[str, Array], inputs: Sequence[TensorMetadata]
) -> bytes:
    request = infer_request(name, "", {each.name: (each.datatype, values[each.name]) for each in inputs})
    answer = connection.infer(request)
    if not answer.outputs or any(not raw for raw in answer.raw_output_contents):
        raise RefusedError(f"{name}: the answer holds no values")
    return request.SerializeToString()


def ready_models(connection: ServerConnection) -> list[str]:
    """Return the names of the server's models that are ready. Raises InputError if there is none."""
    names = sorted(connection.ready_models())
    if not names:
        raise InputError(f"{connection.url} has no model that is ready")
    return names


def even_mix(names: Iterable[str]) -> Mix:
    """Return a mix of models with equal weights."""
    return Mix("all models", tuple(MixModel(name, 1.0) for name in names))


def measure_isolated(
    url: str, requests: Mapping[str, bytes], timeout_s: float, tls: Tls | None = None, client: str = RAW
) -> dict[str, float]:
    """Return each model's median latency in microseconds, as this client sees it, one request at a time.

    A Gangway server on this machine measures a target of "3x" as the raw client does. Raises ClientError.
    """
    connect = CLIENTS[client]
    with real_time_priority():
        return {name: _isolated_us(connect, url, name, request, timeout_s, tls) for name, request in requests.items()}


def configured_targets(connection: ServerConnection, requests: Mapping[str, bytes]) -> dict[str, Qos | None]:
    """Return the target in each model's configuration, None where it has none. Raises ClientError, WorkloadError.

    A server that reports the targets of requests, as Gangway does, resolves multiples itself.
    """
    targets: dict[str, Qos | None] = {}
    for name, request in requests.items():
        parameters = connection.model_config(name).config.parameters
        text = parameters[QOS_PARAMETER].string_value if QOS_PARAMETER in parameters else ""
        qos = parse_qos(text) if text else None
        if qos is not None and qos.multiple is not None:
            qos = _resolved_by_server(connection, request) or qos
        targets[name] = qos
    return targets


def least_targets_us(connection: ServerConnection, names: Sequence[str]) -> dict[str, float]:
    """Return the lower bound of targets that are multiples, by model, as a Gangway server reports it, else 0.

    Raises ClientError.
    """
    parameters = {name: connection.model_config(name).config.parameters for name in names}
    return {
        name: float(known[LEAST_PARAMETER].string_value) * 1e3 if LEAST_PARAMETER in known else 0.0
        for name, known in parameters.items()
    }


def parse_levels(text: str) -> tuple[Qos, ...]:
    """Read "3x,4x,5x" or "15". Raises WorkloadError."""
    return tuple(parse_qos(part) for part in text.split(","))


def resolve(
    mix: Mix,
    levels: Sequence[Qos],
    configured: Mapping[str, Qos | None],
    isolated_us: Mapping[str, float],
    least_us: Mapping[str, float],
) -> Workload:
    """Resolve targets and weights. No multiple of `isolated_us` is less than `least_us`.

    `levels` hold for every model, each one under its own name; none: the mix's own targets, else those that the server
    has in its configuration, under the name "qos". Weights that follow targets follow the first level.
    Raises WorkloadError.
    """
    if not levels:
        own = tuple(replace(model, qos=model.qos or configured.get(model.name)) for model in mix.models)
        resolved = _floored(replace(mix, models=own), isolated_us, least_us).resolve(isolated_us)
        return Workload(resolved, {"qos": _targets_us(resolved)}, isolated_us)
    mixes = [_floored(mix.with_qos(level), isolated_us, least_us).resolve(isolated_us) for level in levels]
    targets = {str(level).replace(" ", ""): _targets_us(each) for level, each in zip(levels, mixes, strict=True)}
    return Workload(mixes[0], targets, isolated_us)


def parse_isolated(text: str, names: Sequence[str]) -> dict[str, float]:
    """Read "resnet50=38,googlenet=25.7" (milliseconds), or an earlier result's file; return microseconds per model.

    Raises WorkloadError, OSError.
    """
    isolated = _isolated_of_result(Path(text)) if text.endswith(".json") else _isolated_of_text(text)
    if wrong := [name for name, us in isolated.items() if not us > 0]:
        raise WorkloadError(f"--isolated: a latency must be positive: {', '.join(wrong)}")
    if missing := [name for name in names if name not in isolated]:
        raise WorkloadError(f"--isolated: no latency of {', '.join(missing)}")
    return {name: isolated[name] for name in names}


def _isolated_of_result(path: Path) -> dict[str, float]:
    try:
        models = json.loads(path.read_text())["models"]
        return {str(model["name"]): float(model["isolated_us"]) for model in models}
    except (ValueError, KeyError, TypeError) as error:
        raise WorkloadError(f"--isolated: {path} is no result of gangway perf") from error


def _isolated_of_text(text: str) -> dict[str, float]:
    isolated = {}
    for part in text.split(","):
        name, _, milliseconds = part.strip().partition("=")
        try:
            isolated[name] = float(milliseconds) * 1000
        except ValueError as error:
            raise WorkloadError(f'--isolated: expected "MODEL=MS,MODEL=MS", got "{part}"') from error
    return isolated


def _resolved_by_server(connection: ServerConnection, request: bytes) -> Qos | None:
    """Return the target that the server has for a request, in milliseconds; None if it does not say."""
    asking = pb.ModelInferRequest.FromString(request)
    asking.parameters[REPORT_PARAMETER].bool_param = True
    target_us = connection.infer(asking).parameters["target_us"].int64_param
    return Qos(milliseconds=target_us / 1000) if target_us else None


def _values(model: str, inputs: Sequence[TensorMetadata], source: str, seed: int) -> dict[str, Array]:
    if source == "random":
        return random_tensors(inputs, 1, seed)
    if source == "zero":
        return {tensor.name: zero_tensor(tensor, 1) for tensor in inputs}
    return file_tensors(inputs, {tensor.name: _file(Path(source, model), tensor.name) for tensor in inputs})


def _file(folder: Path, name: str) -> Path:
    whole = folder / name
    return whole if whole.is_file() else folder / f"{name}.npy"


def _floored(mix: Mix, isolated_us: Mapping[str, float], least_us: Mapping[str, float]) -> Mix:
    """Return the mix with milliseconds in place of those multiples that would be less than that."""

    def floored(model: MixModel) -> MixModel:
        qos, floor_us = model.qos, least_us.get(model.name, 0.0)
        if qos is None or qos.multiple is None or not floor_us or qos.resolve_us(isolated_us[model.name]) >= floor_us:
            return model
        return replace(model, qos=Qos(milliseconds=floor_us / 1e3))

    return replace(mix, models=tuple(map(floored, mix.models)))


def _targets_us(mix: Mix) -> Targets:
    return tuple(None if model.qos is None else model.qos.resolve_us(None) for model in mix.models)


def _isolated_us(connect: Connect, url: str, name: str, request: bytes, timeout_s: float, tls: Tls | None) -> float:
    latencies: list[float] = []
    with closing(connect(url, [request], timeout_s, timeout_s, tls)) as channel:
        begin_s = time.monotonic()
        while len(latencies) < MIN_REQUESTS or (
            len(latencies) < MAX_REQUESTS and time.monotonic() - begin_s < ISOLATED_S
        ):
            sent_s = time.monotonic()
            call_blocking(channel, len(latencies), 0, f"{url}: {name}", timeout_s)
            latencies.append((time.monotonic() - sent_s) * 1e6)
    return statistics.median(latencies)
