"""From a repository entry to a model that can answer requests: compile, complete its config, load, warm up, measure.

The config is completed from, and checked against, the model's signature. That comes from the manifest of the compiled
artifact, not from the ONNX file: no serving process reads ONNX, and a start from a warm cache touches no model file.
"""

import asyncio
import base64
import heapq
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

from gangway.artifact.format import MAX_TASKS, Engine, Manifest, TensorSpec, staging_bytes
from gangway.artifact.host_limits import memory_limit_bytes
from gangway.artifact.precision import WantedPrecision
from gangway.executor import _native
from gangway.executor.launch import MOST_THREADS, thread_counts
from gangway.executor.memory_budget import memory_budget
from gangway.executor.peer import MAX_MESSAGE_BYTES
from gangway.protos.model_config_pb2 import ModelConfig, ModelInput, ModelOutput
from gangway.scheduler.gangs import lease_count
from gangway.scheduler.messages import LoadModel
from gangway.scheduler.profiles import estimated_layer_us
from gangway.server.errors import LOAD_ERRORS, CompileError, ConfigError, ModelLoadError, shortened
from gangway.server.messages import ModelReady, ShapeWanted, open_symbols, to_json
from gangway.server.models.config import (
    BACKEND,
    BUCKETS_PARAMETER,
    CHOSEN_PRECISION_PARAMETER,
    DEFAULT_MODEL_FILENAME,
    ENGINE_PARAMETER,
    FALLBACK_PARAMETER,
    FIRST_ANSWER,
    LEAST_TARGET_PARAMETER,
    MAX_CONFIG_BYTES,
    PLATFORM,
    PRECISION_NOTE_PARAMETER,
    TARGET_SINCE_PARAMETER,
    Qos,
    bucket_sizes,
    buckets_of,
    check_supported,
    log_without_effect,
    require_complete,
)
from gangway.server.models.config_table import BATCHING_OFF, BATCHING_PARAMETER
from gangway.server.models.sequences import (
    DEFAULT_IDLE_US,
    check_hidden,
    hidden_inputs,
    hidden_outputs,
    initial_state_files,
)
from gangway.server.models.settings import (
    ModelBatching,
    ModelLimits,
    label_files,
    precision_of,
    response_bounds_ns,
    show_dynamic_batching,
    tell_batching,
)
from gangway.server.models.tensors import datatype_name, datatype_value
from gangway.server.options.command_line import ServeOptions
from gangway.server.options.server import DEFAULT_MAX_BATCH_SIZE
from gangway.server.repository.compile_jobs import Compiler
from gangway.server.repository.loaded import (
    IsolatedLatency,
    LoadedModel,
    Trials,
    config_of,
    profile_message,
    resolve_qos_us,
    warn_of_target,
)
from gangway.server.repository.profiles import BackgroundProfiler
from gangway.server.repository.repository import ModelVersion
from gangway.server.repository.schedules import FoundSchedules
from gangway.server.repository.shapes import NEVER_COMPILED, ShapeCache
from gangway.server.supervisor.announcements import Announcements
from gangway.server.supervisor.scheduler import SchedulerControl
from gangway.server.supervisor.shared_memory import arenas_bytes

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelFiles:
    """Files in a model's folder that its configuration names, beside the model: by output, by input."""

    labels: tuple[tuple[str, str], ...]
    initial_states: tuple[tuple[str, str], ...]


class ModelLoader:
    """Compiles models and has them tried, one after the other. It does not tell clients.

    `trials` have a model answer trial requests, which takes its time.
    `on_model_failed` is for a model that no worker has any more, or that has ended too many of them. It gets the
    model's number, the reason, and whether its requests were at fault. The scheduler calls `model_failed`,
    `artifact_missing` and `forget`, front ends `shape_wanted`.
    """

    def __init__(
        self,
        options: ServeOptions,
        compiler: Compiler,
        scheduler: SchedulerControl,
        clients: Announcements,
        profiles: BackgroundProfiler,
        trials: Trials,
        on_model_failed: Callable[[int, str, bool], None],
    ) -> None:
        self._options = options
        self._compiler = compiler
        self._scheduler = scheduler
        self._profiles = profiles
        self._trials = trials
        self._on_model_lost = on_model_failed
        self._workers = len(options.general.cores)
        self._max_shapes = options.general.max_shapes
        self._free_ids = list(range(_native.MAX_MODELS))
        self._variants = ShapeCache(
            compiler, scheduler, clients, self._spec, self._max_shapes, self._computable_rows, trials, profiles
        )
        general = options.general
        self.schedules = FoundSchedules(general.cache_dir, self._workers, scheduler, lambda: compiler.target)
        self._recompiling: dict[str, asyncio.Task[None]] = {}  # by key of the artifact
        self._mapped_bytes: dict[int, int] = {}  # of weights, by model

    async def look_up(self, entries: Iterable[ModelVersion]) -> None:
        """Find in one go what the cache has of models that are about to be loaded."""
        await self._compiler.look_up([(entry.path, entry.stamp) for entry in entries if not entry.is_ensemble])

    async def load(self, entry: ModelVersion) -> LoadedModel:
        """Return a model that workers have and that works. Raises one of LOAD_ERRORS, having left nothing behind."""
        try:
            return await self._load(entry)
        except LOAD_ERRORS:
            raise
        except Exception as error:  # a fault of the server with one model is no other model's
            _log.exception("model %s, version %d: loading failed by a fault of the server", entry.name, entry.version)
            raise ModelLoadError("internal error, see the server's log") from error

    async def _load(self, entry: ModelVersion) -> LoadedModel:
        begin = time.monotonic()
        if not self._options.repository.complete_configs:
            require_complete(entry.config)
        require_one_front_end(entry.config, self._options.general.front_ends)
        files = ModelFiles(
            labels=tuple(label_files(entry.folder, entry.config).items()),
            initial_states=tuple(initial_state_files(entry.folder, entry.config).items()),
        )
        limits = ModelLimits.of(entry.config, entry.name, entry.version, self._options.models.rates)
        log_without_effect(entry.name, entry.without_effect)
        optional = optional_inputs(entry.config)
        with_batch = entry.config.max_batch_size > 0
        precision = precision_of(entry.config, self._options.models.precision)
        manifest = await self._compiler.compile(
            entry.name, entry.path, optional=optional, stamp=entry.stamp, with_batch=with_batch, precision=precision
        )
        may_differ = manifest.engine is Engine.ONNXRUNTIME and not is_one_batch(manifest.inputs)
        is_size = may_differ or names_first_dimension(entry.config, manifest.inputs)
        batch = 0 if is_size else self._options.models.default_max_batch_size
        config = complete_config(entry.config, entry.name, manifest.inputs, manifest.outputs, manifest.batched, batch)
        if not config.max_batch_size and manifest.engine is Engine.NATIVE and not is_one_batch(manifest.inputs):
            manifest = await self._compiler.compile(entry.name, entry.path, whole=True)
        tell_batching(config, self._options.models.batching)
        batched = counts_rows(config, manifest)
        symbols = open_symbols(manifest.inputs, batched)
        fixed = fixed_sizes(config, manifest.inputs, symbols)
        declared = declared_sizes(config, manifest, symbols, fixed)
        if bucket_sizes(config) and config.HasField("sequence_batching"):
            raise ConfigError(
                f"parameter {BUCKETS_PARAMETER}: a model with sequences is compiled for one shape or none"
            )
        if bucket_sizes(config) and len(declared) > self._max_shapes:
            raise ConfigError(f"{len(declared)} buckets are declared, at most {self._max_shapes} shapes are compiled")
        if symbols and len(fixed) == len(symbols):
            manifest = await self._compiled_for(entry, manifest, fixed, batched, precision)
            declared = []
        tell_engine(config, manifest)
        self._require_memory(manifest)
        rows = max_rows(config, counts_rows(config, manifest), self._computable_rows(manifest))
        batching = ModelBatching.of(config)
        if not (entry.config.input and entry.config.output):
            show_dynamic_batching(config)
        spec = limits.applied_to(
            batching.applied_to(self._spec(f"{entry.name}, version {entry.version}", manifest, rows))
        )
        await self._scheduler.load(spec)
        self._mapped_bytes[spec.model_id] = manifest.weights_bytes
        try:
            model = await self._tried(entry, spec, manifest, config, declared, files)
        except BaseException:
            self._scheduler.unload(spec.model_id)
            raise
        seconds = time.monotonic() - begin
        _log_ready(model, manifest, seconds)
        return replace(model, ready=replace(model.ready, load_seconds=seconds))

    def measured(self, model: LoadedModel, row_us: float) -> LoadedModel:
        """Return a model whose time alone was not known, and is now: a client's request took so long, a row of it."""
        isolated, config, qos = self._trials.latency_of(row_us), config_of(model.ready), model.entry.qos
        tell_target(config, qos, isolated)
        ready = replace(
            model.ready,
            config=_encoded(config),
            qos_us=resolve_qos_us(qos, isolated),
            isolated_us=isolated.compute_us,
        )
        if model.variants is not None:
            model.variants.ready = ready
        self._scheduler.set_profile(profile_message(ready.model_id, ready, isolated))
        if qos.multiple is not None:
            _log.info(
                "%s, version %d: its latency target is %.3f ms from now on: its first request took %.3f ms a row",
                ready.name,
                ready.version,
                (ready.qos_us or 0.0) / 1e3,
                row_us / 1e3,
            )
        return replace(model, ready=ready, isolated=isolated)

    def announced(self, model: LoadedModel) -> None:
        """Clients have been told of a model: compile it for the sizes that they use."""
        if model.variants is not None:
            self._variants.adopt(model.variants)

    def withdrawn(self, model: LoadedModel) -> None:
        """Clients get it no more, though requests that have begun may still use it."""
        self._profiles.remove(model.ready.model_id)
        if model.variants is not None:
            self._variants.forget(model.variants)

    async def unloaded(self, model: LoadedModel, timeout_seconds: float) -> bool:
        """Return when that has happened; False if it takes too long."""
        return await self._scheduler.unloaded(model.ready.model_id, timeout_seconds)

    def unload(self, model: LoadedModel) -> None:
        """Give back all that a model takes, when no request uses it any more."""
        self.withdrawn(model)
        if model.variants is not None:
            self._variants.drop(model.variants)
        self._scheduler.unload(model.ready.model_id)

    def shape_wanted(self, message: ShapeWanted) -> None:
        """A front end has answered a request of sizes that are not compiled."""
        self._variants.want(message)

    def model_failed(self, model_id: int, reason: str, at_fault: bool) -> None:
        """No worker has a model any more, or it has ended too many of them (`at_fault`)."""
        if not self._variants.model_failed(model_id, at_fault):
            self._on_model_lost(model_id, reason, at_fault)

    def artifact_missing(self, spec: LoadModel, reason: str) -> None:
        """A worker cannot load what others serve; it tries again now and then."""
        if spec.key not in self._recompiling:
            _log.error(
                "%s: a worker cannot load the compiled model, which other workers serve: %s; it is compiled again",
                spec.name,
                reason,
            )
            task = self._recompiling[spec.key] = asyncio.get_running_loop().create_task(self._compile_again(spec))
            task.add_done_callback(lambda _: self._recompiling.pop(spec.key))

    def forget(self, model_id: int) -> None:
        """No worker maps the model any more: its number may be another's."""
        self._mapped_bytes.pop(model_id, None)
        heapq.heappush(self._free_ids, model_id)

    async def compile_shapes(self) -> None:
        """From now on compile models for the sizes of symbolic dimensions that requests have. Never returns."""
        await self._variants.run()

    def stop(self) -> None:
        """End what is being compiled."""
        for task in self._recompiling.values():
            task.cancel()
        self._compiler.stop()

    async def _compiled_for(
        self,
        entry: ModelVersion,
        manifest: Manifest,
        sizes: Mapping[str, int],
        batched: bool,
        precision: WantedPrecision,
    ) -> Manifest:
        """Return the model compiled for the only sizes that its configuration allows, if that is possible."""
        if any(tensor.optional or tensor.datatype in NEVER_COMPILED for tensor in manifest.inputs):
            return manifest
        title = f"{entry.name}, {', '.join(f'{symbol}={size}' for symbol, size in sizes.items())}"
        try:
            compiled = await self._compiler.compile(title, entry.path, sizes, precision=precision)
        except CompileError as error:
            return replace(manifest, fallback_reason=str(error))
        return compiled if compiled.batched == batched else manifest

    async def _tried(
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
            weights_bytes=manifest.weights_bytes,
            labels=files.labels,
            initial_states=files.initial_states,
            tail=manifest.tail,
        )
        if (size_bytes := len(to_json(ready))) > MAX_MESSAGE_BYTES:
            raise ConfigError(f"tensors and configuration take {size_bytes} bytes, at most {MAX_MESSAGE_BYTES} can be")
        sizes = [dict(zip(ready.symbols, each, strict=True)) for each in declared]
        tried = await self._trials.try_model(ready, manifest, config, entry.folder, sizes)
        if tried.mixed_rows:
            _log.log(
                logging.INFO if tried.is_untested else logging.WARNING,
                "%s, version %d: every request runs alone, although the configuration asks for batches: %s",
                entry.name,
                entry.version,
                tried.mixed_rows,
            )
            config.parameters[BATCHING_PARAMETER].string_value = BATCHING_OFF
        tell_least_target(config, tried.busy_cost_us)
        tell_target(config, entry.qos, tried.isolated)
        ready = replace(
            ready,
            config=_encoded(config),
            qos_us=resolve_qos_us(entry.qos, tried.isolated),
            isolated_us=tried.isolated.compute_us if tried.isolated else 0.0,
        )
        warn_of_target(ready, entry.qos, tried.isolated, tried.request_cost_us)
        self._scheduler.set_profile(profile_message(spec.model_id, ready, tried.isolated))
        shaped = await self._variants.prepare(
            ready, entry.path, declared, spec, entry.qos, precision_of(entry.config, self._options.models.precision)
        )
        if shaped is None and bucket_sizes(config) and ready.symbols:
            why = "nothing is compiled with optional inputs or strings"
            log_without_effect(entry.name, [f"parameter {BUCKETS_PARAMETER} ({why})"])
        if tried.isolated is not None:
            self._profiles.add(spec.model_id, manifest)
        return LoadedModel(entry, ready, tried.isolated, manifest.engine, shaped)

    def _spec(self, name: str, manifest: Manifest, rows: int) -> LoadModel:
        if not self._free_ids:
            raise ModelLoadError(f"{_native.MAX_MODELS} models are loaded, more are not possible")
        return LoadModel(
            model_id=heapq.heappop(self._free_ids),
            name=name,
            key=manifest.key,
            layers=len(manifest.layers),
            max_ranks=_max_ranks(manifest),
            arena_bytes=manifest.arena_bytes + staging_bytes(manifest),
            max_rows=rows,
            indivisible=manifest.engine is Engine.ONNXRUNTIME,
            long_layers=_long_layers(manifest),
            layer_us=estimated_layer_us(manifest),
            layer_ranks=tuple(layer.max_ranks for layer in manifest.layers),
            pass_layers=manifest.pass_layers,
            pass_rows=manifest.pass_rows,
            splits=not manifest.tail,  # a request has one answer
        )

    def _computable_rows(self, manifest: Manifest) -> int:
        """Return how many rows a model takes at a time if its configuration does not say it.

        Its arenas take a share of the addresses for all arenas that leaves enough for others.
        """
        loaded = _native.MAX_MODELS - len(self._free_ids)
        share_bytes = arenas_bytes() / (4 * (8 + loaded)) / lease_count(self._workers)
        return computable_rows(manifest, min(share_bytes, memory_limit_bytes() / 16))

    async def _compile_again(self, spec: LoadModel) -> None:
        try:
            await self._compiler.compile_again(spec.key)
        except LOAD_ERRORS as error:
            _log.error("%s: cannot be compiled again, so fewer workers serve it: %s", spec.name, error)

    def _sessions(self, threads: int) -> int:
        """Return how many sessions of onnxruntime all workers have of a file, for which so many threads are useful."""
        return sum(len(thread_counts(min(cores, threads))) for cores in range(1, self._workers + 1))

    def _require_memory(self, manifest: Manifest) -> None:
        """Raise ModelLoadError if memory cannot hold the model and one row of a request.

        Pages of weights count, although the kernel could take them back: it would read them again for every request.
        """
        row_bytes = sum(tensor.row_bytes for tensor in (*manifest.inputs, *manifest.outputs))
        one_row_bytes = manifest.arena_bytes + staging_bytes(manifest) + 2 * row_bytes  # in a message, and as a tensor
        threads = MOST_THREADS
        if manifest.engine is Engine.NATIVE:
            threads = max((layer.max_ranks for layer in manifest.islands), default=1)
        weights_bytes = manifest.weights_bytes + self._sessions(threads) * manifest.session_bytes
        budget = memory_budget()
        left_bytes = budget.room_bytes() - sum(self._mapped_bytes.values())
        if weights_bytes + one_row_bytes > left_bytes:
            raise ModelLoadError(
                f"the model needs {weights_bytes >> 20} MiB for weights and {one_row_bytes >> 20} MiB for each row,"
                f" but of {budget.limit} {max(0, left_bytes) >> 20} MiB are left"
            )


def require_one_front_end(config: ModelConfig, front_ends: int) -> None:
    """Raise ConfigError for a model whose state is in the front end that got the request."""
    if front_ends > 1 and config.HasField("sequence_batching"):
        raise ConfigError(
            "sequence_batching: a sequence's requests may come over several connections, so over several front ends,"
            f" which do not share its state; --front-ends is {front_ends}, and must be 1 for this model"
        )


def _long_layers(manifest: Manifest) -> tuple[int, ...]:
    """Return the layers that onnxruntime computes."""
    whole = manifest.engine is Engine.ONNXRUNTIME
    return tuple(number for number, layer in enumerate(manifest.layers) if whole or layer.onnx_file)


def _max_ranks(manifest: Manifest) -> int:
    """Return beyond how many cores no layer gets faster; a profile says more about onnxruntime."""
    if manifest.engine is Engine.ONNXRUNTIME:
        return MOST_THREADS
    return max(layer.max_ranks for layer in manifest.layers)


def _encoded(config: ModelConfig) -> str:
    return base64.b64encode(config.SerializeToString()).decode()


def _log_ready(model: LoadedModel, manifest: Manifest, seconds: float) -> None:
    """Say that a model is ready, what serves it, and when that changes."""
    level, served_by = logging.INFO, "compiled"
    if model.variants is not None:
        symbols = ", ".join(model.variants.symbols)
        served_by = (
            f"served by onnxruntime until a size of ({symbols}) has been compiled, which begins with its first request;"
            " to compile before, set dims or gangway_buckets"
        )
        if model.variants.loaded:
            sizes = ", ".join("x".join(map(str, each)) for each in model.variants.loaded)
            served_by = f"compiled for ({symbols}) of {sizes}; onnxruntime serves other sizes until they are compiled"
    elif model.engine is Engine.ONNXRUNTIME:
        level, served_by = logging.WARNING, f"served by onnxruntime: {manifest.fallback_reason}"
    elif islands := manifest.islands:
        operators = ", ".join(dict.fromkeys(layer.operator for layer in islands))
        served_by = f"compiled, onnxruntime computes {len(islands)} of {len(manifest.layers)} layers: {operators}"
    if manifest.precision_note:
        served_by += f" in {manifest.precision} ({manifest.precision_note})"
    name, version = model.entry.name, model.entry.version
    _log.log(level, "model %s, version %d: ready after %.2f s, %s", name, version, seconds, served_by)


MOST_ROWS: Final = (1 << 31) - 1

Tensor = ModelInput | ModelOutput


def complete_config(
    config: ModelConfig,
    name: str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    batched: bool,
    default_max_batch_size: int = DEFAULT_MAX_BATCH_SIZE,
) -> ModelConfig:
    """Return a copy of `config` with everything filled in that the model `name` determines.

    A config that lists no tensors gets the default max_batch_size if the first dimension may be a batch (`batched`), as
    in Triton; one that lists tensors means what it says. Raises ConfigError where config and model differ.
    """
    check_supported(config, name)
    response_bounds_ns(config)  # raises what is wrong with them
    complete = ModelConfig()
    complete.CopyFrom(config)
    complete.name = name
    complete.platform, complete.backend = PLATFORM, BACKEND
    complete.default_model_filename = config.default_model_filename or DEFAULT_MODEL_FILENAME
    if not config.HasField("version_policy"):
        complete.version_policy.latest.num_versions = 1
    if not (config.max_batch_size or config.input or config.output) and batched:
        complete.max_batch_size = default_max_batch_size
    if complete.max_batch_size and not batched:
        obstacle = _batch_obstacle(inputs, outputs)
        remedy = "set max_batch_size: 0 and write the batch in dims"
        raise ConfigError(f"max_batch_size is {complete.max_batch_size}, but {obstacle} {remedy}")
    _complete_sequences(complete)
    hidden = hidden_inputs(complete)
    for spec in inputs if not config.input else ():
        if spec.name not in hidden:
            complete.input.add(name=spec.name)
    states = hidden_outputs(complete)
    for spec in outputs if not config.output else ():
        if spec.name not in states:
            complete.output.add(name=spec.name)
    check_hidden(complete, inputs, outputs)
    _fit_tensors(complete.input, inputs, "input", complete.max_batch_size > 0)
    _fit_tensors(complete.output, outputs, "output", complete.max_batch_size > 0)
    for tensor in complete.input:
        tensor.optional = next(spec.optional for spec in inputs if spec.name == tensor.name)
    known = hidden.union(tensor.name for tensor in complete.input)
    missing = [spec.name for spec in inputs if spec.name not in known]
    if missing:
        raise ConfigError(f"the config leaves out input {_quoted(missing)} of the ONNX model")
    if complete.ByteSize() > MAX_CONFIG_BYTES:
        size_bytes = complete.ByteSize()
        raise ConfigError(f"the completed configuration has {size_bytes} bytes, {MAX_CONFIG_BYTES} are possible")
    return complete


def _complete_sequences(config: ModelConfig) -> None:
    """Fill in what Triton does of `sequence_batching`."""
    if not config.HasField("sequence_batching"):
        return
    batching = config.sequence_batching
    batching.max_sequence_idle_microseconds = batching.max_sequence_idle_microseconds or DEFAULT_IDLE_US
    if batching.HasField("oldest") and not batching.oldest.preferred_batch_size and config.max_batch_size:
        batching.oldest.preferred_batch_size.append(config.max_batch_size)


def optional_inputs(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the inputs that requests may leave out."""
    return tuple(sorted(tensor.name for tensor in config.input if tensor.optional))


def tell_engine(config: ModelConfig, manifest: Manifest) -> None:
    """Say in the config's parameters what executes the model, why, if that is onnxruntime, and in which precision."""
    config.parameters[ENGINE_PARAMETER].string_value = manifest.engine.value
    if manifest.fallback_reason:
        config.parameters[FALLBACK_PARAMETER].string_value = manifest.fallback_reason
    if manifest.engine is Engine.NATIVE:
        config.parameters[CHOSEN_PRECISION_PARAMETER].string_value = manifest.precision
    if note := manifest.precision_note:
        config.parameters[PRECISION_NOTE_PARAMETER].string_value = note


def tell_target(config: ModelConfig, qos: Qos, isolated: IsolatedLatency | None) -> None:
    """Say in the config's parameters since when a target counts that is a multiple of the model's time alone."""
    if qos.multiple is not None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        config.parameters[TARGET_SINCE_PARAMETER].string_value = now if isolated else FIRST_ANSWER


def tell_least_target(config: ModelConfig, least_us: float) -> None:
    """Say in the config's parameters what no target that is a multiple is less than."""
    config.parameters[LEAST_TARGET_PARAMETER].string_value = f"{least_us / 1e3:.3f}"


def counts_rows(config: ModelConfig, manifest: Manifest) -> bool:
    """Whether the first dimension of every tensor counts rows that can be computed apart, or the config says so.

    Without max_batch_size it does where the compiler knows that; what onnxruntime executes must have one name for it.
    A model that can be compiled for each number of rows only is, unless it has sequences. So is what onnxruntime
    executes, if buckets name its first dimension.
    """
    is_open = manifest.engine is not Engine.NATIVE and not config.HasField("sequence_batching")
    if is_open and (manifest.fixed_rows or names_first_dimension(config, manifest.inputs)):
        return False
    if config.max_batch_size or manifest.engine is Engine.NATIVE:
        return manifest.batched
    return manifest.batched and not manifest.mixes_rows and is_one_batch(manifest.inputs)


def names_first_dimension(config: ModelConfig, inputs: Sequence[TensorSpec]) -> bool:
    """Whether buckets name the first dimension of an input, which then is a size like others. Raises ConfigError."""
    return not _first_symbols(inputs).isdisjoint(bucket_sizes(config))


def _first_symbols(inputs: Sequence[TensorSpec]) -> set[str]:
    return {spec.symbols[0] for spec in inputs if spec.symbols and spec.symbols[0]}


def declared_sizes(
    config: ModelConfig, manifest: Manifest, symbols: Sequence[str], fixed: Mapping[str, int]
) -> list[tuple[int, ...]]:
    """Return the sizes of all symbols that a completed config has compiled before the model is ready.

    They come from dims (`fixed`) and buckets. Rows that influence each other are one, unless buckets say how many.
    Raises ConfigError.
    """
    first = _first_symbols(manifest.inputs)
    for name, sizes in bucket_sizes(config).items():
        if name in first and config.max_batch_size and max(sizes) > config.max_batch_size:
            raise ConfigError(
                f"parameter {BUCKETS_PARAMETER}: '{name}' is the batch, of which max_batch_size allows"
                f" {config.max_batch_size}, not {max(sizes)}"
            )
    rows = {name for name in symbols if name in first} if manifest.fixed_rows and config.max_batch_size else set()
    known = dict(fixed) | {name: 1 for name in rows if name not in bucket_sizes(config)}
    buckets = buckets_of(config, symbols, known, () if first.intersection(symbols) else first)
    if not buckets and fixed and all(name in known for name in symbols):
        return [tuple(known[name] for name in symbols)]
    return buckets


def max_rows(config: ModelConfig, batched: bool, most_rows: int = MOST_ROWS) -> int:
    """Return how many rows one request to a completed config's model may have; `most_rows` if that says nothing."""
    if config.max_batch_size:
        return config.max_batch_size
    if not batched:
        return 1
    return min((tensor.dims[0] for tensor in config.input if tensor.dims[0] > 0), default=most_rows)


def computable_rows(manifest: Manifest, arena_bytes: float) -> int:
    """Return how many rows of a model can be computed at a time in an arena of this size."""
    if manifest.engine is Engine.ONNXRUNTIME:
        return MOST_ROWS
    versions = [version for layer in manifest.layers for version in layer.versions]
    tasks = max(kernel.tasks for version in versions for kernel in (version, version.batch) if kernel)
    row_bytes = manifest.arena_bytes + staging_bytes(manifest)
    return max(1, min(MAX_TASKS // tasks, int(arena_bytes / row_bytes) if row_bytes else MAX_TASKS))


def fixed_sizes(config: ModelConfig, inputs: Sequence[TensorSpec], symbols: Sequence[str]) -> dict[str, int]:
    """Return the sizes that a completed config's dims give to symbols of a model. Raises ConfigError for two of one."""
    specs = {spec.name: spec for spec in inputs}
    found: dict[str, int] = {}
    for tensor in config.input if any(symbols) else ():
        names = specs[tensor.name].symbols[config.max_batch_size > 0 :]
        for name, size in zip(names, tensor.dims, strict=False) if not tensor.HasField("reshape") else ():
            if name in symbols and size > 0 and found.setdefault(name, size) != size:
                raise ConfigError(
                    f"input '{shortened(tensor.name)}': dims give '{name}' the size {size}, those of another input"
                    f" {found[name]}; dimensions of one name are equal in the ONNX model"
                )
    return {name: found[name] for name in symbols if name in found}


def is_one_batch(inputs: Sequence[TensorSpec]) -> bool:
    """Whether the first dimensions of all inputs have one name, as far as they have names."""
    named = {spec.symbols[0] for spec in inputs if spec.symbols and spec.symbols[0] != f"{spec.name}.0"}
    return len(named) <= 1


def _batch_obstacle(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> str:
    """Return why the first dimension cannot be a batch."""
    for group, specs in (("input", inputs), ("output", outputs)):
        for spec in specs:
            if spec.shape[:1] != (-1,):
                return (
                    f"{group} '{shortened(spec.name)}' of the ONNX model has no symbolic first dimension, its shape is"
                    f" {list(spec.shape)}: export it with a symbolic first dimension, or"
                )
    first = {spec.symbols[0] for spec in inputs if spec.symbols}
    others = [name for spec in inputs for name in spec.symbols[1:] if name in first]
    if others:
        return f"'{others[0]}', the first dimension of the ONNX model, is another one, too:"
    return "a run with zeros shows that outputs of the ONNX model do not have a row for each row of its inputs:"


def _fit_tensors(tensors: Sequence[Tensor], specs: Sequence[TensorSpec], group: str, strip_batch: bool) -> None:
    """Fill in type and dims where the config leaves them out, and compare where it does not."""
    known = {spec.name: spec for spec in specs}
    for tensor in tensors:
        spec = known.get(tensor.name)
        if spec is None:
            raise ConfigError(
                f"{group} '{shortened(tensor.name)}' is not in the ONNX model, which has {_quoted(list(known))}"
            )
        expected = datatype_value(spec.datatype)
        if tensor.data_type not in (0, expected):
            raise ConfigError(
                f"{group} '{shortened(tensor.name)}': data_type is TYPE_{datatype_name(tensor.data_type)}, "
                f"but the ONNX model has TYPE_{spec.datatype}"
            )
        tensor.data_type = expected
        shape = list(spec.shape[1:] if strip_batch else spec.shape)
        if not tensor.dims and not tensor.HasField("reshape"):
            tensor.dims.extend(shape)
        _check_dims(tensor, shape, group)


def _check_dims(tensor: Tensor, shape: list[int], group: str) -> None:
    dims = list(tensor.reshape.shape) if tensor.HasField("reshape") else list(tensor.dims)
    fits = len(dims) == len(shape) and all(
        dim == size or (size == -1 and dim > 0) for dim, size in zip(dims, shape, strict=True)
    )
    if not fits:
        raise ConfigError(
            f"{group} '{shortened(tensor.name)}': dims are {dims}, but the ONNX model has {shape}"
            " (with max_batch_size > 0 the batch dimension is left out of both)"
        )
    if tensor.HasField("reshape") and -1 in tensor.dims:
        raise ConfigError(f"{group} '{shortened(tensor.name)}': reshape needs fixed dims, got {list(tensor.dims)}")
    if tensor.HasField("reshape") and -1 in shape:
        raise ConfigError(f"{group} '{shortened(tensor.name)}': reshape needs max_batch_size > 0")
    if tensor.HasField("reshape") and math.prod(dims) != math.prod(tensor.dims):
        raise ConfigError(
            f"{group} '{shortened(tensor.name)}': dims {list(tensor.dims)} and reshape {dims} differ in size"
        )


def _quoted(names: list[str]) -> str:
    return ", ".join(f"'{shortened(name)}'" for name in names)
