"""The load of a model, stage by stage. Each stage returns a frozen value, from which the next one goes on.

1. read: what lies beside the model's file, whose configuration `repository.py` has read, and what the flags ask for
2. compile: machine code, with the signature of the model (`compile_jobs.py`)
3. complete: the configuration, by that signature (`completed_config.py`)
4. specialize: machine code for the only sizes that the configuration allows, and in bf16 (`precisions.py`)
5. place: in all workers (`supervisor/scheduler.py`)
6. profile: by trial requests (`trials.py`)
7. describe: to the scheduler, and for clients, to whom `ServedModels.serve` in `control.py` announces the model

Instances of a Python model complete its configuration, so they are started in place of 1 to 4 (`python_models.py`).
No serving process reads ONNX, and a start from a warm cache touches no model file.
"""

import asyncio
import json
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from msgspec import structs

from gangway.artifact.format import Engine, Manifest
from gangway.artifact.precision import DEADLINE, IN_FP32, WantedPrecision
from gangway.base.files import model_stamp
from gangway.base.peer import MAX_MESSAGE_BYTES
from gangway.protos.model_config_pb2 import ModelConfig
from gangway.scheduler.messages import LoadModel
from gangway.server.control.repository.capacity import ModelCapacity
from gangway.server.control.repository.compile_jobs import Compiler, CompileRequest
from gangway.server.control.repository.completed_config import (
    MOST_ROWS,
    CompletedModel,
    completed_by,
    is_one_batch,
    max_rows,
    optional_inputs,
    row_limit,
    tell_engine,
    tell_target,
    tell_trials,
    with_compiled_dimensions,
)
from gangway.server.control.repository.embedding_files import complete_embeddings
from gangway.server.control.repository.loaded import (
    NOT_WANTED,
    FilesByTensor,
    FilesStamp,
    InBf16,
    IsolatedLatency,
    LoadedModel,
    PendingCompilation,
    TrialResult,
    Trials,
    config_of,
    profile_message,
    resolve_qos_us,
    warn_of_difference,
    warn_of_target,
    with_difference,
)
from gangway.server.control.repository.precisions import PrecisionPairs
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
from gangway.server.control.repository.schedules import StoredSchedules
from gangway.server.control.repository.shapes import ShapeCache, is_never_compiled
from gangway.server.control.supervisor.announcements import Announcements
from gangway.server.control.supervisor.python_instances import PythonInstances
from gangway.server.control.supervisor.scheduler import SchedulerControl
from gangway.server.control.supervisor.shared_memory import arenas_bytes
from gangway.server.errors import LOAD_ERRORS, CompileError, ConfigError, ModelLoadError
from gangway.server.messages import ModelReady, to_json
from gangway.server.models.config import BUCKETS_PARAMETER, bucket_sizes, log_without_effect, require_complete
from gangway.server.models.message_json import to_json as message_json
from gangway.server.models.sequences import initial_state_files
from gangway.server.models.settings import (
    ModelBatching,
    ModelLimits,
    idle_unload_s_of,
    label_files,
    precision_of,
    serves_while_compiling,
    show_dynamic_batching,
    tell_batching,
)
from gangway.server.options.command_line import ServeOptions

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReadModel:
    """1. What the files and flags ask for. `optional`: inputs that requests may leave out.

    `labels`, `initial_states`: files in the model's folder that the configuration names, by output, by input.
    `at_once`: onnxruntime is to serve it until it is compiled. `files`: what it is then to be compiled of.
    """

    entry: ModelVersion
    limits: ModelLimits
    labels: FilesByTensor
    initial_states: FilesByTensor = ()
    wanted: WantedPrecision = IN_FP32
    optional: tuple[str, ...] = ()
    at_once: bool = False
    files: FilesStamp = ()
    idle_unload_s: float = 0.0


@dataclass(frozen=True)
class MadeModel:
    """4. What workers can load, and what the scheduler is told of it. `batched`: the first dimension counts rows.

    `declared`: sizes of symbolic dimensions that are compiled before it is ready. `pending_compilation`: as of the
    loaded model.
    """

    read: ReadModel
    config: ModelConfig
    manifest: Manifest
    spec: LoadModel
    batched: bool
    declared: Sequence[tuple[int, ...]] = ()
    in_bf16: InBf16 = NOT_WANTED
    pending_compilation: PendingCompilation | None = None


@dataclass(frozen=True)
class ProfiledModel:
    """6. What clients are to know of a model that workers have, and what trial requests have shown of it.

    `bf16_id`: as of the loaded model.
    """

    made: MadeModel
    ready: ModelReady
    tried: TrialResult
    bf16_id: int


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
        self._capacity = ModelCapacity(len(options.general.cores), arenas_bytes(), options.models.memory_mib << 20)
        self._pairs = PrecisionPairs(compiler, scheduler, profiles, self._capacity)
        self.shapes = ShapeCache(
            compiler, scheduler, clients, self._capacity, trials, profiles, self._pairs, options.general
        )
        general = options.general
        self.schedules = StoredSchedules(general.cache_dir, len(general.cores), scheduler, lambda: compiler.target)
        self._recompiling: dict[str, asyncio.Task[None]] = {}  # by key of the artifact

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
        """Take a version through all stages."""
        begin = time.monotonic()
        if not self._options.repository.complete_configs:
            require_complete(entry.config)
        if entry.is_python:
            made = await self._start(entry)
        else:
            read = self._read(entry, at_once)
            completed = await self._complete(read, await self._compile(read))
            made = await self._specialize(read, completed)
        await self._place(made)
        try:
            model = await self._describe(await self._profile(made))
        except BaseException:
            self._pairs.unload(made.spec.model_id)
            raise
        seconds = time.monotonic() - begin
        _log_ready(model, made.manifest, seconds)
        return replace(model, ready=replace(model.ready, load_seconds=seconds))

    def _read(self, entry: ModelVersion, at_once: bool) -> ReadModel:
        """1. Read what lies beside the model. Raises ConfigError, OSError."""
        config, options = entry.config, self._options.models
        require_one_front_end(config, self._options.general.front_ends)
        folder = entry.folder
        labels = tuple(label_files(folder, config).items())
        initial_states = tuple(initial_state_files(folder, config).items())
        limits = ModelLimits.of(config, entry.name, entry.version, options.rates)
        log_without_effect(entry.name, entry.without_effect)
        optional = optional_inputs(config)
        wanted = precision_of(config, options.precision)
        is_wanted = serves_while_compiling(config, options.serve_while_compiling)
        # The state of a sequence is an artifact's, and optional inputs are never compiled.
        at_once = at_once and is_wanted and not (optional or config.HasField("sequence_batching"))
        files = model_stamp(entry.path) if at_once else ()
        idle_unload_s = idle_unload_s_of(config, options.idle_unload_s)
        return ReadModel(entry, limits, labels, initial_states, wanted, optional, at_once, files, idle_unload_s)

    async def _compile(self, read: ReadModel) -> Manifest:
        """2. Compile the model, unless it is to be served before that. Raises CompileError, OSError."""
        entry = read.entry
        request = CompileRequest(
            entry.name,
            entry.path,
            optional=read.optional,
            stamp=entry.stamp,
            with_batch=entry.config.max_batch_size > 0,
            precision=read.wanted.each[0],
            stand_in=read.at_once,
        )
        return await self._compiler.compile(request)

    async def _complete(self, read: ReadModel, manifest: Manifest) -> CompletedModel:
        """3. Complete the configuration by the compiled model's signature. Raises ConfigError, CompileError."""
        entry, options = read.entry, self._options.models
        config = completed_by(manifest, entry.config, entry.name, options)
        # First dimensions of several names are sizes then, so what is compiled is of no use.
        if not config.max_batch_size and manifest.is_compilable and not is_one_batch(manifest.inputs):
            manifest = await self._compiler.compile(CompileRequest(entry.name, entry.path, whole=True))
        return CompletedModel.of(config, manifest, self._options.general.max_shapes)

    async def _specialize(self, read: ReadModel, completed: CompletedModel) -> MadeModel:
        """4. Compile the model for the only sizes that it has, and in bf16. Raises LOAD_ERRORS.

        Without either this looks whether it has to be compiled at all before it is served.
        """
        entry, config, manifest = read.entry, completed.config, completed.manifest
        declared, only = completed.declared, completed.only
        pending = PendingCompilation(read.files, manifest.key) if manifest.is_stand_in else None
        if read.at_once and not pending and not await self._are_cached(read, completed):
            pending, declared, only = PendingCompilation(read.files), [], {}
        elif only:
            manifest, declared = await self._compiled_for(read, completed), []
        in_bf16 = await self._pairs.compiled(entry.name, entry.path, manifest, read.wanted, only)
        batched, rows = row_limit(config, manifest, self._capacity.rows_of(entry.name, manifest, in_bf16.manifest))
        batching = ModelBatching.of(config)
        if not (entry.config.input and entry.config.output):
            show_dynamic_batching(config)
        spec = read.limits.applied_to(batching.applied_to(self._capacity.spec(entry.title, manifest, rows)))
        spec = structs.replace(spec, idle_unload_s=read.idle_unload_s)
        return MadeModel(read, config, manifest, spec, batched, declared, in_bf16, pending)

    async def _start(self, entry: ModelVersion) -> MadeModel:
        """1 to 4 of a Python model: start its instances, which complete its configuration. Raises LOAD_ERRORS."""
        settings = check_python(entry.config)
        require_one_front_end(entry.config, self._options.general.front_ends)
        log_without_effect(entry.name, entry.without_effect)
        environment = await asyncio.to_thread(self._environments.of, settings, entry.folder)
        options = self._options.models
        plan = plan_of(entry, settings, environment, self._options.repository.complete_configs, options)
        model_id = self._capacity.take_id()
        try:
            instances = self._python.add(model_id, plan)
            config = completed_config(await instances.completed_config(), entry.config, entry.name)
            settings = check_python(config)
            require_one_front_end(config, self._options.general.front_ends)
            labels = tuple(label_files(entry.folder, config).items())
            limits = ModelLimits.of(config, entry.name, entry.version, options.rates, settings.most_executions)
            await instances.initialise(json.dumps(message_json(config)))
            manifest = describe(config, entry.name)
            await asyncio.to_thread(write_description, self._options.general.cache_dir, manifest)
            self._descriptions[manifest.key] = manifest
            tell_batching(config, options.batching)
            tell_engine(config, manifest)
            rows = max_rows(config, manifest.batched, MOST_ROWS)
            spec = self._capacity.spec(entry.title, manifest, rows, model_id)
            spec = limits.applied_to(python_batching(config).applied_to(spec))
        except BaseException:
            self.forget(model_id)
            raise
        return MadeModel(ReadModel(entry, limits, labels), config, manifest, spec, manifest.batched)

    async def _place(self, made: MadeModel) -> None:
        """5. Return when all workers have the model. Raises ModelLoadError."""
        await self._scheduler.load(made.spec)
        self._capacity.map_weights(made.spec.model_id, made.manifest)

    async def _profile(self, made: MadeModel) -> ProfiledModel:
        """6. Have the model, and the same in bf16, answer trial requests. Raises ConfigError, ModelLoadError."""
        entry, config, manifest, spec = made.read.entry, made.config, made.manifest, made.spec
        in_bf16 = made.in_bf16
        tell_engine(config, manifest, in_bf16)
        tokenizer = complete_embeddings(config, entry.title, entry.folder, entry.path.parent)
        ready = ModelReady(
            model_id=spec.model_id,
            name=entry.name,
            version=entry.version,
            config=config.SerializeToString(),
            inputs=manifest.inputs,
            outputs=manifest.outputs,
            max_batch_size=config.max_batch_size,
            max_rows=spec.max_rows,
            batched=made.batched,
            engine=manifest.engine,
            weights_bytes=manifest.weights_bytes,
            labels=made.read.labels,
            initial_states=made.read.initial_states,
            tail=manifest.tail,
            tokenizer=tokenizer,
            has_is_ready=self._python.have_is_ready(spec.model_id),
        )
        if (size_bytes := len(to_json(ready))) > MAX_MESSAGE_BYTES:
            raise ConfigError(f"tensors and configuration take {size_bytes} bytes, at most {MAX_MESSAGE_BYTES} can be")
        sizes = [dict(zip(ready.symbols, each, strict=True)) for each in made.declared]
        tried = self._profiled(manifest, await self._trials.try_model(ready, manifest, config, entry.folder, sizes))
        if tried.mixed_rows:
            _log.log(
                logging.INFO if tried.is_untested else logging.WARNING,
                "%s: every request runs alone, although the configuration asks for batches: %s",
                entry.title,
                tried.mixed_rows,
            )
        tell_trials(config, entry.qos, tried)
        qos_us = resolve_qos_us(entry.qos, tried.isolated)

        async def attempt(model_id: int) -> IsolatedLatency | None:
            again = replace(ready, model_id=model_id)
            return (await self._trials.try_model(again, manifest, config, entry.folder, sizes)).isolated

        bf16_id = await self._pairs.load(spec, in_bf16, ready, attempt, qos_us, is_counted=True)
        if bf16_id < 0 and in_bf16.manifest is not None:
            in_bf16 = replace(in_bf16, manifest=None)
            tell_engine(config, manifest, in_bf16)
        ready = replace(
            ready,
            config=config.SerializeToString(),
            qos_us=qos_us,
            isolated_us=tried.isolated.compute_us if tried.isolated else 0.0,
            weights_bytes=manifest.weights_bytes + in_bf16.weights_bytes,
            chooses_precision=made.read.wanted.name == DEADLINE,
        )
        return ProfiledModel(made, ready, tried, bf16_id)

    def _profiled(self, manifest: Manifest, tried: TrialResult) -> TrialResult:
        """Return what trials have shown with the time of the profile, if there is one: it is the same at each start."""
        compute_us = self._profiles.compute_us(manifest) if tried.isolated else None
        return tried if compute_us is None else replace(tried, isolated=self._trials.latency_of(compute_us))

    async def _describe(self, profiled: ProfiledModel) -> LoadedModel:
        """7. Tell the scheduler what trials have shown, and compile the declared sizes. Raises LOAD_ERRORS."""
        made, ready, tried = profiled.made, profiled.ready, profiled.tried
        entry, manifest, spec = made.read.entry, made.manifest, made.spec
        warn_of_target(ready, entry.qos, tried.isolated)
        self._scheduler.set_profile(profile_message(spec.model_id, ready, tried.isolated))
        warn_of_difference(spec.name, manifest)
        shaped = None
        if made.pending_compilation is None:
            shaped = await self.shapes.prepare(ready, entry, made.declared, spec, made.read.wanted)
            if shaped is not None:
                # It may say how declared sizes differ.
                ready = shaped.ready = with_compiled_dimensions(shaped.ready)
            elif bucket_sizes(made.config) and ready.symbols:
                why = "nothing is compiled with optional inputs or strings"
                log_without_effect(entry.name, [f"parameter {BUCKETS_PARAMETER} ({why})"])
            if tried.isolated is not None:
                self._profiles.add(spec.model_id, entry.name, manifest)
        return LoadedModel(
            entry, ready, tried.isolated, manifest.engine, shaped, profiled.bf16_id, made.pending_compilation
        )

    async def _are_cached(self, read: ReadModel, completed: CompletedModel) -> bool:
        """Whether the model need not be compiled for any of the sizes that it is to have at once, or cannot be."""
        if is_never_compiled(completed.manifest.inputs):
            return True
        name, path, precision = read.entry.name, read.entry.path, read.wanted.each[0]
        try:
            for each in completed.known:
                await self._compiler.compile(CompileRequest(name, path, each, precision=precision, stand_in=True))
        except CompileError:
            return False
        return True

    async def _compiled_for(self, read: ReadModel, completed: CompletedModel) -> Manifest:
        """Return the model compiled for the only sizes that its configuration allows, if that is possible."""
        manifest, sizes = completed.manifest, completed.only
        if is_never_compiled(manifest.inputs):
            return manifest
        title = f"{read.entry.name}, {', '.join(f'{symbol}={size}' for symbol, size in sizes.items())}"
        request = CompileRequest(title, read.entry.path, sizes, precision=read.wanted.each[0])
        try:
            compiled = await self._compiler.compile(request)
        except CompileError as error:
            return replace(manifest, fallback_reason=str(error))
        return compiled if compiled.batched == completed.batched else manifest

    # -- after the load

    def measured(self, model: LoadedModel, row_us: float, source: str) -> LoadedModel:
        """Return a model whose time alone is known better now: a row of it takes so long, as `source` has shown."""
        isolated, config, qos = self._trials.latency_of(row_us), config_of(model.ready), model.entry.qos
        tell_target(config, qos, isolated)
        ready = replace(
            model.ready,
            config=config.SerializeToString(),
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
                "%s: its latency target is %.3f ms from now on, %gx: a row%s computes for %.3f ms alone by its %s",
                model.entry.title,
                (ready.qos_us or 0.0) / 1e3,
                qos.multiple,
                " of a size that is not compiled" if model.variants is not None else "",
                row_us / 1e3,
                source,
            )
        return replace(model, ready=ready, isolated=isolated)

    def announced(self, model: LoadedModel) -> None:
        """Clients have been told of a model: compile it for the sizes that they use."""
        if model.variants is not None:
            self.shapes.adopt(model.variants)

    def withdrawn(self, model: LoadedModel) -> None:
        """Clients get it no more, though requests that have begun may still use it."""
        self._pairs.withdrawn(model.ready.model_id)
        if model.variants is not None:
            self.shapes.forget(model.variants)

    async def discard(self, model: LoadedModel) -> None:
        """Remove what was in the cache for a model until it was compiled."""
        if model.pending_compilation is not None and model.pending_compilation.stand_in:
            await self._compiler.discard(model.pending_compilation.stand_in)

    async def unloaded(self, model: LoadedModel, timeout_seconds: float) -> bool:
        """Return when that has happened; False if it takes too long."""
        ids = (model.ready.model_id, model.bf16_id)
        return all(await asyncio.gather(*[self._scheduler.unloaded(each, timeout_seconds) for each in ids]))

    def unload(self, model: LoadedModel) -> None:
        """Give back all that a model takes, when no request uses it any more."""
        self.withdrawn(model)
        if model.variants is not None:
            self.shapes.drop(model.variants)
        self._pairs.unload(model.ready.model_id)

    def part_failed(self, model_id: int, reason: str, at_fault: bool) -> bool:
        """No worker has a model any more, or it has ended too many of them (`at_fault`).

        Say whether that was only a part of one that goes on being served: in bf16, or for certain sizes.
        """
        if self._pairs.failed(model_id, reason):
            return True
        self._pairs.unload_bf16(model_id)
        return self.shapes.model_failed(model_id, at_fault)

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
        self._capacity.unmap_weights(model_id)
        self._python.remove(model_id, then=partial(self._capacity.give_back, model_id))

    def stop(self) -> None:
        """End what is being compiled."""
        for task in self._recompiling.values():
            task.cancel()
        self._compiler.stop()

    def close(self) -> None:
        """Remove what was unpacked for Python models, whose instances have ended."""
        self._environments.close()

    async def _compile_again(self, spec: LoadModel) -> None:
        try:
            if spec.key in self._descriptions:
                await asyncio.to_thread(
                    write_description, self._options.general.cache_dir, self._descriptions[spec.key]
                )
            await self._compiler.compile_again(spec.key)
        except LOAD_ERRORS as error:
            _log.error("%s: cannot be compiled again, so fewer workers serve it: %s", spec.name, error)


def require_one_front_end(config: ModelConfig, front_ends: int) -> None:
    """Raise ConfigError for a model whose state is in the front end that got the request."""
    if front_ends > 1 and config.HasField("sequence_batching"):
        raise ConfigError(
            "sequence_batching: a sequence's requests may come over several connections, so over several front ends,"
            f" which do not share its state; --front-ends is {front_ends}, and must be 1 for this model"
        )


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
    elif model.pending_compilation is not None:
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
