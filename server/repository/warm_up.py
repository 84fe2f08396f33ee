"""`model_warmup` of config.pbtxt: requests that a model answers before it is ready.

They are checked as clients' requests are, and go the same way, from the supervisor's own io segment.
"""

import math
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gangway.artifact.files import file_beside
from gangway.executor.frames import join_strings
from gangway.protos import grpc_service_pb2 as pb
from gangway.protos.model_config_pb2 import ModelConfig, ModelWarmup
from gangway.server.errors import ConfigError, RequestError
from gangway.server.messages import ModelReady
from gangway.server.models.config import datatype_name
from gangway.server.models.sequences import END, ID, START
from gangway.server.models.served import Models, item_bytes
from gangway.server.repository.trials import Sizes, run_once
from gangway.server.requests.data_plane import DataPlane
from gangway.server.requests.ensemble_calls import EnsembleCall
from gangway.server.requests.sequence_calls import alone
from gangway.server.requests.validation import Planner
from gangway.server.supervisor.scheduler import ModelLoadError

FOLDER: Final = "warmup"  # in the model's folder: what `input_data_file` names
MAX_RUNS: Final = 10_000  # of all samples together
MAX_SAMPLE_BYTES: Final = 256 << 20  # as much as one message may have


@dataclass(frozen=True)
class Sample:
    """One request, to be sent `count` times: a ModelInferRequest without contents, and the contents."""

    name: str
    header: bytes
    contents: tuple[bytes, ...]
    count: int


def samples_of(config: ModelConfig, folder: Path) -> list[Sample]:
    """Return the samples of a completed configuration. Raises ConfigError, also where a file cannot be read."""
    samples = [_sample(config, warmup, folder) for warmup in config.model_warmup]
    if (runs := sum(sample.count for sample in samples)) > MAX_RUNS:
        raise ConfigError(f"model_warmup: {runs} requests in all, at most {MAX_RUNS} are possible")
    return samples


def warm_up(plane: DataPlane, ready: ModelReady, samples: list[Sample], stop: threading.Event) -> list[Sizes]:
    """Have a loaded model answer the samples; return their sizes of symbolic dimensions.

    Blocks until it has, or `stop` is set. Raises ModelLoadError.
    """
    planner = Planner(Models().updated(ready))
    sizes = []
    for sample in samples:
        try:
            plan = planner.plan(sample.header, has_raws=True)
            assert not isinstance(plan.call, EnsembleCall), "an ensemble with samples is refused"
            contents = plan.contents([memoryview(content) for content in sample.contents])
            call, tensors = plan.call, plan.model.sequence
            if plan.sequence is not None and tensors is not None:
                call = alone(call, tensors, plan.sequence)
            for _ in range(sample.count):
                run_once(plane, call, contents, stop, plan.shapes.rows)
        except (RequestError, ModelLoadError, ValueError) as error:
            raise ModelLoadError(f"model_warmup '{sample.name}': {error}") from error
        sizes.append(plan.shapes.sizes)
    return sizes


def _sample(config: ModelConfig, warmup: ModelWarmup, folder: Path) -> Sample:
    from gangway.artifact.datatypes import DTYPES  # noqa: PLC0415 - numpy: few models have samples, every start waits

    where = f"model_warmup '{warmup.name}'"
    if warmup.batch_size < 1 or (warmup.batch_size > 1 and not config.max_batch_size):
        expected = f"1 to {config.max_batch_size}" if config.max_batch_size else "1"
        raise ConfigError(f"{where}: batch_size is {warmup.batch_size}, expected {expected}")
    request = pb.ModelInferRequest(model_name=config.name)
    if config.HasField("sequence_batching"):  # one that begins and ends with the request
        request.parameters[ID].int64_param = 1
        request.parameters[START].bool_param = request.parameters[END].bool_param = True
    contents = []
    for name, given in warmup.inputs.items():
        if min(given.dims, default=0) < 0:
            raise ConfigError(f"{where}: input '{name}' needs fixed dims, got {list(given.dims)}")
        shape = [warmup.batch_size] * bool(config.max_batch_size) + list(given.dims)
        datatype = datatype_name(given.data_type)
        if datatype not in (*DTYPES, "BYTES"):
            raise ConfigError(f"{where}: input '{name}' has no data_type")
        if math.prod(shape) * (item_bytes(datatype) or 1) > MAX_SAMPLE_BYTES:
            raise ConfigError(f"{where}: input '{name}' is larger than {MAX_SAMPLE_BYTES} bytes")
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        contents.append(_content(given, datatype, math.prod(shape), f"{where}: input '{name}'", folder))
    return Sample(warmup.name, request.SerializeToString(), tuple(contents), max(warmup.count, 1))


def _content(given: ModelWarmup.Input, datatype: str, elements: int, where: str, folder: Path) -> bytes:
    match given.WhichOneof("input_data_type"):
        case "zero_data":
            return join_strings([b""] * elements) if datatype == "BYTES" else bytes(elements * item_bytes(datatype))
        case "random_data":
            return _random(datatype, elements)
        case "input_data_file":
            return _file(folder, given.input_data_file, where)
        case _:
            raise ConfigError(f"{where}: expected zero_data, random_data or input_data_file")


def _file(folder: Path, name: str, where: str) -> bytes:
    try:
        path = file_beside(folder / FOLDER, name)
        if path.stat().st_size > MAX_SAMPLE_BYTES:
            raise ConfigError(f"{where}: input_data_file '{name}' is larger than {MAX_SAMPLE_BYTES} bytes")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: input_data_file '{name}' cannot be read: {error}") from error


def _random(datatype: str, elements: int) -> bytes:
    """Return the same numbers each time: floats in [0, 1), integers in 0 to 127, which most models can do with."""
    import numpy as np  # noqa: PLC0415

    from gangway.artifact.datatypes import DTYPES  # noqa: PLC0415

    source = np.random.default_rng(0)
    if datatype == "BYTES":
        return join_strings([b"%d" % value for value in source.integers(0, 128, elements)])
    dtype = DTYPES[datatype]
    if dtype.kind == "f":
        return source.random(elements).astype(dtype).tobytes()
    return source.integers(0, 2 if dtype.kind == "b" else 128, elements).astype(dtype).tobytes()
