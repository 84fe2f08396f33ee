"""Models with symbolic dimensions, compiled for the sizes that requests have: which are loaded, and for how long.

onnxruntime answers all sizes. Each size that has answered a request is compiled once, in the background and one at a
time; what is loaded takes over the requests of its sizes. At most `limit` per model stay loaded, the least recently
used one goes first. Sizes that the model's owner declared (`gangway_buckets`) are compiled before the model is ready,
and stay. What the compiler cannot do is not tried again; what has failed for another reason (a full disk, a killed job)
is, when requests ask for it after a pause.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gangway.artifact.format import Engine, Manifest
from gangway.scheduler.messages import LoadModel
from gangway.scheduler.pauses import Pauses
from gangway.server.messages import ModelReady, ShapeWanted, VariantGone, VariantReady
from gangway.server.models.served import open_symbols
from gangway.server.models.settings import ModelBatching
from gangway.server.repository.compile_jobs import CompileError, Compiler
from gangway.server.repository.targets import profile_message
from gangway.server.supervisor.front_ends import FrontEndControl
from gangway.server.supervisor.scheduler import ModelLoadError, SchedulerControl

Sizes = tuple[int, ...]

MAX_QUEUED = 16  # sizes that wait to be compiled, of all models; what comes on top asks again later
NEVER_COMPILED = ("BYTES", "BF16")
MAX_REFUSED = 4096  # sizes of one model that could not be compiled; beyond that no others are tried
FIRST_PAUSE_SECONDS = 30.0  # front ends ask for the same sizes once a minute at most
LONGEST_PAUSE_SECONDS = 3600.0
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Shaped:
    """A model with symbolic dimensions. `loaded` are its variants by sizes, the longest unused first.

    `refused` sizes are never tried again, `failed` ones are.

    `is_dropped`: the model is unloaded, or about to be.
    """

    ready: ModelReady
    path: Path
    symbols: tuple[str, ...]
    spec: LoadModel  # of the model itself, whose limits and batches hold for its variants, too
    loaded: dict[Sizes, VariantReady] = field(default_factory=dict)
    declared: set[Sizes] = field(default_factory=set)
    refused: set[Sizes] = field(default_factory=set)
    failed: dict[Sizes, tuple[Pauses, float]] = field(default_factory=dict)  # until when they are not tried
    is_dropped: bool = False

    @property
    def key(self) -> tuple[str, int]:
        """Name and version."""
        return self.ready.name, self.ready.version

    def like_it(self, variant: LoadModel) -> LoadModel:
        """Return what the scheduler is told of a variant: limits and batches are those of the model."""
        own = self.spec
        return ModelBatching.told(own).give(replace(variant, limits=own.limits, limit_priority=own.limit_priority))

    def failed_for_now(self, sizes: Sizes) -> None:
        """Note that these sizes are not there, for a reason that may pass."""
        pauses = self.failed[sizes][0] if sizes in self.failed else _pauses()
        self.failed[sizes] = pauses, time.monotonic() + pauses.failed()

    def may_try(self, sizes: Sizes) -> bool:
        """Whether it is of use to compile for these sizes now."""
        tried = len(self.refused) + len(self.failed)
        if sizes in self.loaded or sizes in self.refused:
            return False
        return time.monotonic() >= self.failed[sizes][1] if sizes in self.failed else tried < MAX_REFUSED

    def title(self, sizes: Sizes) -> str:
        """Return the name of one variant, for people."""
        values = ", ".join(f"{symbol}={size}" for symbol, size in zip(self.symbols, sizes, strict=True))
        return f"{self.ready.name}, version {self.ready.version}, {values}"


class ShapeCache:
    """Everything is called in the supervisor's event loop."""

    def __init__(
        self,
        compiler: Compiler,
        scheduler: SchedulerControl,
        front_end: FrontEndControl,
        make_spec: Callable[[str, Manifest, int], LoadModel],
        limit: int,
        computable_rows: Callable[[Manifest], int],
    ) -> None:
        self._compiler = compiler
        self._scheduler = scheduler
        self._front_end = front_end
        self._make_spec = make_spec
        self._limit = limit
        self._computable_rows = computable_rows
        self._models: dict[tuple[str, int], Shaped] = {}
        self._queue: dict[tuple[str, int, Sizes], None] = {}
        self._news = asyncio.Event()
        front_end.on_shape_wanted = self.want

    async def prepare(self, ready: ModelReady, path: Path, declared: Sequence[Sizes], spec: LoadModel) -> Shaped | None:
        """Return when the declared sizes of a loaded model are compiled, or cannot be; None if it has none to compile.

        Nobody is told of it before `adopt`.
        """
        symbols = open_symbols(ready.inputs, ready.batched)
        if ready.engine is not Engine.ONNXRUNTIME or not symbols or not self._limit:
            return None
        if any(tensor.optional or tensor.datatype in NEVER_COMPILED for tensor in ready.inputs):
            return None  # compiled, an optional input would be a constant
        model = Shaped(ready, path, symbols, spec, declared=set(declared))
        try:
            for sizes in declared:
                await self._make(model, sizes)
        except BaseException:
            self.drop(model)
            raise
        return model

    def adopt(self, model: Shaped) -> None:
        """Take care of a model that has been announced."""
        self._models[model.key] = model
        for variant in model.loaded.values():
            self._front_end.announce_variant(variant)

    def forget(self, model: Shaped) -> None:
        """Compile no more of a model that is not served any more; what there is, its last requests may still use."""
        model.is_dropped = True
        if self._models.get(model.key) is model:
            del self._models[model.key]

    def drop(self, model: Shaped) -> None:
        """Unload what is compiled of a model that nobody uses any more."""
        self.forget(model)
        for variant in model.loaded.values():
            self._scheduler.unload(variant.model_id)
        model.loaded.clear()

    def want(self, message: ShapeWanted) -> None:
        """A front end has answered a request of sizes that are not compiled."""
        model = self._models.get((message.name, message.version))
        if model is None or len(message.sizes) != len(model.symbols):
            return
        for sizes in message.oldest:  # in the order of use: whatever was used last goes to the end
            if sizes in model.loaded:
                model.loaded[sizes] = model.loaded.pop(sizes)
        if model.may_try(message.sizes) and len(self._queue) < MAX_QUEUED:
            self._queue[message.name, message.version, message.sizes] = None
            self._news.set()

    def lost(self, model_id: int, at_fault: bool) -> bool:
        """No worker has it any more, or it ended workers (`at_fault`); say whether that was a variant."""
        found = self._find(model_id)
        if found is None:
            return False
        model, sizes = found
        del model.loaded[sizes]
        if at_fault:
            model.refused.add(sizes)
        else:
            model.failed_for_now(sizes)
        self._front_end.announce_variant(VariantGone(model.ready.name, model.ready.version, sizes))
        return True

    def _find(self, model_id: int) -> tuple[Shaped, Sizes] | None:
        for model in self._models.values():
            for sizes, variant in model.loaded.items():
                if variant.model_id == model_id:
                    return model, sizes
        return None

    async def run(self) -> None:
        """Compile what is wanted, until cancelled."""
        while True:
            await self._news.wait()
            while self._queue:
                name, version, sizes = next(iter(self._queue))
                model = self._models.get((name, version))
                if model is not None and sizes not in model.loaded:
                    await self._make(model, sizes)
                del self._queue[name, version, sizes]
            self._news.clear()

    async def _make(self, model: Shaped, sizes: Sizes) -> None:
        title = model.title(sizes)
        try:
            dimensions = dict(zip(model.symbols, sizes, strict=True))
            manifest = await self._compiler.compile(title, model.path, dimensions)
            if manifest.batched != model.ready.batched:
                raise CompileError("it is another model with these sizes: the first dimension has another meaning")
            while len(model.loaded) >= self._limit and self._drop_oldest(model):
                pass
            rows = model.ready.max_rows
            if not model.ready.max_batch_size:
                rows = min(rows, self._computable_rows(manifest))
            spec = model.like_it(self._make_spec(title, manifest, rows))
            await self._scheduler.load(spec)
        except (CompileError, ModelLoadError, OSError, RuntimeError) as error:
            if isinstance(error, CompileError) and error.is_final:
                _log.warning("%s: left to onnxruntime: %s", title, error)
                model.refused.add(sizes)
                model.failed.pop(sizes, None)
            else:
                _log.warning("%s: left to onnxruntime for now: %s", title, error)
                model.failed_for_now(sizes)
            return
        ready = model.ready
        if model.is_dropped:
            self._scheduler.unload(spec.model_id)
            return
        self._scheduler.set_profile(profile_message(spec.model_id, ready))
        variant = VariantReady(spec.model_id, ready.name, ready.version, sizes, manifest.inputs, manifest.outputs, rows)
        model.loaded[sizes] = variant
        model.failed.pop(sizes, None)
        if self._models.get(model.key) is model:
            self._front_end.announce_variant(variant)
        _log.info("%s: ready", title)

    def _drop_oldest(self, model: Shaped) -> bool:
        """Unload the variant that was not used for the longest time; False if all of them are declared."""
        sizes = next((sizes for sizes in model.loaded if sizes not in model.declared), None)
        if sizes is None:
            return False
        self._front_end.announce_variant(VariantGone(model.ready.name, model.ready.version, sizes))
        self._scheduler.unload(model.loaded.pop(sizes).model_id)
        _log.info("%s: unloaded", model.title(sizes))
        return True


def _pauses() -> Pauses:
    return Pauses(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
