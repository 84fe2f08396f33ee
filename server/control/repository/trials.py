"""What a loaded model goes through before clients get it: its owner's samples, then the server's own trial requests.

All of them are requests like those of clients, from the supervisor's own io segment. Samples (`model_warmup` of
config.pbtxt) are checked as clients' requests are.
"""

import asyncio
import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gangway.artifact.format import Engine, Manifest
from gangway.base.files import file_beside, words_of
from gangway.executor import _native
from gangway.executor.frames import join_strings
from gangway.protos import grpc_service_pb2 as pb
from gangway.protos.model_config_pb2 import ModelConfig, ModelWarmup
from gangway.scheduler.policies.targets import alone_us
from gangway.server.control.repository.loaded import IsolatedLatency, TrialResult
from gangway.server.control.repository.trial_runs import SymbolSizes, Trial, TrialError, TrialRunner, possible_sizes
from gangway.server.errors import ConfigError, ModelLoadError, RequestError
from gangway.server.messages import ModelReady, VariantReady
from gangway.server.models.sequences import END, ID, START
from gangway.server.models.served import Models, ServedModel
from gangway.server.models.settings import ModelBatching
from gangway.server.models.tensors import datatype_name, item_bytes
from gangway.server.requests.data_plane import DataPlane
from gangway.server.requests.ensembles import EnsembleCodec
from gangway.server.requests.python_codec import PythonCodec
from gangway.server.requests.states import standalone_codec
from gangway.server.requests.validation import RequestPlanner

_log = logging.getLogger(__name__)

FOLDER: Final = "warmup"  # in the model's folder: what `input_data_file` names
MAX_RUNS: Final = 10_000  # of all samples together
MAX_SAMPLE_BYTES: Final = 256 << 20  # as much as one message may have
MAX_SAMPLES_BYTES: Final = 1 << 30  # of all samples together, which are in memory at the same time


class ModelTrials:
    """One model at a time. `plane`: the supervisor's own.

    `least_target_us`: what any request costs a client where others keep the machine busy.
    """

    def __init__(self, plane: DataPlane, least_target_us: float) -> None:
        self._least_target_us = least_target_us
        self._turn = asyncio.Lock()
        self._compute_us: dict[str, float] = {}  # by key of the artifact: the least of all measurements
        self._runner = TrialRunner(plane, threading.Event())

    async def try_model(
        self,
        ready: ModelReady,
        manifest: Manifest,
        config: ModelConfig,
        folder: Path,
        declared: Sequence[SymbolSizes] = (),
    ) -> TrialResult:
        """Warm a loaded model up and measure it. `declared`: sizes that it will have.

        Raises ConfigError, ModelLoadError.
        """
        async with self._turn:
            samples = await asyncio.to_thread(samples_of, config, folder)
            warmed = await asyncio.to_thread(warm_up, self._runner, ready, samples)
            sizes = possible_sizes(ServedModel.of(ready), *declared, *warmed, manifest.trial_sizes)
            isolated = await self._measure(ready, manifest.key, sizes, manifest.is_stand_in)
            mixed_rows, is_untested = "", False
            if manifest.engine is Engine.ONNXRUNTIME and not manifest.is_stand_in and ModelBatching.of(config).joins:
                mixed_rows, is_untested = await self._mixed_rows(ready, manifest, sizes, isolated)
        known = isolated if isinstance(isolated, IsolatedLatency) else None
        return TrialResult(known, self._least_target_us, mixed_rows, is_untested)

    async def try_variant(self, ready: ModelReady, variant: VariantReady) -> IsolatedLatency | None:
        """Return how fast a model is alone where it is compiled for certain sizes; None if that cannot be seen."""
        model = Models().updated(ready).with_variant(variant).served_as(ready.name, ready.version)
        assert model is not None, "it is ready"
        sizes = dict(zip(ready.symbols, variant.sizes, strict=True))
        async with self._turn:
            try:
                compute_us = await asyncio.to_thread(self._runner.measure_isolated, model, [sizes])
            except ModelLoadError as error:
                _log.info("%s, version %d: a compiled size is not measured: %s", ready.name, ready.version, error)
                return None
        return self.latency_of(compute_us)

    def latency_of(self, compute_us: float) -> IsolatedLatency:
        """Return how fast a model is alone of which a row is computed so fast."""
        return IsolatedLatency(compute_us, alone_us(compute_us), self._least_target_us)

    def stop(self) -> None:
        """End what is being tried."""
        self._runner.stop.set()

    async def _measure(
        self, ready: ModelReady, key: str, sizes: Sequence[SymbolSizes], is_brief: bool
    ) -> IsolatedLatency | ModelLoadError:
        """Return how fast the model is alone, or why no run has succeeded of one that may not take zeros.

        While others are served the model is not alone. An earlier measurement counts if it was quicker. Code in Python
        may do more than compute, so it gets no requests that nobody has made.
        """
        if ready.engine is Engine.PYTHON:
            return ModelLoadError("a Python model gets no trial requests")
        try:
            compute_us = await asyncio.to_thread(self._runner.measure_isolated, ServedModel.of(ready), sizes, is_brief)
        except ModelLoadError as error:
            may_fail = ready.engine is Engine.ONNXRUNTIME or ready.tail  # zeros need not be valid there
            if not may_fail or self._runner.stop.is_set():
                raise
            _log.info(
                "%s, version %d: its time alone is not known before its first request, because no trial request"
                " succeeded: %s",
                ready.name,
                ready.version,
                error,
            )
            return error
        if len(self._compute_us) >= _native.MAX_MODELS:
            self._compute_us.clear()
        self._compute_us[key] = min(compute_us, self._compute_us.get(key, compute_us))
        return self.latency_of(self._compute_us[key])

    async def _mixed_rows(
        self,
        ready: ModelReady,
        manifest: Manifest,
        sizes: Sequence[SymbolSizes],
        measured: IsolatedLatency | ModelLoadError,
    ) -> tuple[str, bool]:
        """Return why requests must not share a batch, and whether that is only because no trial could show it.

        The reason is empty if rows are known not to influence each other.
        """
        if manifest.mixes_rows:
            return manifest.mixes_rows, False
        if not ready.batched:
            return "it is compiled for each number of rows", False
        if isinstance(measured, ModelLoadError) and not isinstance(measured, TrialError):
            return f"no trial run has succeeded: {measured}", True  # whatever the inputs: no other would
        from gangway.server.control.repository.mixed_rows import why_rows_mix  # noqa: PLC0415 - numpy: few models need it

        try:
            return await asyncio.to_thread(why_rows_mix, self._runner, ServedModel.of(ready), sizes), False
        except TrialError as error:
            return str(error), True


@dataclass(frozen=True)
class WarmUpSample:
    """One request, to be sent `count` times: a ModelInferRequest without contents, and the contents."""

    name: str
    header: bytes
    contents: tuple[bytes, ...]
    count: int


def samples_of(config: ModelConfig, folder: Path) -> list[WarmUpSample]:
    """Return the samples of a completed configuration. Raises ConfigError, also where a file cannot be read."""
    samples, left_bytes = [], MAX_SAMPLES_BYTES
    for warmup in config.model_warmup:
        samples.append(_sample(config, warmup, folder, left_bytes))
        left_bytes -= sum(map(len, samples[-1].contents))
    if (runs := sum(sample.count for sample in samples)) > MAX_RUNS:
        raise ConfigError(f"model_warmup: {runs} requests in all, at most {MAX_RUNS} are possible")
    return samples


def warm_up(runner: TrialRunner, ready: ModelReady, samples: Sequence[WarmUpSample]) -> list[SymbolSizes]:
    """Have a loaded model answer the samples; return their sizes of symbolic dimensions.

    Blocks until it has, or the runner is stopped. Raises ModelLoadError.
    """
    planner = RequestPlanner(Models().updated(ready))
    sizes = []
    for sample in samples:
        try:
            plan = planner.plan(sample.header, has_raws=True)
            assert not isinstance(plan.codec, EnsembleCodec), "an ensemble with samples is refused"
            contents = plan.contents([memoryview(content) for content in sample.contents])
            call, tensors = plan.codec, plan.model.sequence
            if plan.sequence is not None and tensors is not None:
                call = standalone_codec(call, tensors, plan.sequence)
            if isinstance(call, PythonCodec):
                contents = call.with_about(contents)
            for _ in range(sample.count):
                runner.run_once(Trial(call, contents, plan.shapes.rows))
        except (RequestError, ModelLoadError, ValueError) as error:
            raise ModelLoadError(f"model_warmup '{sample.name}': {error}") from error
        sizes.append(plan.shapes.sizes)
    return sizes


def _sample(config: ModelConfig, warmup: ModelWarmup, folder: Path, left_bytes: int) -> WarmUpSample:
    from gangway.artifact.datatypes import DTYPES  # noqa: PLC0415 - numpy: few models have samples, every start waits

    where = f"model_warmup '{warmup.name}'"
    if warmup.batch_size < 1 if config.max_batch_size else warmup.batch_size > 1:  # 0 of a model without batches: one
        expected = f"1 to {config.max_batch_size}" if config.max_batch_size else "0 or 1"
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
        left_bytes -= math.prod(shape) * (item_bytes(datatype) or 1)
        if left_bytes < 0:
            raise ConfigError(f"model_warmup: the samples have more than {MAX_SAMPLES_BYTES} bytes in all")
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        contents.append(_content(given, datatype, math.prod(shape), f"{where}: input '{name}'", folder))
    return WarmUpSample(warmup.name, request.SerializeToString(), tuple(contents), max(warmup.count, 1))


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
        raise ConfigError(f"{where}: input_data_file '{name}' cannot be read: {words_of(error)}") from error


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
