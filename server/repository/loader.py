"""From a repository entry to a model that can answer requests: compile, load, warm up, measure. And back."""

import asyncio
import base64
import heapq
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gangway.artifact.format import WEIGHTS_FILE, Engine, Manifest
from gangway.artifact.host_limits import memory_limit_bytes
from gangway.artifact.staging import staging_bytes
from gangway.executor import _native
from gangway.executor.memory_budget import memory_budget
from gangway.executor.peer import MAX_MESSAGE_BYTES
from gangway.protos.model_config_pb2 import ModelConfig
from gangway.scheduler.gangs import LEAST_LEASES
from gangway.scheduler.messages import LoadModel
from gangway.scheduler.profiles import estimated_layer_us
from gangway.server.errors import ConfigError
from gangway.server.messages import ModelReady, to_json
from gangway.server.models.config import (
    BATCHING_OFF,
    BATCHING_PARAMETER,
    BUCKETS_PARAMETER,
    buckets_of,
    log_without_effect,
    require_complete,
)
from gangway.server.models.sequences import initial_state_files
from gangway.server.models.served import ServedModel, open_symbols
from gangway.server.models.settings import (
    ModelBatching,
    ModelLimits,
    RateLimits,
    label_files,
    show_dynamic_batching,
    tell_batching,
)
from gangway.server.options.models import DEFAULT_MAX_BATCH_SIZE
from gangway.server.repository.compile_jobs import CompileError, Compiler
from gangway.server.repository.completion import (
    complete_config,
    computable_rows,
    counts_rows,
    fixed_sizes,
    is_one_batch,
    max_rows,
    optional_inputs,
    tell_engine,
    tell_least_target,
)
from gangway.server.repository.profiles import BackgroundProfiler
from gangway.server.repository.repository import ModelVersion
from gangway.server.repository.request_cost import measure_request_cost_us
from gangway.server.repository.shapes import NEVER_COMPILED, ShapeCache, Shaped
from gangway.server.repository.targets import profile_message, resolve_qos_us, warn_of_target
from gangway.server.repository.trials import Isolated, Sizes, TrialError, measure_isolated, trial_sizes
from gangway.server.repository.warm_up import samples_of, warm_up
from gangway.server.requests.data_plane import DataPlane
from gangway.server.supervisor.front_ends import FrontEndControl
from gangway.server.supervisor.scheduler import ModelLoadError, SchedulerControl
from gangway.server.supervisor.shared_memory import arenas_bytes

# A model that can answer requests, as the supervisor knows it.


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """`isolated`: how fast it is when it is alone, if that is known. `shaped`: what is compiled for certain sizes."""

    entry: ModelVersion
    ready: ModelReady
    isolated: Isolated | None
    engine: Engine
    shaped: Shaped | None


# What several front ends cannot serve.


def require_one_front_end(config: ModelConfig, front_ends: int) -> None:
    """Raise ConfigError for a model whose state is in the front end that got the request."""
    if front_ends > 1 and config.HasField("sequence_batching"):
        raise ConfigError(
            "sequence_batching: a sequence's requests may come over several connections, so over several front ends,"
            f" which do not share its state; --front-ends is {front_ends}, and must be 1 for this model"
        )


# ConfigError is a ValueError; a thread that cannot be started is a RuntimeError.
LOAD_ERRORS = (CompileError, ModelLoadError, ValueError, OSError, RuntimeError)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelFiles:
    """Files in a model's folder that its configuration names, beside the model: by output, by input."""

    labels: tuple[tuple[str, str], ...]
    initial_states: tuple[tuple[str, str], ...]


class ModelLoader:
    """Compiles models one after the other, and measures them so. What clients are told is not its business.

    `complete_configs`: what a configuration leaves out is taken from the model. `batching`: requests may be joined.
    `leases`: so many queries of a model can be under way. `default_max_batch_size`: of models without a configuration.
    `way_back_us`: what policies reckon with for an answer's way to the client.
    """

    def __init__(
        self,
        compiler: Compiler,
        scheduler: SchedulerControl,
        front_end: FrontEndControl,
        plane: DataPlane,
        max_shapes: int,
        profiles: BackgroundProfiler,
        front_ends: int,
        complete_configs: bool = True,
        rates: RateLimits = RateLimits(),  # noqa: B008 - frozen
        batching: bool = True,
        leases: int = LEAST_LEASES,
        default_max_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
        workers: int = 1,
        way_back_us: float = 0.0,
    ) -> None:
        self._compiler = compiler
        self._scheduler = scheduler
        self._front_end = front_end
        self._plane = plane
        self._max_shapes = max_shapes
        self._profiles = profiles
        self._front_ends = front_ends
        self._complete_configs = complete_configs
        self._rates = rates
        self._batching = batching
        self._leases = leases
        self._default_max_batch_size = default_max_batch_size
        self._way_back_us = way_back_us
        self._free_ids = list(range(_native.MAX_MODELS))
        self._variants = ShapeCache(compiler, scheduler, front_end, self._spec, max_shapes, self._computable_rows)
        self._trials = asyncio.Lock()
        self._isolated: dict[str, Isolated] = {}  # by key of the artifact: the best there was, in quieter times maybe
        self.request_cost_us = 0.0  # a client's, whatever the model; 0 until the first model is there
        self._stop = threading.Event()
        self._remaking: dict[str, asyncio.Task[None]] = {}  # by key of the artifact
        self.on_model_lost: Callable[[int, str, bool], None] = lambda model_id, reason, at_fault: None
        scheduler.on_model_lost = self._lost
        scheduler.on_artifact_lost = self._artifact_lost
        self._workers = workers
        self._mapped_bytes: dict[int, int] = {}  # of weights, by model
        scheduler.on_model_unloaded = self._forget

    async def look_up(self, entries: Iterable[ModelVersion]) -> None:
        """Find in one go what the cache has of models that are about to be loaded."""
        await self._compiler.look_up([(entry.path, entry.stamp) for entry in entries if not entry.is_ensemble])

    async def load(self, entry: ModelVersion) -> LoadedModel:
        """Return a model that workers have and that works. Raises one of LOAD_ERRORS, having left nothing behind."""
        begin = time.monotonic()
        if not self._complete_configs:
            require_complete(entry.config)
        require_one_front_end(entry.config, self._front_ends)
        files = ModelFiles(
            labels=tuple(label_files(entry.folder, entry.config).items()),
            initial_states=tuple(initial_state_files(entry.folder, entry.config).items()),
        )
        limits = ModelLimits.of(entry.config, entry.name, entry.version, self._rates)
        log_without_effect(entry.name, entry.without_effect)
        optional = optional_inputs(entry.config)
        with_batch = entry.config.max_batch_size > 0
        manifest = await self._compiler.compile(
            entry.name, entry.path, optional=optional, stamp=entry.stamp, with_batch=with_batch
        )
        may_differ = manifest.engine is Engine.ONNXRUNTIME and not is_one_batch(manifest.inputs)
        batch = 0 if may_differ else self._default_max_batch_size
        config = complete_config(entry.config, entry.name, manifest.inputs, manifest.outputs, manifest.batched, batch)
        if not config.max_batch_size and manifest.engine is Engine.NATIVE and not is_one_batch(manifest.inputs):
            manifest = await self._compiler.compile(entry.name, entry.path, whole=True)
        tell_batching(config, self._batching)
        symbols = open_symbols(manifest.inputs, counts_rows(config, manifest))
        declared = buckets_of(config, symbols)
        if declared and config.HasField("sequence_batching"):
            raise ConfigError(
                f"parameter {BUCKETS_PARAMETER}: a model with sequences is compiled for one shape or none"
            )
        if len(declared) > self._max_shapes:
            raise ConfigError(f"{len(declared)} buckets are declared, at most {self._max_shapes} shapes are compiled")
        if not declared and (sizes := fixed_sizes(config, manifest.inputs, symbols)):
            manifest = await self._compiled_for(entry, manifest, sizes, counts_rows(config, manifest))
        tell_engine(config, manifest.engine, manifest.fallback_reason)
        self._require_memory(manifest)
        rows = max_rows(config, counts_rows(config, manifest), self._computable_rows(manifest))
        batching = ModelBatching.of(config)
        if not (entry.config.input and entry.config.output):
            show_dynamic_batching(config)
        spec = limits.give(batching.give(self._spec(f"{entry.name}, version {entry.version}", manifest, rows)))
        await self._scheduler.load(spec)
        self._mapped_bytes[spec.model_id] = _weights_bytes(manifest)
        try:
            model = await self._try(entry, spec, manifest, config, declared, files)
        except BaseException:
            self._scheduler.unload(spec.model_id)
            raise
        seconds = time.monotonic() - begin
        _log_ready(model, manifest.fallback_reason, seconds)
        return replace(model, ready=replace(model.ready, load_seconds=seconds))

    def announced(self, model: LoadedModel) -> None:
        """Clients have been told of a model: compile it for the sizes that they use."""
        if model.shaped is not None:
            self._variants.adopt(model.shaped)

    def withdrawn(self, model: LoadedModel) -> None:
        """Clients get it no more, though requests that have begun may still use it."""
        self._profiles.remove(model.ready.model_id)
        if model.shaped is not None:
            self._variants.forget(model.shaped)

    async def unloaded(self, model: LoadedModel, timeout_seconds: float) -> bool:
        """Return when that has happened; False if it takes too long."""
        return await self._scheduler.unloaded(model.ready.model_id, timeout_seconds)

    def unload(self, model: LoadedModel) -> None:
        """Give back all that a model takes. Nobody uses it any more."""
        self.withdrawn(model)
        if model.shaped is not None:
            self._variants.drop(model.shaped)
        self._scheduler.unload(model.ready.model_id)

    async def compile_shapes(self) -> None:
        """From now on compile models for the sizes of symbolic dimensions that requests have. Never returns."""
        await self._variants.run()

    def stop(self) -> None:
        """End what is being compiled or measured."""
        self._stop.set()
        for task in self._remaking.values():
            task.cancel()
        self._compiler.stop()

    async def _compiled_for(
        self, entry: ModelVersion, manifest: Manifest, sizes: Mapping[str, int], batched: bool
    ) -> Manifest:
        """Return the model compiled for the only sizes that its configuration allows, if that is possible."""
        if any(tensor.optional or tensor.datatype in NEVER_COMPILED for tensor in manifest.inputs):
            return manifest
        title = f"{entry.name}, {', '.join(f'{symbol}={size}' for symbol, size in sizes.items())}"
        try:
            compiled = await self._compiler.compile(title, entry.path, sizes)
        except CompileError as error:
            return replace(manifest, fallback_reason=str(error))
        return compiled if compiled.batched == batched else manifest

    async def _try(
        self,
        entry: ModelVersion,
        spec: LoadModel,
        manifest: Manifest,
        config: ModelConfig,
        declared: Sequence[tuple[int, ...]],
        files: ModelFiles,
    ) -> LoadedModel:
        ready = ModelReady(
            model_id=spec.model_id,
            name=entry.name,
            version=entry.version,
            config=_encoded(config),
            inputs=manifest.inputs,
            outputs=manifest.outputs,
            max_batch_size=config.max_batch_size,
            max_rows=spec.max_rows,
            batched=counts_rows(config, manifest),
            engine=manifest.engine,
            weights_bytes=_weights_bytes(manifest),
            labels=files.labels,
            initial_states=files.initial_states,
        )
        if (size_bytes := len(to_json(ready))) > MAX_MESSAGE_BYTES:
            raise ConfigError(f"tensors and configuration take {size_bytes} bytes, at most {MAX_MESSAGE_BYTES} can be")
        async with self._trials:
            samples = await asyncio.to_thread(samples_of, config, entry.folder)
            if not self.request_cost_us:  # before that, processes that start have the cores
                self.request_cost_us = await asyncio.to_thread(measure_request_cost_us, self._front_end.grpc)
            warmed = await asyncio.to_thread(warm_up, self._plane, ready, samples, self._stop)
            sizes = trial_sizes(ServedModel.of(ready), manifest.trial_sizes, warmed)
            isolated, failure = await self._measure(ready, manifest.key, sizes)
            if manifest.engine is Engine.ONNXRUNTIME and ModelBatching.of(config).joins:
                ready = await self._tested(ready, manifest, config, sizes, failure)
        tell_least_target(config, self._busy_cost_us)
        ready = replace(ready, config=_encoded(config))
        isolated_us = isolated.compute_us if isolated else 0.0
        ready = replace(ready, qos_us=resolve_qos_us(entry.qos, isolated), isolated_us=isolated_us)
        warn_of_target(ready, entry.qos, isolated, self.request_cost_us)
        self._scheduler.set_profile(profile_message(spec.model_id, ready, isolated))
        shaped = await self._variants.prepare(ready, entry.path, declared, spec)
        self._profiles.add(spec.model_id, manifest)
        return LoadedModel(entry, ready, isolated, manifest.engine, shaped)

    @property
    def _busy_cost_us(self) -> float:
        """What any request costs a client where others keep the machine busy."""
        return self.request_cost_us + self._way_back_us

    async def _tested(
        self, ready: ModelReady, manifest: Manifest, config: ModelConfig, sizes: Sequence[Sizes], failure: str
    ) -> ModelReady:
        """Return a model for onnxruntime as clients are told of it: joined only if rows are known not to mix.

        `failure`: why no further trial should be made.
        """
        reason = manifest.mixes_rows or failure
        if not reason:
            from gangway.server.repository.mixed_rows import why_rows_mix  # noqa: PLC0415 - numpy: few models need it

            model = ServedModel.of(ready)
            reason = await asyncio.to_thread(why_rows_mix, self._plane, model, sizes, self._stop)
        if not reason:
            return ready
        _log.warning("%s: requests are never joined to batches: %s", ready.name, reason)
        config.parameters[BATCHING_PARAMETER].string_value = BATCHING_OFF
        return replace(ready, config=_encoded(config))

    async def _measure(self, ready: ModelReady, key: str, sizes: Sequence[Sizes]) -> tuple[Isolated | None, str]:
        """Return how fast the model is alone, None for one that onnxruntime executes, but in no trial; and a failure.

        The latter is why no further trial should be made: nothing, unless the last one failed by more than its inputs.
        While others are served the model is not alone. An earlier measurement counts if it was quicker.
        """
        try:
            isolated = await asyncio.to_thread(
                measure_isolated, self._plane, ServedModel.of(ready), sizes, self._stop, self.request_cost_us
            )
        except ModelLoadError as error:
            if ready.engine is not Engine.ONNXRUNTIME or self._stop.is_set():
                raise
            _log.warning("%s: not measured: %s", ready.name, error)
            return None, "" if isinstance(error, TrialError) else f"no trial run has succeeded: {error}"
        known = self._isolated.get(key, isolated)
        if len(self._isolated) >= _native.MAX_MODELS:
            self._isolated.clear()
        best = Isolated(
            min(known.compute_us, isolated.compute_us),
            min(known.latency_us, isolated.latency_us),
            isolated.request_cost_us,
            self._busy_cost_us,
        )
        self._isolated[key] = best
        return best, ""

    def _spec(self, name: str, manifest: Manifest, rows: int) -> LoadModel:
        if not self._free_ids:
            raise ModelLoadError(f"{_native.MAX_MODELS} models are loaded, more are not possible")
        return LoadModel(
            model_id=heapq.heappop(self._free_ids),
            name=name,
            key=manifest.key,
            layers=len(manifest.layers),
            max_ranks=max(layer.max_ranks for layer in manifest.layers),
            arena_bytes=manifest.arena_bytes + staging_bytes(manifest),
            max_rows=rows,
            indivisible=manifest.engine is Engine.ONNXRUNTIME,
            layer_us=estimated_layer_us(manifest),
            layer_ranks=tuple(layer.max_ranks for layer in manifest.layers),
            pass_layers=manifest.pass_layers,
            pass_rows=manifest.pass_rows,
        )

    def _computable_rows(self, manifest: Manifest) -> int:
        """Return how many rows a model takes at a time if nobody has said how many it shall.

        Its arenas take a share of the addresses for all arenas that leaves enough for others.
        """
        loaded = _native.MAX_MODELS - len(self._free_ids)
        share_bytes = arenas_bytes() / (4 * (8 + loaded)) / self._leases
        return computable_rows(manifest, min(share_bytes, memory_limit_bytes() / 16))

    def _lost(self, model_id: int, reason: str, at_fault: bool) -> None:
        if not self._variants.lost(model_id, at_fault):
            self.on_model_lost(model_id, reason, at_fault)

    def _artifact_lost(self, spec: LoadModel, reason: str) -> None:
        """A worker lacks what others serve; it looks again now and then."""
        if spec.key not in self._remaking:
            _log.error("%s: %s; it is compiled again, those that have it serve on", spec.name, reason)
            task = self._remaking[spec.key] = asyncio.get_running_loop().create_task(self._make_again(spec))
            task.add_done_callback(lambda _: self._remaking.pop(spec.key))

    async def _make_again(self, spec: LoadModel) -> None:
        try:
            await self._compiler.compile_again(spec.key)
        except LOAD_ERRORS as error:
            _log.error("%s: cannot be compiled again: %s", spec.name, error)

    def _require_memory(self, manifest: Manifest) -> None:
        """Raise ModelLoadError if memory cannot hold the model and one row of a request.

        Pages of weights count, although the kernel could take them back: it would read them again for every request.
        """
        row_bytes = sum(tensor.row_bytes for tensor in (*manifest.inputs, *manifest.outputs))
        one_row_bytes = manifest.arena_bytes + staging_bytes(manifest) + 2 * row_bytes  # in a message, and as a tensor
        weights_bytes = _weights_bytes(manifest)
        if manifest.engine is Engine.ONNXRUNTIME:
            weights_bytes = self._workers * sum(file.size_bytes for file in manifest.files.values())
        budget = memory_budget()
        left_bytes = budget.room_bytes() - sum(self._mapped_bytes.values())
        if weights_bytes + one_row_bytes > left_bytes:
            raise ModelLoadError(
                f"the model needs {weights_bytes >> 20} MiB for weights and {one_row_bytes >> 20} MiB for each row,"
                f" but of {budget.limit} {max(0, left_bytes) >> 20} MiB are left"
            )

    def _forget(self, model_id: int) -> None:
        self._mapped_bytes.pop(model_id, None)
        heapq.heappush(self._free_ids, model_id)


def _encoded(config: ModelConfig) -> str:
    return base64.b64encode(config.SerializeToString()).decode()


def _log_ready(model: LoadedModel, fallback_reason: str, seconds: float) -> None:
    """Say that a model is ready, what serves it, and when that changes."""
    level, served_by = logging.INFO, "compiled"
    if model.shaped is not None:
        symbols = ", ".join(model.shaped.symbols)
        served_by = f"served by onnxruntime until sizes of {symbols} are compiled after their first request"
    elif model.engine is Engine.ONNXRUNTIME:
        level, served_by = logging.WARNING, f"served by onnxruntime: {fallback_reason}"
    name, version = model.entry.name, model.entry.version
    _log.log(level, "model %s, version %d: ready after %.2f s, %s", name, version, seconds, served_by)


def _weights_bytes(manifest: Manifest) -> int:
    """Return the size of the weights that all workers share; onnxruntime has copies of its own, of unknown size."""
    return 0 if manifest.engine is Engine.ONNXRUNTIME else manifest.files[WEIGHTS_FILE].size_bytes
