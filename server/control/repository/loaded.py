"""A model that can answer requests, as the supervisor knows it: how fast it is, its latency target, its variants."""

import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from msgspec import structs

from gangway.artifact.format import Engine, Manifest
from gangway.artifact.instances import SizeSpan
from gangway.artifact.precision import IN_FP32, WantedPrecision
from gangway.base.backoff import Backoff
from gangway.base.files import model_stamp
from gangway.protos.model_config_pb2 import ModelConfig
from gangway.scheduler.messages import LoadModel, SetProfile
from gangway.scheduler.policies.targets import alone_us, target_us
from gangway.server.control.repository.repository import ModelVersion
from gangway.server.errors import CompileError
from gangway.server.messages import ModelReady, VariantReady
from gangway.server.models.config import DIFFERENCE_PARAMETER, QosConfig
from gangway.server.models.settings import ModelBatching, QueuePolicies

_log = logging.getLogger(__name__)

FilesStamp = tuple[tuple[object, ...], ...]  # as of `model_stamp`
FilesByTensor = tuple[tuple[str, str], ...]
Sizes = tuple[int, ...]  # of symbolic dimensions, in the order of `ModelReady.symbols`

MAX_VALUES = 8  # of an input that decides what is computed: one that counts upwards would be compiled for ever
SOME_ALIKE, MANY_ALIKE = 3, 16  # refused sizes, from which one concludes that all are
SPAN_AFTER = 3  # sizes that are compiled one by one
SPAN_SIZES = 64  # of one span
MAX_ASKED = 1024  # sizes of one model that are remembered, to see what changes from request to request
MAX_REFUSED = 4096  # sizes of one model that could not be compiled; beyond that no others are tried
FIRST_PAUSE_SECONDS = 30.0  # front ends ask for the same sizes once a minute at most
LONGEST_PAUSE_SECONDS = 3600.0


def sizes_of(variant: VariantReady) -> list[Sizes]:
    """Return all sizes that a variant computes."""
    return [instance.sizes for instance in variant.instances] or [variant.sizes]


@dataclass(frozen=True)
class IsolatedLatency:
    """Medians of one row of zeros on all cores, in microseconds.

    `compute_us`: first to last task. `latency_us`: all that a client on this machine waits for, which for a small model
    is mostly transport, front end and scheduler. `busy_cost_us`: what any request costs where others keep the machine
    busy; no multiple is less.
    """

    compute_us: float
    latency_us: float
    busy_cost_us: float = 0.0


@dataclass(frozen=True)
class TrialResult:
    """What trial requests have shown of a model.

    `isolated` None: no trial has succeeded. `busy_cost_us`: what any request costs a client where others keep the
    machine busy. `mixed_rows`: why requests must not share a batch; empty: they may. `is_untested`: because no trial
    request could show it.
    """

    isolated: IsolatedLatency | None
    busy_cost_us: float
    mixed_rows: str = ""
    is_untested: bool = False


class Trials(Protocol):
    """Trial requests to loaded models, which take their time (`trials.py`)."""

    async def try_model(
        self,
        ready: ModelReady,
        manifest: Manifest,
        config: ModelConfig,
        folder: Path,
        declared: Sequence[Mapping[str, int]] = (),
    ) -> TrialResult:
        """Warm a loaded model up and measure it. Raises ConfigError, ModelLoadError."""
        ...

    async def try_variant(self, ready: ModelReady, variant: VariantReady) -> IsolatedLatency | None:
        """Return how fast a model is alone where it is compiled for certain sizes; None if that cannot be seen."""

    def latency_of(self, compute_us: float) -> IsolatedLatency:
        """Return how fast a model is alone of which a row is computed so fast."""
        ...


@dataclass(eq=False)
class ModelVariants:
    """A model with symbolic dimensions. `loaded` are its variants by sizes, the longest unused first.

    `refused` sizes are never tried again, `failed` ones are.

    `is_dropped`: the model is unloaded, or about to be. `is_padded`: the server pads its texts to few lengths, so spans
    have mostly sizes that no request has.
    """

    ready: ModelReady
    path: Path
    symbols: tuple[str, ...]
    spec: LoadModel  # of the model itself, whose limits and batches hold for its variants, too
    qos: QosConfig = field(default_factory=QosConfig)
    precision: WantedPrecision = IN_FP32
    loaded: dict[Sizes, VariantReady] = field(default_factory=dict)
    declared: set[Sizes] = field(default_factory=set)
    refused: set[Sizes] = field(default_factory=set)
    is_refused: bool = False  # a reason has been found that holds for all sizes
    failed: dict[Sizes, tuple[Backoff, float]] = field(default_factory=dict)  # until when they are not tried
    is_dropped: bool = False
    is_padded: bool = False
    stamp: FilesStamp = ()  # of its files, when it was loaded
    difference: str = ""  # of the first sizes that were found to answer otherwise than onnxruntime
    values: dict[str, set[int]] = field(default_factory=dict)  # that were tried, of inputs whose values decide
    made: set[Sizes] = field(default_factory=set)  # sizes that were compiled one by one
    reasons: dict[str, set[Sizes]] = field(default_factory=dict)  # why sizes were refused, numbers aside, and some
    spans: set[tuple[SizeSpan, Sizes]] = field(
        default_factory=set
    )  # that were tried, and the sizes of the other symbols
    ahead: int = 0  # up to this size, spans are compiled before requests ask for them
    asked: dict[Sizes, None] = field(default_factory=dict)  # sizes that requests had, while `ahead`
    grown: Counter[tuple[int, ...]] = field(default_factory=Counter)  # places of symbols that did between two of these

    @property
    def key(self) -> tuple[str, int]:
        """Name and version."""
        return self.ready.name, self.ready.version

    @property
    def waits_for_requests(self) -> bool:
        """Whether only requests can show which sizes change; the only symbol of a model is one that does."""
        return not (self.ahead and len(self.symbols) == 1) or bool(self._value_symbols)

    def failed_for_now(self, sizes: Sizes) -> None:
        """Note that these sizes are not there, for a reason that may pass."""
        pauses = self.failed[sizes][0] if sizes in self.failed else _pauses()
        self.failed[sizes] = pauses, time.monotonic() + pauses.failed()

    def may_try(self, sizes: Sizes) -> bool:
        """Whether it is of use to compile for these sizes now."""
        tried = len(self.refused) + len(self.failed)
        if self.is_refused or self.has(sizes) or sizes in self.refused or not self._takes_values(sizes):
            return False
        return time.monotonic() >= self.failed[sizes][1] if sizes in self.failed else tried < MAX_REFUSED

    def refuse(self, sizes: Sizes, reason: str) -> None:
        """Note that these sizes cannot be compiled, and whether the same seems to hold for all.

        It does if no sizes could be compiled, and either some that differ in each symbol, or many, had one reason.
        """
        self.refused.add(sizes)
        alike = self.reasons.setdefault(re.sub(r"\d+", "0", reason), set())
        if len(alike) < MANY_ALIKE and min(sizes) > 0:  # what is empty may be refused for that
            alike.add(sizes)
        differ = all(len(set(values)) > 1 for values in zip(*alike, strict=True))
        is_known = len(alike) >= (SOME_ALIKE if differ else MANY_ALIKE)
        self.is_refused = self.is_refused or (is_known and not self.made)

    def ask(self, sizes: Sizes) -> None:
        """Note that a request had these sizes."""
        if not self.ahead or sizes in self.asked or len(self.asked) == MAX_ASKED:
            return
        if self.asked and (moving := self._moving(next(reversed(self.asked)), sizes)):
            self.grown[moving] += 1
        self.asked[sizes] = None

    def has(self, sizes: Sizes) -> bool:
        """Whether a variant that is loaded computes these sizes."""
        return sizes in self.loaded or any(sizes in sizes_of(variant) for variant in self.loaded.values())

    def span_of(self, sizes: Sizes) -> SizeSpan | None:
        """Return the span of sizes that is to be compiled along with these; None: they are to be compiled alone.

        It is one of the symbol, or of symbols that grow together, of which so many near sizes have been compiled, where
        the others were what they are here, that more will follow.
        """
        moving = self._line_of(sizes)
        if self.precision != IN_FP32 or self.is_padded or not moving or sizes[moving[0]] < 1:
            return None
        span = self._span_along(moving, sizes)
        tried = span, tuple(size for at, size in enumerate(sizes) if at not in moving)
        if tried in self.spans:
            return None
        self.spans.add(tried)
        return span

    def forget_spans(self, sizes: Sizes) -> None:
        """Let spans that have these sizes be made again."""
        given = dict(zip(self.symbols, sizes, strict=True))

        def has(span: SizeSpan, others: Sizes) -> bool:
            moved = span.sizes(given[span.symbol], {})
            stays = tuple(size for symbol, size in given.items() if symbol not in moved)
            return span.first <= given[span.symbol] <= span.last and moved.items() <= given.items() and stays == others

        self.spans = {(span, others) for span, others in self.spans if not has(span, others)}

    def next_ahead(self) -> tuple[Sizes, SizeSpan | None] | None:
        """Return the next span to be compiled before requests ask for it, and some sizes of it; None: there is none.

        It is one of the only symbol, or of those that requests have shown to grow, such as the length of a prompt and
        then the past, where the others are what they were first. Size 1, which often has
        layers of its own, is compiled alone where a span lacks it.
        """
        starts: dict[tuple[int, ...], Sizes] = {(0,): (1,)}
        if self.waits_for_requests:
            starts = {moving: sizes for sizes in reversed(self.asked) if (moving := self._line_of(sizes))}
        for first in range(1, self.ahead + 1, SPAN_SIZES):
            for moving, start in starts.items():
                step = first - start[moving[0]]
                sizes = tuple(size + step * (at in moving) for at, size in enumerate(start))
                if any(self._most(at) < sizes[at] for at in moving):
                    continue
                if span := self.span_of(sizes):
                    return sizes, span
                if first == 1 and self.loaded and self.may_try(sizes):
                    return sizes, None
        return None

    def _line_of(self, sizes: Sizes) -> tuple[int, ...]:
        """Return the places of symbols that will change from these sizes on, all alike; none: that is not known.

        If sizes are compiled ahead, a second request shows it, for other sizes of the symbols that stay, too. The only
        symbol needs none.
        """
        if not self.waits_for_requests:
            return (0,)
        lines = Counter({line: count for line, count in self.grown.items() if min(sizes[at] for at in line) > 0})
        if not self.ahead:
            lines = Counter(moving for made in self.made if (moving := self._moving(made, sizes)))
        found, count = next(iter(lines.most_common(1)), ((), 0))
        return found if count >= (1 if self.ahead else SPAN_AFTER) else ()

    def _span_along(self, moving: Sequence[int], sizes: Sizes) -> SizeSpan:
        place, *others = moving
        first = (sizes[place] - 1) // SPAN_SIZES * SPAN_SIZES + 1
        along = tuple((self.symbols[other], sizes[other] - sizes[place]) for other in others)
        last = min(first + SPAN_SIZES - 1, *(self._most(at) - sizes[at] + sizes[place] for at in moving))
        return SizeSpan(self.symbols[place], first, last, along, bool(self.ahead))

    def _most(self, place: int) -> int:
        """Return the largest size that requests may have: of the batch, where it is a size, max_batch_size."""
        ready = self.ready
        is_batch = ready.max_batch_size and any(spec.symbols[:1] == (self.symbols[place],) for spec in ready.inputs)
        return ready.max_batch_size if is_batch else sys.maxsize

    def _moving(self, before: Sizes, sizes: Sizes) -> tuple[int, ...]:
        """Return the places of symbols that have grown together, and not much, while the others stayed; none: no."""
        own = self._value_symbols
        steps = [after - size for size, after in zip(before, sizes, strict=True)]
        moving = tuple(place for place, step in enumerate(steps) if step)
        alike = len({steps[place] for place in moving}) == 1
        is_near = alike and (self.ahead or abs(steps[moving[0]]) < SPAN_SIZES)
        return moving if is_near and own.isdisjoint(self.symbols[place] for place in moving) else ()

    @property
    def _value_symbols(self) -> set[str]:
        return {spec.value_symbol for spec in self.ready.inputs if spec.value_symbol}

    def _takes_values(self, sizes: Sizes) -> bool:
        """Note the values that inputs have; return whether they are some of the first MAX_VALUES of each."""
        own = self._value_symbols
        pairs = [(symbol, value) for symbol, value in zip(self.symbols, sizes, strict=True) if symbol in own]
        if any(len(self.values.get(symbol, set()) | {value}) > MAX_VALUES for symbol, value in pairs):
            return False
        for symbol, value in pairs:
            self.values.setdefault(symbol, set()).add(value)
        return True

    def title(self, sizes: Sizes, span: SizeSpan | None = None) -> str:
        """Return the name of one variant, for people."""
        texts = dict(zip(self.symbols, map(str, sizes), strict=True))
        if span is not None:
            for symbol, more in ((span.symbol, 0), *span.along):
                texts[symbol] = f"{span.first + more} to {span.last + more}"
        named = ", ".join(f"{symbol}={text}" for symbol, text in texts.items())
        return f"{self.ready.name}, version {self.ready.version}, {named}"

    def sizes_text(self, sizes: Sizes) -> str:
        """Return sizes and what they are called."""
        return ", ".join(f"{symbol}={size}" for symbol, size in zip(self.symbols, sizes, strict=True))


@dataclass(frozen=True)
class InBf16:
    """The artifact in bf16 of a model; None: there is none. `note`: how its answers agree, or why not."""

    manifest: Manifest | None = None
    note: str = ""

    @property
    def weights_bytes(self) -> int:
        """Of its own weights, which count beside those in fp32."""
        return 0 if self.manifest is None else self.manifest.weights_bytes


NOT_WANTED = InBf16()


@dataclass(frozen=True)
class PendingCompilation:
    """What is known of a model that is not compiled yet. `files`: what it is to be compiled of.

    `stand_in`: the key of the artifact that serves so long; empty: it is the model's own.
    """

    files: FilesStamp
    stand_in: str = ""


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model in the scheduler and its workers.

    `isolated`: how fast it is when it is alone, if that is known. `variants`: what is compiled for certain sizes.
    `bf16_id`: the number of the same in bf16 that was loaded with it; -1: nothing was. `pending_compilation`: it is
    served by onnxruntime until it is compiled.
    """

    entry: ModelVersion
    ready: ModelReady
    isolated: IsolatedLatency | None
    engine: Engine
    variants: ModelVariants | None
    bf16_id: int = -1
    pending_compilation: PendingCompilation | None = None


def require_loaded_files(path: Path, stamp: FilesStamp) -> None:
    """Raise CompileError if the files of a model are others than those that are loaded. Raises OSError."""
    if model_stamp(path) != stamp:
        raise CompileError("its files have changed since it was loaded: load it anew")


def part_of(whole: LoadModel, part: LoadModel) -> LoadModel:
    """Return what the scheduler is told of a part of a model: limits, batches and rest are those of the whole."""
    limited = structs.replace(
        part, limits=whole.limits, limit_priority=whole.limit_priority, idle_unload_s=whole.idle_unload_s
    )
    return ModelBatching.of_spec(whole).applied_to(limited)


def resolve_qos_us(qos: QosConfig, isolated: IsolatedLatency | None) -> float | None:
    """Return the latency target in microseconds, None for best effort, and for a multiple of what is not known.

    No multiple is less than what any request costs on a busy machine.
    """
    if qos.multiple is not None:
        return None if isolated is None else target_us(qos.multiple, isolated.latency_us, isolated.busy_cost_us)
    return None if qos.milliseconds is None else qos.milliseconds * 1e3


def profile_message(
    model_id: int,
    ready: ModelReady,
    isolated: IsolatedLatency | None = None,
    qos_us: float | None = None,
    varies: bool = False,
) -> SetProfile:
    """Return what the scheduler is to know of a model, or of it compiled for certain sizes (`model_id` is its own).

    `qos_us`: the latency target of these sizes; None: the model's. `varies`: it is compiled for several.
    """
    isolated_us = 0.0 if isolated is None else isolated.compute_us
    varies = varies or (model_id == ready.model_id and bool(ready.symbols))
    terms = policies_of(ready).terms(0, 0, ready.qos_us if qos_us is None else qos_us)
    return SetProfile(model_id, isolated_us, terms.target_us or None, terms.rejects_late, varies)


def config_of(ready: ModelReady) -> ModelConfig:
    """Return a model's completed configuration."""
    return ModelConfig.FromString(ready.config)


def with_difference(ready: ModelReady, difference: str) -> ModelReady:
    """Return a model whose configuration says how its answers differ from onnxruntime's."""
    config = config_of(ready)
    config.parameters[DIFFERENCE_PARAMETER].string_value = difference
    return replace(ready, config=config.SerializeToString())


def warn_of_difference(title: str, manifest: Manifest) -> None:
    """Say in the log if a compiled model answers otherwise than onnxruntime."""
    if manifest.difference:
        _log.warning(
            "%s: compiled, it answers random numbers otherwise than onnxruntime: %s", title, manifest.difference
        )


def policies_of(ready: ModelReady) -> QueuePolicies:
    """Return a model's queue policies."""
    return QueuePolicies.of(config_of(ready))


def warn_of_target(ready: ModelReady, qos: QosConfig, isolated: IsolatedLatency | None) -> None:
    """Say in the log if the target of a model is out of reach, or not known."""
    policies = policies_of(ready)
    timeouts_us = [policy.timeout_us for policy in (policies.default, *policies.by_level.values())]
    least_us = min((limit for limit in (ready.qos_us, *timeouts_us) if limit), default=None)
    latency_us = alone_us(0.0) if isolated is None else isolated.latency_us
    if isolated is None and qos.multiple is not None:
        _log.info(
            "%s, version %d: requests are best effort until the first one has been answered: the latency target is %g"
            " times the model's time alone, which no trial request could show",
            ready.name,
            ready.version,
            qos.multiple,
        )
    elif least_us is not None and least_us < latency_us:
        _log.warning(
            "%s: its latency target of %.3f ms is out of reach: a request takes %.3f ms alone, %.3f ms of which any"
            " model would take; set a larger target: 3x would be %.3f ms",
            ready.name,
            least_us / 1e3,
            latency_us / 1e3,
            alone_us(0.0) / 1e3,
            target_us(3, latency_us, isolated.busy_cost_us if isolated else 0.0) / 1e3,
        )


def _pauses() -> Backoff:
    return Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
