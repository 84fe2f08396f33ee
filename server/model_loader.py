"""From a repository entry to a model that answers requests: compile, load, measure, announce."""

import asyncio
import base64
import heapq
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gangway.artifact.format import WEIGHTS_FILE, Engine, Manifest
from gangway.executor import _native
from gangway.scheduler.control import LoadModel
from gangway.scheduler.profiles import estimated_layer_us
from gangway.server.auto_complete import complete_config, max_rows, tell_engine
from gangway.server.compile_jobs import CompileError, Compiler
from gangway.server.control import ModelLoadError, SchedulerControl
from gangway.server.data_plane import DataPlane
from gangway.server.front_end_control import FrontEndControl
from gangway.server.front_end_messages import ModelReady, ModelUnavailable
from gangway.server.isolated import Isolated, TrialError, measure_isolated
from gangway.server.model_config import ConfigError, buckets_of
from gangway.server.models import ServedModel, open_symbols
from gangway.server.profile_keeper import ProfileKeeper
from gangway.server.repository import BrokenModel, ModelVersion, read_repository
from gangway.server.targets import profile_message, resolve_qos_us, warn_of_target
from gangway.server.variants import VariantKeeper

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model that answers requests, and how fast it is when it is alone, if that is known."""

    ready: ModelReady
    isolated: Isolated | None
    engine: Engine


class ModelLoader:
    """Loads models one after the other: compilation has the machine for itself, and so has each measurement."""

    def __init__(
        self,
        compiler: Compiler,
        scheduler: SchedulerControl,
        front_end: FrontEndControl,
        plane: DataPlane,
        max_shapes: int,
        profiles: ProfileKeeper,
    ) -> None:
        self._compiler = compiler
        self._scheduler = scheduler
        self._front_end = front_end
        self._plane = plane
        self._max_shapes = max_shapes
        self._profiles = profiles
        self._free_ids = list(range(_native.MAX_MODELS))
        self._variants = VariantKeeper(compiler, scheduler, front_end, self._spec, max_shapes)
        self._stop = threading.Event()
        self.loaded: dict[int, LoadedModel] = {}
        self.broken: list[BrokenModel] = []
        scheduler.on_model_lost = self._lost
        scheduler.on_model_unloaded = lambda model_id: heapq.heappush(self._free_ids, model_id)

    async def load_all(self, repositories: Sequence[Path]) -> None:
        """Load what the repositories hold. A broken model is announced as such and hinders no other one."""
        entries = read_repository(repositories)
        for entry in entries:
            if isinstance(entry, ModelVersion):
                self._front_end.announce(ModelUnavailable(entry.name, entry.version, "it is being loaded", "LOADING"))
            else:
                self._refuse(entry)
        for entry in entries:
            if isinstance(entry, ModelVersion):
                await self._load_or_refuse(entry)
        self._front_end.initial_load_done()

    async def compile_shapes(self) -> None:
        """From now on compile models for the sizes of symbolic dimensions that requests have. Never returns."""
        await self._variants.run()

    def stop(self) -> None:
        """End what is being compiled or measured."""
        self._stop.set()
        self._compiler.stop()

    async def _load_or_refuse(self, entry: ModelVersion) -> None:
        begin = time.monotonic()
        try:
            model = await self._load(entry)
        except (CompileError, ConfigError, ModelLoadError) as error:
            self._refuse(BrokenModel(entry.name, entry.version, str(error)))
            return
        seconds = time.monotonic() - begin
        model = replace(model, ready=replace(model.ready, load_seconds=seconds))
        self.loaded[model.ready.model_id] = model
        self._front_end.announce(model.ready)
        _log.info("model %s, version %d: ready after %.2f s", entry.name, entry.version, seconds)

    async def _load(self, entry: ModelVersion) -> LoadedModel:
        manifest = await self._compiler.compile(entry.name, entry.path)
        config = complete_config(entry.config, entry.name, manifest.inputs, manifest.outputs, manifest.batched)
        tell_engine(config, manifest.engine, manifest.fallback_reason)
        rows = max_rows(config, manifest.batched)
        declared = buckets_of(config, open_symbols(manifest.inputs, manifest.batched))
        if len(declared) > self._max_shapes:
            raise ConfigError(f"{len(declared)} buckets are declared, at most {self._max_shapes} shapes are compiled")
        spec = self._spec(f"{entry.name}, version {entry.version}", manifest, rows)
        await self._scheduler.load(spec)
        ready = ModelReady(
            model_id=spec.model_id,
            name=entry.name,
            version=entry.version,
            config=base64.b64encode(config.SerializeToString()).decode(),
            inputs=manifest.inputs,
            outputs=manifest.outputs,
            max_batch_size=config.max_batch_size,
            max_rows=rows,
            batched=manifest.batched,
            engine=manifest.engine,
            weights_bytes=_weights_bytes(manifest),
        )
        isolated = await self._measure(ready)
        ready = replace(ready, qos_us=resolve_qos_us(entry.qos, isolated))
        warn_of_target(ready, entry.qos, isolated)
        self._scheduler.set_profile(profile_message(spec.model_id, ready, isolated))
        self._profiles.add(spec.model_id, manifest)
        await self._variants.add(ready, entry.path, declared)
        return LoadedModel(ready, isolated, manifest.engine)

    async def _measure(self, ready: ModelReady) -> Isolated | None:
        """Return how fast the model is alone; None for one that onnxruntime executes, but not with zeros."""
        try:
            return await asyncio.to_thread(measure_isolated, self._plane, ServedModel.of(ready), self._stop)
        except ModelLoadError as error:
            if isinstance(error, TrialError) and ready.engine is Engine.ONNXRUNTIME:
                _log.warning("%s: not measured: %s", ready.name, error)
                return None
            self._scheduler.unload(ready.model_id)
            raise

    def _spec(self, name: str, manifest: Manifest, rows: int) -> LoadModel:
        if not self._free_ids:
            raise ModelLoadError(f"{_native.MAX_MODELS} models are loaded, more are not possible")
        return LoadModel(
            model_id=heapq.heappop(self._free_ids),
            name=name,
            key=manifest.key,
            layers=len(manifest.layers),
            max_ranks=max(layer.max_ranks for layer in manifest.layers),
            arena_bytes=manifest.arena_bytes,
            max_rows=rows,
            indivisible=manifest.engine is Engine.ONNXRUNTIME,
            layer_us=estimated_layer_us(manifest),
            layer_ranks=tuple(layer.max_ranks for layer in manifest.layers),
        )

    def _refuse(self, broken: BrokenModel) -> None:
        _log.error("model %s%s: %s", broken.name, f", version {broken.version}" * bool(broken.version), broken.reason)
        self.broken.append(broken)
        self._front_end.announce(ModelUnavailable(broken.name, broken.version, broken.reason))

    def _lost(self, model_id: int, reason: str) -> None:
        if self._variants.lost(model_id):
            return
        model = self.loaded.pop(model_id, None)
        if model is not None:
            self._refuse(BrokenModel(model.ready.name, model.ready.version, reason))


def _weights_bytes(manifest: Manifest) -> int:
    """Return the size of the weights that all workers share; onnxruntime has copies of its own, of unknown size."""
    return 0 if manifest.engine is Engine.ONNXRUNTIME else manifest.files[WEIGHTS_FILE].size_bytes
