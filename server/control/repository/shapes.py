"""Models with symbolic dimensions, compiled for the sizes that requests have: which are loaded, and for how long.

onnxruntime answers all sizes. Each size that has answered a request is compiled once, in the background and one at a
time; what is loaded takes over the requests of its sizes. At most `limit` per model stay loaded, the least recently
used one goes first. Sizes that the model's owner declared (`gangway_buckets`) are compiled before the model is ready,
and stay. When it is known which size changes, all sizes of a span are compiled by one program. If each of them is
cheap, further spans are compiled ahead of requests, while nothing else waits. What the compiler cannot do is not tried
again; what has failed for another reason (a full disk, a killed job) is, when requests ask for it after a pause.
"""

import asyncio
import logging
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from gangway.artifact.format import Engine, Manifest, TensorSpec
from gangway.artifact.instances import SizeSpan
from gangway.artifact.precision import WantedPrecision
from gangway.base.files import model_stamp
from gangway.scheduler.messages import LoadModel
from gangway.server.control.repository.capacity import ModelCapacity
from gangway.server.control.repository.compile_jobs import Compiler, CompileRequest
from gangway.server.control.repository.loaded import (
    IsolatedLatency,
    ModelVariants,
    Sizes,
    Trials,
    config_of,
    part_of,
    profile_message,
    require_loaded_files,
    resolve_qos_us,
    sizes_of,
    warn_of_difference,
    with_difference,
)
from gangway.server.control.repository.precisions import PrecisionPairs
from gangway.server.control.repository.profiles import BackgroundProfiler
from gangway.server.control.repository.repository import ModelVersion
from gangway.server.control.supervisor.announcements import Announcements
from gangway.server.control.supervisor.scheduler import SchedulerControl
from gangway.server.errors import CompileError, ModelLoadError
from gangway.server.messages import ModelReady, ShapeWanted, VariantGone, VariantReady, VariantSizes
from gangway.server.models.embeddings import EmbeddingSettings
from gangway.server.options.server import GeneralOptions

MAX_QUEUED = 16  # sizes of one model that wait to be compiled; what comes on top asks again later
NEVER_COMPILED = ("BYTES",)
_log = logging.getLogger(__name__)


class ShapeQueue:
    """Sizes that wait to be compiled: models take turns, and of a model those go first that were asked for most."""

    def __init__(self) -> None:
        self._asked: dict[tuple[str, int], dict[Sizes, int]] = {}  # how often; the model whose turn is next comes first

    def ask(self, model: tuple[str, int], sizes: Sizes) -> None:
        """Let sizes wait, or note that they were asked for again; no more than MAX_QUEUED of a model wait."""
        waiting = self._asked.setdefault(model, {})
        if sizes in waiting or len(waiting) < MAX_QUEUED:
            waiting[sizes] = waiting.get(sizes, 0) + 1

    def next(self) -> tuple[tuple[str, int], Sizes] | None:
        """Return what is to be compiled next; it waits on until it is done. None if nothing waits."""
        for model, waiting in self._asked.items():
            return model, max(waiting, key=waiting.__getitem__)
        return None

    def done(self, model: tuple[str, int], sizes: Sizes) -> None:
        """Forget sizes; it is the next model's turn."""
        waiting = self._asked.pop(model)
        del waiting[sizes]
        if waiting:
            self._asked[model] = waiting


def is_never_compiled(inputs: Iterable[TensorSpec]) -> bool:
    """Whether no size of a model is compiled: an optional input would be a constant, and strings are no numbers."""
    return any(tensor.optional or tensor.datatype in NEVER_COMPILED for tensor in inputs)


def instances_of(manifest: Manifest, symbols: Sequence[str]) -> tuple[VariantSizes, ...]:
    """Return the sizes of these symbols for which an artifact is made, in its order; none if there is one set only."""
    if manifest.instances is None:
        return ()
    order = [manifest.instances.symbols.index(symbol) for symbol in symbols]
    return tuple(
        VariantSizes(tuple(each.sizes[place] for place in order), each.inputs, each.outputs)
        for each in manifest.instances.each
    )


@dataclass(eq=False)
class ShapeCache:
    """Compiles models for sizes, at most `options.max_shapes` of each, and unloads what was not used for long."""

    compiler: Compiler
    scheduler: SchedulerControl
    clients: Announcements
    capacity: ModelCapacity
    trials: Trials
    profiles: BackgroundProfiler
    pairs: PrecisionPairs
    options: GeneralOptions
    _models: dict[tuple[str, int], ModelVariants] = field(default_factory=dict, init=False)
    _queue: ShapeQueue = field(default_factory=ShapeQueue, init=False)
    _news: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def prepare(
        self,
        ready: ModelReady,
        entry: ModelVersion,
        declared: Sequence[Sizes],
        spec: LoadModel,
        precision: WantedPrecision,
    ) -> ModelVariants | None:
        """Return when the declared sizes of a loaded model are compiled, or cannot be; None if it has none to compile.

        Clients are not told of it before `adopt`.
        """
        symbols = ready.symbols
        if ready.engine is not Engine.ONNXRUNTIME or not symbols or not self.options.max_shapes:
            return None
        if is_never_compiled(ready.inputs):
            return None
        is_padded = EmbeddingSettings.of(config_of(ready)) is not None
        ahead, path = 0 if declared or is_padded else self.options.compile_ahead, entry.path
        model = ModelVariants(ready, path, symbols, spec, entry.qos, precision, declared=set(declared), ahead=ahead)
        model.is_padded = is_padded
        model.stamp = model_stamp(path)
        try:
            for sizes in declared:
                await self._make(model, sizes)
        except BaseException:
            self.drop(model)
            raise
        return model

    def adopt(self, model: ModelVariants) -> None:
        """Take care of a model that has been announced."""
        self._models[model.key] = model
        for variant in model.loaded.values():
            self.clients.announce_variant(variant)
        self._news.set()

    def forget(self, model: ModelVariants) -> None:
        """Compile no more of a model that is not served any more; what there is, its last requests may still use."""
        model.is_dropped = True
        if self._models.get(model.key) is model:
            del self._models[model.key]

    def drop(self, model: ModelVariants) -> None:
        """Unload what is compiled of a model that no request uses any more."""
        self.forget(model)
        for sizes in list(model.loaded):
            self._unload(model, sizes)

    def want(self, message: ShapeWanted) -> None:
        """A front end has answered a request of sizes that are not compiled."""
        model = self._models.get((message.name, message.version))
        if model is None or len(message.sizes) != len(model.symbols):
            return
        for sizes in message.oldest:  # in the order of use: whatever was used last goes to the end
            if sizes in model.loaded:
                model.loaded[sizes] = model.loaded.pop(sizes)
        model.ask(message.sizes)
        if model.may_try(message.sizes):
            self._queue.ask(model.key, message.sizes)
            self._news.set()

    def model_failed(self, model_id: int, at_fault: bool) -> bool:
        """No worker has it any more, or it ended workers (`at_fault`); say whether that was a variant."""
        found = self._find(model_id)
        if found is None:
            return False
        model, sizes = found
        del model.loaded[sizes]
        self.profiles.remove(model_id)
        if at_fault:
            model.refused.add(sizes)
        else:
            model.failed_for_now(sizes)
        self.clients.announce_variant(VariantGone(model.ready.name, model.ready.version, sizes))
        return True

    def profiled(self, model_id: int, compute_us: float) -> None:
        """Let the target of compiled sizes follow their profile."""
        found = self._find(model_id)
        if found is None or found[0].qos.multiple is None:
            return
        (model, sizes), isolated = found, self.trials.latency_of(compute_us)
        variant = msgspec.structs.replace(model.loaded[sizes], qos_us=resolve_qos_us(model.qos, isolated))
        model.loaded[sizes] = variant
        varies = len(variant.instances) > 1
        self.scheduler.set_profile(profile_message(model_id, model.ready, isolated, variant.qos_us, varies))
        self.clients.announce_variant(variant)

    def _find(self, model_id: int) -> tuple[ModelVariants, Sizes] | None:
        for model in self._models.values():
            for sizes, variant in model.loaded.items():
                if variant.model_id == model_id:
                    return model, sizes
        return None

    async def run(self) -> None:
        """Compile what is wanted, until cancelled."""
        while True:
            self._news.clear()
            while wanted := self._queue.next():
                key, sizes = wanted
                model = self._models.get(key)
                if model is not None and not model.has(sizes):
                    await self._make_wanted(model, sizes)
                self._queue.done(key, sizes)
            if not await self._make_ahead():
                await self._news.wait()

    async def _make_ahead(self) -> bool:
        """Compile what no request has asked for yet; return False if there is nothing."""
        for model in sorted(self._models.values(), key=lambda model: len(model.spans)):
            if len(model.loaded) < self.options.max_shapes and (found := model.next_ahead()):
                await self._make(model, *found)
                return True
        return False

    async def _make_wanted(self, model: ModelVariants, sizes: Sizes) -> None:
        """Compile sizes, along with others of their span if that is of use and possible."""
        if span := model.span_of(sizes):
            await self._make(model, sizes, span)
        if not model.has(sizes) and not model.is_dropped:
            await self._make(model, sizes)
            if sizes in model.loaded:
                model.made.add(sizes)

    async def _make(self, model: ModelVariants, sizes: Sizes, span: SizeSpan | None = None) -> None:
        title = model.title(sizes, span)
        try:
            require_loaded_files(model.path, model.stamp)
            dimensions = dict(zip(model.symbols, sizes, strict=True))
            precision = model.precision.each[0]
            request = CompileRequest(title, model.path, dimensions, precision=precision, span=span)
            manifest = await self.compiler.compile(request)
            in_bf16 = await self.pairs.compiled(title, model.path, manifest, model.precision, dimensions)
            require_loaded_files(model.path, model.stamp)
            if manifest.batched != model.ready.batched:
                raise CompileError(
                    "with these sizes the first dimension of its tensors has another meaning than without them"
                )
            instances = instances_of(manifest, model.symbols)
            sizes = instances[0].sizes if instances else sizes
            self._drop_parts(model, instances)
            while len(model.loaded) >= self.options.max_shapes and self._drop_oldest(model):
                pass
            rows = model.ready.max_rows if manifest.batched else 1
            if not model.ready.max_batch_size:
                rows = min(rows, self.capacity.computable_rows(manifest, in_bf16.manifest))
            spec = part_of(model.spec, self.capacity.spec(title, manifest, rows))
            await self.scheduler.load(spec)
        except (CompileError, ModelLoadError, OSError, RuntimeError) as error:
            if span is not None:
                _log.info("%s: compiled one by one: %s", title, error)
                if span.ahead:
                    model.ahead = 0
                return
            if isinstance(error, CompileError) and error.is_final:
                _log.warning("%s: onnxruntime serves these sizes: %s", title, error)
                model.refuse(sizes, str(error))
                if model.is_refused:
                    _log.info("%s, version %d: no other sizes are tried: the same holds for them", *model.key)
                model.failed.pop(sizes, None)
            else:
                _log.warning(
                    "%s: onnxruntime serves these sizes for now; compiling them is tried again later: %s", title, error
                )
                model.failed_for_now(sizes)
            return
        ready = model.ready
        tensors = manifest.inputs, manifest.outputs
        variant = VariantReady(
            spec.model_id, ready.name, ready.version, sizes, *tensors, rows, tail=manifest.tail, instances=instances
        )
        isolated = await self.trials.try_variant(ready, variant)
        if isolated is not None and (compute_us := self.profiles.compute_us(manifest)) is not None:
            isolated = self.trials.latency_of(compute_us)
        if model.qos.multiple is not None:
            variant = msgspec.structs.replace(variant, qos_us=resolve_qos_us(model.qos, isolated))

        def attempt(model_id: int) -> Awaitable[IsolatedLatency | None]:
            return self.trials.try_variant(ready, msgspec.structs.replace(variant, model_id=model_id))

        if not model.is_dropped:
            await self.pairs.load(spec, in_bf16, ready, attempt, variant.qos_us)
        if model.is_dropped:
            self.pairs.unload(spec.model_id)
            return
        varies = len(instances) > 1
        self.scheduler.set_profile(profile_message(spec.model_id, ready, isolated, variant.qos_us, varies))
        self.profiles.add(spec.model_id, ready.name, manifest, title)
        model.loaded[sizes] = variant
        model.failed.pop(sizes, None)
        is_news = bool(manifest.difference) and not model.difference
        if is_news:
            warn_of_difference(title, manifest)
            model.difference = f"with {model.sizes_text(sizes)}, {manifest.difference}"
            model.ready = with_difference(model.ready, model.difference)
        if self._models.get(model.key) is model:
            if is_news:
                self.clients.announce_target(model.ready)
            self.clients.announce_variant(variant)
        in_precision = f" in {manifest.precision} ({note})" if (note := manifest.precision_note) else ""
        _log.info("%s: ready, compiled for these sizes%s", title, in_precision)

    def _drop_parts(self, model: ModelVariants, instances: Sequence[VariantSizes]) -> None:
        """Unload variants of sizes that another one computes, too."""
        computed = {instance.sizes for instance in instances}
        for sizes, variant in list(model.loaded.items()):
            if computed.issuperset(sizes_of(variant)):
                if sizes in model.declared:
                    model.declared.add(instances[0].sizes)
                self.clients.announce_variant(VariantGone(model.ready.name, model.ready.version, sizes))
                self._unload(model, sizes)

    def _unload(self, model: ModelVariants, sizes: Sizes) -> None:
        model_id = model.loaded.pop(sizes).model_id
        model.forget_spans(sizes)
        self.pairs.unload(model_id)

    def _drop_oldest(self, model: ModelVariants) -> bool:
        """Unload the variant that was not used for the longest time; False if all of them are declared."""
        sizes = next((sizes for sizes in model.loaded if sizes not in model.declared), None)
        if sizes is None:
            return False
        self.clients.announce_variant(VariantGone(model.ready.name, model.ready.version, sizes))
        self._unload(model, sizes)
        _log.info("%s: unloaded, because other sizes were used more recently", model.title(sizes))
        return True
