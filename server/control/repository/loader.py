"""From a repository entry to a model that can answer requests: compile, complete its config, load, warm up, measure.

No serving process reads ONNX, and a start from a warm cache touches no model file.
"""

import asyncio
import base64
import heapq
import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gangway.artifact.files import model_stamp
from gangway.artifact.format import Engine, Manifest, staging_bytes
from gangway.artifact.host_limits import memory_limit_bytes
from gangway.artifact.precision import DEADLINE, IN_FP32, WantedPrecision
from gangway.executor import _native
from gangway.executor.launch import MOST_THREADS, thread_counts
from gangway.executor.memory_budget import memory_budget
from gangway.executor.peer import MAX_MESSAGE_BYTES
from gangway.protos.model_config_pb2 import ModelConfig
from gangway.scheduler.gangs import lease_count
from gangway.scheduler.messages import LoadModel
from gangway.scheduler.profiles import estimated_layer_us
from gangway.server.control.repository.compile_jobs import Compiler, CompileRequest
from gangway.server.control.repository.completed_config import (
    MOST_ROWS,
    complete_config,
    computable_rows,
    counts_rows,
    declared_sizes,
    fixed_sizes,
    is_one_batch,
    max_rows,
    names_first_dimension,
    optional_inputs,
    tell_engine,
    tell_least_target,
    tell_target,
)
from gangway.server.control.repository.loaded import (
    IsolatedLatency,
    LoadedModel,
    Meanwhile,
    Trials,
    config_of,
    profile_message,
    resolve_qos_us,
    warn_of_difference,
    warn_of_target,
    with_difference,
)
from gangway.server.control.repository.precisions import NOT_WANTED, InBf16, PrecisionPairs
from gangway.server.control.repository.profiles import BackgroundProfiler
from gangway.server.control.repository.python_models import (
    Environments,
    check_python,
    completed_config,
    describe,
    plan_of,
    python_batching,
    write_description,
)
from gangway.server.control.repository.repository import ModelVersion
from gangway.server.control.repository.schedules import FoundSchedules
from gangway.server.control.repository.shapes import ShapeCache, is_never_compiled
from gangway.server.control.supervisor.announcements import Announcements
from gangway.server.control.supervisor.python_instances import PythonInstances
from gangway.server.control.supervisor.scheduler import SchedulerControl
from gangway.server.control.supervisor.shared_memory import arenas_bytes
from gangway.server.errors import LOAD_ERRORS, CompileError, ConfigError, ModelLoadError
from gangway.server.messages import ModelReady, ShapeWanted, open_symbols, to_json
from gangway.server.models.config import BUCKETS_PARAMETER, bucket_sizes, log_without_effect, require_complete
from gangway.server.models.config_table import BATCHING_OFF, BATCHING_PARAMETER
from gangway.server.models.message_json import to_json as message_json
from gangway.server.models.sequences import initial_state_files
from gangway.server.models.settings import (
    ModelBatching,
    ModelLimits,
    label_files,
    precision_of,
    serves_while_compiling,
    show_dynamic_batching,
    tell_batching,
)
from gangway.server.options.command_line import ServeOptions

_log = logging.getLogger(__name__)

# Of the memory limit, the data of an instance of a Python model: many hold their weights twice while they load.
INSTANCE_MEMORY_SHARE: Final = 2 / 3


@dataclass(frozen=True)
class MadeModel:
    """What workers can load: a completed configuration, the compiled model, and what the scheduler is told of it.

    `labels`, `initial_states`: files in the model's folder that the configuration names, by output, by input.
    `declared`: sizes of symbolic dimensions that are compiled before the model is ready. `meanwhile`: as of the loaded
    model.
    """

    entry: ModelVersion
    config: ModelConfig
    manifest: Manifest
    spec: LoadModel
    labels: tuple[tuple[str, str], ...] = ()
    initial_states: tuple[tuple[str, str], ...] = ()
    declared: Sequence[tuple[int, ...]] = ()
    wanted: WantedPrecision = IN_FP32
    in_bf16: InBf16 = NOT_WANTED
    meanwhile: Meanwhile | None = None


class ModelLoader:
    """Compiles models and has them tried, one after the other. It does not tell clients.

    `trials` have a model answer trial requests, which takes its time.
    """

    def __init__(
        self,
        options: ServeOptions,
        compiler: Compiler,
        scheduler: SchedulerControl,
        clients: Announcements,
        profiles: BackgroundProfiler,
        trials: Trials,
        python: PythonInstances,
    ) -> None:
        self._options = options
        self._python = python
        self._environments = Environments(options.models.python_environment)
        self._descriptions: dict[str, Manifest] = {}  # of Python models, by key
        self._compiler = compiler
        self._scheduler = scheduler
        self._profiles = profiles
        self._trials = trials
        self._workers = len(options.general.cores)
        self._max_shapes = options.general.max_shapes
        self._free_ids = list(range(_native.MAX_MODELS))
        self._pairs = PrecisionPairs(compiler, scheduler, profiles, self._spec)
        self._variants = ShapeCache(
            compiler, scheduler, clients, self._spec, self._max_shapes, self._computable_rows, trials, profiles,
            self._pairs, options.general.compile_ahead,
        )  # fmt: skip
        general = options.general
        self.schedules = FoundSchedules(general.cache_dir, self._workers, scheduler, lambda: compiler.target)
        self._recompiling: dict[str, asyncio.Task[None]] = {}  # by key of the artifact
        self._mapped_bytes: dict[int, int] = {}  # of weights, by model

    async def look_up(self, entries: Iterable[ModelVersion]) -> None:
        """Find in one go what the cache has of models that are about to be loaded."""
        await self._compiler.look_up(
            [(entry.path, entry.stamp) for entry in entries if not (entry.is_ensemble or entry.is_python)],
            self._options.models.serve_while_compiling,
        )

    async def load(self, entry: ModelVersion, at_once: bool = False) -> LoadedModel:
        """Return a model that workers have and that works. Raises one of LOAD_ERRORS, having left nothing behind.

        `at_once`: one that is not compiled is served by onnxruntime, if it is to be served meanwhile.
        """
        try:
            return await self._load(entry, at_once)
        except LOAD_ERRORS:
            raise
        except Exception as error:  # a fault of the server with one model is no other model's
            _log.exception("model %s: loading failed by a fault of the server", entry.title)
            raise ModelLoadError("internal error, see the server's log") from error

    async def _load(self, entry: ModelVersion, at_once: bool) -> LoadedModel:
        begin = time.monotonic()
        if not self._options.repository.complete_configs:
            require_complete(entry.config)
        made = await (self._initialised(entry) if entry.is_python else self._compiled(entry, at_once))
        model_id = made.spec.model_id
        await self._scheduler.load(made.spec)
        self._mapped_bytes[model_id] = made.manifest.weights_bytes
        try:
            model = await self._tried(made)
        except BaseException:
            self._pairs.unload(model_id)
            self._scheduler.unload(model_id)
            raise
        seconds = time.monotonic() - begin
        _log_ready(model, made.manifest, seconds)
        return replace(model, ready=replace(model.ready, load_seconds=seconds))

    async def _compiled(self, entry: ModelVersion, at_once: bool) -> MadeModel:
        """Complete the configuration of a model, and compile it, unless it is to be served before that."""
        require_one_front_end(entry.config, self._options.general.front_ends)
        labels = tuple(label_files(entry.folder, entry.config).items())
        initial_states = tuple(initial_state_files(entry.folder, entry.config).items())
        limits = ModelLimits.of(entry.config, entry.name, entry.version, self._options.models.rates)
        log_without_effect(entry.name, entry.without_effect)
        optional = optional_inputs(entry.config)
        with_batch = entry.config.max_batch_size > 0
        wanted = precision_of(entry.config, self._options.models.precision)
        precision = wanted.each[0]
        is_wanted = serves_while_compiling(entry.config, self._options.models.serve_while_compiling)
        # The state of a sequence is an artifact's, and optional inputs are never compiled.
        at_once = at_once and is_wanted and not (optional or entry.config.HasField("sequence_batching"))
        files = model_stamp(entry.path) if at_once else ()
        request = CompileRequest(
            entry.name,
            entry.path,
            optional=optional,
            stamp=entry.stamp,
            with_batch=with_batch,
            precision=precision,
            stand_in=at_once,
        )
        manifest = await self._compiler.compile(request)
        is_known = manifest.is_compilable or manifest.apart_rows
        may_differ = not is_known and not is_one_batch(manifest.inputs)
        is_size = may_differ or names_first_dimension(entry.config, manifest.inputs)
        batch = 0 if is_size else self._options.models.default_max_batch_size
        config = complete_config(entry.config, entry.name, manifest.inputs, manifest.outputs, manifest.batched, batch)
        if not config.max_batch_size and manifest.is_compilable and not is_one_batch(manifest.inputs):
            manifest = await self._compiler.compile(CompileRequest(entry.name, entry.path, whole=True))
        tell_batching(config, self._options.models.batching)
        batched = counts_rows(config, manifest)
        symbols = open_symbols(manifest.inputs, batched)
        fixed = fixed_sizes(config, manifest.inputs, symbols)
        declared = declared_sizes(config, manifest, symbols, fixed, self._max_shapes)
        if bucket_sizes(config) and config.HasField("sequence_batching"):
            raise ConfigError(
                f"parameter {BUCKETS_PARAMETER}: a model with sequences is compiled for one shape or none"
            )
        sizes: Mapping[str, int] = {}
        is_sized = bool(symbols) and len(fixed) == len(symbols)
        meanwhile = Meanwhile(files, manifest.key) if manifest.is_stand_in else None
        known = [fixed] if is_sized else [dict(zip(symbols, each, strict=True)) for each in declared]
        if at_once and not meanwhile and not await self._are_cached(entry, manifest, known, precision):
            meanwhile, declared = Meanwhile(files), []
        elif is_sized:
            manifest = await self._compiled_for(entry, manifest, fixed, batched, precision)
            declared, sizes = [], fixed
        in_bf16 = await self._pairs.compiled(entry.name, entry.path, manifest, wanted, sizes)
        self._require_memory(manifest)
        most_rows = min(self._computable_rows(each) for each in (manifest, in_bf16.manifest) if each is not None)
        rows = max_rows(config, counts_rows(config, manifest), most_rows)
        batching = ModelBatching.of(config)
        if not (entry.config.input and entry.config.output):
            show_dynamic_batching(config)
        spec = limits.applied_to(batching.applied_to(self._spec(entry.title, manifest, rows)))
        return MadeModel(entry, config, manifest, spec, labels, initial_states, declared, wanted, in_bf16, meanwhile)

    async def _initialised(self, entry: ModelVersion) -> MadeModel:
        """Start the instances of a Python model, which complete its configuration."""
        settings = check_python(entry.config)
        require_one_front_end(entry.config, self._options.general.front_ends)
        log_without_effect(entry.name, entry.without_effect)
        environment = await asyncio.to_thread(self._environments.of, settings, entry.folder)
        completes = self._options.repository.complete_configs
        memory_bytes = int(memory_limit_bytes() * INSTANCE_MEMORY_SHARE)
        options = self._options.models
        plan = plan_of(
            entry,
            settings,
            environment,
            completes,
            memory_bytes,
            options.python_start_seconds,
            options.strict_python_outputs,
        )
        model_id = self._take_id()
        try:
            instances = self._python.add(model_id, plan)
            config = completed_config(await instances.completed_config(), entry.config, entry.name)
            settings = check_python(config)
            require_one_front_end(config, self._options.general.front_ends)
            labels = tuple(label_files(entry.folder, config).items())
            rates = self._options.models.rates
            limits = ModelLimits.of(config, entry.name, entry.version, rates, settings.most_executions)
            await instances.initialise(json.dumps(message_json(config)))
            manifest = describe(config, entry.name)
            await asyncio.to_thread(write_description, self._options.general.cache_dir, manifest)
            self._descriptions[manifest.key] = manifest
            tell_batching(config, self._options.models.batching)
            tell_engine(config, manifest)
            rows = max_rows(config, manifest.batched, MOST_ROWS)
            spec = limits.applied_to(
                python_batching(config).applied_to(self._spec(entry.title, manifest, rows, model_id))
            )
        except BaseException:
            self.forget(model_id)
            raise
        return MadeModel(entry, config, manifest, spec, labels)

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
            if model.variants.difference:  # which was found after the model was loaded
                ready = with_difference(ready, model.variants.difference)
            model.variants.ready = ready
        self._scheduler.set_profile(profile_message(ready.model_id, ready, isolated))
        self._pairs.set_target(ready)
        if qos.multiple is not None:
            _log.info(
                "%s: its latency target is %.3f ms from now on: its first request took %.3f ms a row",
                model.entry.title,
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
        self._pairs.withdrawn(model.ready.model_id)
        if model.variants is not None:
            self._variants.forget(model.variants)

    async def discard(self, model: LoadedModel) -> None:
        """Remove what was in the cache for a model until it was compiled."""
        if model.meanwhile is not None and model.meanwhile.stand_in:
            await self._compiler.discard(model.meanwhile.stand_in)

    async def unloaded(self, model: LoadedModel, timeout_seconds: float) -> bool:
        """Return when that has happened; False if it takes too long."""
        ids = (model.ready.model_id, model.bf16_id)
        return all(await asyncio.gather(*[self._scheduler.unloaded(each, timeout_seconds) for each in ids]))

    def unload(self, model: LoadedModel) -> None:
        """Give back all that a model takes, when no request uses it any more."""
        self.withdrawn(model)
        if model.variants is not None:
            self._variants.drop(model.variants)
        self._pairs.unload(model.ready.model_id)
        self._scheduler.unload(model.ready.model_id)

    def shape_wanted(self, message: ShapeWanted) -> None:
        """A front end has answered a request of sizes that are not compiled."""
        self._variants.want(message)

    def part_failed(self, model_id: int, reason: str, at_fault: bool) -> bool:
        """No worker has a model any more, or it has ended too many of them (`at_fault`).

        Say whether that was only a part of one that goes on being served: in bf16, or for certain sizes.
        """
        if self._pairs.failed(model_id, reason):
            return True
        self._pairs.unload(model_id)
        return self._variants.model_failed(model_id, at_fault)

    def artifact_missing(self, model_id: int, reason: str) -> None:
        """A worker cannot load what others serve; it tries again now and then."""
        spec = self._scheduler.spec_of(model_id)
        if spec is not None and spec.key not in self._recompiling:
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
        self._python.remove(model_id, then=lambda: heapq.heappush(self._free_ids, model_id))

    async def compile_shapes(self) -> None:
        """From now on compile models for the sizes of symbolic dimensions that requests have. Never returns."""
        await self._variants.run()

    def stop(self) -> None:
        """End what is being compiled."""
        for task in self._recompiling.values():
            task.cancel()
        self._compiler.stop()

    def close(self) -> None:
        """Remove what was unpacked for Python models, whose instances have ended."""
        self._environments.close()

    async def _are_cached(
        self,
        entry: ModelVersion,
        manifest: Manifest,
        known: Sequence[Mapping[str, int]],
        precision: WantedPrecision,
    ) -> bool:
        """Whether a model need not be compiled for any of these sizes of its symbolic dimensions, or cannot be."""
        if is_never_compiled(manifest.inputs):
            return True
        try:
            for sizes in known:
                request = CompileRequest(entry.name, entry.path, sizes, precision=precision, stand_in=True)
                await self._compiler.compile(request)
        except CompileError:
            return False
        return True

    async def _compiled_for(
        self,
        entry: ModelVersion,
        manifest: Manifest,
        sizes: Mapping[str, int],
        batched: bool,
        precision: WantedPrecision,
    ) -> Manifest:
        """Return the model compiled for the only sizes that its configuration allows, if that is possible."""
        if is_never_compiled(manifest.inputs):
            return manifest
        title = f"{entry.name}, {', '.join(f'{symbol}={size}' for symbol, size in sizes.items())}"
        try:
            compiled = await self._compiler.compile(CompileRequest(title, entry.path, sizes, precision=precision))
        except CompileError as error:
            return replace(manifest, fallback_reason=str(error))
        return compiled if compiled.batched == batched else manifest

    async def _tried(self, made: MadeModel) -> LoadedModel:
        """Have a model that workers have answer trial requests, and tell the scheduler what they show."""
        entry, config, manifest, spec, in_bf16 = made.entry, made.config, made.manifest, made.spec, made.in_bf16
        tell_engine(config, manifest, in_bf16)
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
            labels=made.labels,
            initial_states=made.initial_states,
            tail=manifest.tail,
        )
        if (size_bytes := len(to_json(ready))) > MAX_MESSAGE_BYTES:
            raise ConfigError(f"tensors and configuration take {size_bytes} bytes, at most {MAX_MESSAGE_BYTES} can be")
        sizes = [dict(zip(ready.symbols, each, strict=True)) for each in made.declared]
        tried = await self._trials.try_model(ready, manifest, config, entry.folder, sizes)
        if tried.mixed_rows:
            _log.log(
                logging.INFO if tried.is_untested else logging.WARNING,
                "%s: every request runs alone, although the configuration asks for batches: %s",
                entry.title,
                tried.mixed_rows,
            )
            config.parameters[BATCHING_PARAMETER].string_value = BATCHING_OFF
        tell_least_target(config, tried.busy_cost_us)
        tell_target(config, entry.qos, tried.isolated)
        qos_us = resolve_qos_us(entry.qos, tried.isolated)

        async def attempt(model_id: int) -> IsolatedLatency | None:
            again = replace(ready, model_id=model_id)
            return (await self._trials.try_model(again, manifest, config, entry.folder, sizes)).isolated

        bf16_id = await self._pairs.load(spec, in_bf16, ready, attempt, qos_us, self._require_memory)
        if bf16_id >= 0:
            self._mapped_bytes[bf16_id] = in_bf16.weights_bytes
        else:
            tell_engine(config, manifest, replace(in_bf16, manifest=None))
        ready = replace(
            ready,
            config=_encoded(config),
            qos_us=qos_us,
            isolated_us=tried.isolated.compute_us if tried.isolated else 0.0,
            weights_bytes=manifest.weights_bytes + (in_bf16.weights_bytes if bf16_id >= 0 else 0),
            chooses_precision=made.wanted.name == DEADLINE,
        )
        warn_of_target(ready, entry.qos, tried.isolated, tried.request_cost_us)
        self._scheduler.set_profile(profile_message(spec.model_id, ready, tried.isolated))
        warn_of_difference(entry.title, manifest)
        shaped = None
        if made.meanwhile is None:
            shaped = await self._variants.prepare(ready, entry.path, made.declared, spec, entry.qos, made.wanted)
        if shaped is not None:
            ready = shaped.ready  # it may say how declared sizes differ
        if shaped is None and made.meanwhile is None and bucket_sizes(config) and ready.symbols:
            why = "nothing is compiled with optional inputs or strings"
            log_without_effect(entry.name, [f"parameter {BUCKETS_PARAMETER} ({why})"])
        if tried.isolated is not None and made.meanwhile is None:
            self._profiles.add(spec.model_id, manifest)
        return LoadedModel(entry, ready, tried.isolated, manifest.engine, shaped, bf16_id, made.meanwhile)

    def _take_id(self) -> int:
        if not self._free_ids:
            raise ModelLoadError(f"{_native.MAX_MODELS} models are loaded, more are not possible")
        return heapq.heappop(self._free_ids)

    def _spec(self, name: str, manifest: Manifest, rows: int, model_id: int | None = None) -> LoadModel:
        return LoadModel(
            model_id=self._take_id() if model_id is None else model_id,
            name=name,
            key=manifest.key,
            layers=len(manifest.layers),
            max_ranks=_max_ranks(manifest),
            arena_bytes=manifest.arena_bytes + staging_bytes(manifest),
            max_rows=rows,
            indivisible=manifest.is_whole,
            yields=manifest.engine is Engine.PYTHON,
            long_layers=_long_layers(manifest),
            layer_us=estimated_layer_us(manifest),
            layer_ranks=tuple(layer.max_ranks for layer in manifest.layers),
            pass_layers=manifest.pass_layers,
            pass_rows=manifest.pass_rows,
            splits=not (manifest.tail or manifest.is_whole),  # a request has one answer
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
            if spec.key in self._descriptions:
                await asyncio.to_thread(
                    write_description, self._options.general.cache_dir, self._descriptions[spec.key]
                )
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
    return tuple(number for number, layer in enumerate(manifest.layers) if manifest.is_whole or layer.onnx_file)


def _max_ranks(manifest: Manifest) -> int:
    """Return beyond how many cores no layer gets faster; a profile says more about onnxruntime."""
    if manifest.engine is Engine.PYTHON:
        return 1
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
        begins = "with its first request" if model.variants.waits_for_requests else "now"
        served_by = (
            f"served by onnxruntime until a size of ({symbols}) has been compiled, which begins {begins};"
            " to compile before, set dims or gangway_buckets"
        )
        if model.variants.loaded:
            sizes = ", ".join("x".join(map(str, each)) for each in model.variants.loaded)
            served_by = f"compiled for ({symbols}) of {sizes}; onnxruntime serves other sizes until they are compiled"
    elif model.meanwhile is not None:
        served_by = "served by onnxruntime until it is compiled"
    elif model.engine is Engine.PYTHON:
        served_by = "computed by Python"
    elif model.engine is Engine.ONNXRUNTIME:
        level, served_by = logging.WARNING, f"served by onnxruntime: {manifest.fallback_reason}"
    elif islands := manifest.islands:
        operators = ", ".join(dict.fromkeys(layer.operator for layer in islands))
        served_by = f"compiled, onnxruntime computes {len(islands)} of {len(manifest.layers)} layers: {operators}"
    if manifest.precision_note:
        served_by += f" in {manifest.precision} ({manifest.precision_note})"
    if manifest.integers:
        served_by += f", 8-bit numbers by {manifest.integers}"
    _log.log(level, "model %s: ready after %.2f s, %s", model.entry.title, seconds, served_by)
