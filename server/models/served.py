"""The models a front end serves: what it was told by the supervisor, ready for looking up and for checking requests."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import count
from typing import Final

from gangway.artifact.format import ITEM_BYTES, Engine, TensorSpec
from gangway.artifact.instances import SHIFT, row_bytes
from gangway.base.suggestion import did_you_mean
from gangway.protos import StatusCode
from gangway.protos import grpc_service_pb2 as pb
from gangway.protos.model_config_pb2 import ModelConfig, ModelInput, ModelOutput
from gangway.server import messages
from gangway.server.errors import RequestError, internal, invalid, unavailable
from gangway.server.models.config import is_batching_off, is_ensemble
from gangway.server.models.embeddings import EmbeddingSettings
from gangway.server.models.sequences import SequenceTensors
from gangway.server.models.settings import QueuePolicies, labels_of, response_bounds_ns
from gangway.server.models.tensors import Shapes, Tensor
from gangway.server.models.tokenizer import TextTokenizer
from gangway.server.requests.data_plane import RequestLayout
from gangway.server.statistics import Statistics
from gangway.server.threads import RefCount

MOST_ANSWER_BYTES: Final = 256 << 20  # as much as one message may have by default

InputTensor = pb.ModelInferRequest.InferInputTensor
MakeStatistics = Callable[[int, tuple[int, ...]], Statistics]  # of a row of counters, and the bounds of response times


def _kept(statistics: Statistics) -> MakeStatistics:
    def take_over(_row: int, _response_bounds_ns: tuple[int, ...]) -> Statistics:
        statistics.least_met_us = math.inf  # a successor may be slower, and has met no target yet
        return statistics

    return take_over


def own_statistics(_row: int, response_bounds_ns: tuple[int, ...]) -> Statistics:
    """Return counters that no other process sees."""
    return Statistics(response_bounds_ns)


@dataclass(frozen=True)
class CompiledSizes:
    """What of a model is compiled: the whole of it, or it for certain sizes of its symbolic dimensions.

    `made` returns its layout and outputs, which are made when they are used first: there may be many sizes. `max_rows`:
    how many it can compute at a time. `qos_us`: its own latency target; None: the model's. `tail`: the answer is a
    frame, since sizes of outputs are known only when it is there. `variant`: the sizes that the variant is called by.
    """

    model_id: int
    made: Callable[[], tuple[RequestLayout, tuple[TensorSpec, ...]]]
    max_rows: int
    qos_us: float | None = None
    tail: bool = False
    variant: tuple[int, ...] = ()

    @classmethod
    def whole(cls, message: messages.ModelReady) -> "CompiledSizes":
        """Return the whole of a model."""
        layout = RequestLayout.of(message.model_id, message.inputs, message.outputs)
        return cls(message.model_id, lambda: (layout, message.outputs), message.max_rows, tail=message.tail)

    @classmethod
    def parts(cls, message: messages.VariantReady, batched: bool) -> "dict[tuple[int, ...], CompiledSizes]":
        """Return a variant, by each of the sizes for which it is compiled."""
        common = message.max_rows, message.qos_us, message.tail, message.sizes
        own = messages.VariantSizes(message.sizes, _shapes(message.inputs), _shapes(message.outputs))
        return {
            instance.sizes: cls(message.model_id, partial(_sized, message, number, instance, batched), *common)
            for number, instance in enumerate(message.instances or (own,))
        }

    @cached_property
    def _made(self) -> tuple[RequestLayout, tuple[TensorSpec, ...]]:
        return self.made()

    @property
    def layout(self) -> RequestLayout:
        """How large inputs and outputs are."""
        return self._made[0]

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The outputs, whose sizes are known unless there is a tail."""
        return self._made[1]


def _shapes(specs: Iterable[TensorSpec]) -> tuple[tuple[int, ...], ...]:
    return tuple(spec.shape for spec in specs)


def _sized(
    message: messages.VariantReady, number: int, instance: messages.VariantSizes, batched: bool
) -> tuple[RequestLayout, tuple[TensorSpec, ...]]:
    """Return layout and outputs of a variant for one of its sizes."""
    if not message.instances:
        return RequestLayout.of(message.model_id, message.inputs, message.outputs), message.outputs
    inputs = _with_shapes(message.inputs, instance.inputs, batched)
    outputs = _with_shapes(message.outputs, instance.outputs, batched)
    return RequestLayout.of(message.model_id, inputs, outputs, number << SHIFT), outputs


def _with_shapes(
    specs: Sequence[TensorSpec], shapes: Sequence[tuple[int, ...]], batched: bool
) -> tuple[TensorSpec, ...]:
    return tuple(
        replace(spec, shape=shape, row_bytes=row_bytes(shape, batched, ITEM_BYTES[spec.datatype]))
        for spec, shape in zip(specs, shapes, strict=True)
    )


@dataclass(frozen=True)
class ServedModel:
    """One version of a model that answers requests. `batched`: the first dimension of every tensor counts rows.

    `compiled` has what is compiled, by the sizes of `symbols`, the dimensions of its inputs that are neither fixed nor
    the batch. What is not there is executed by onnxruntime, under the number `model_id`. `labels` names the classes of
    outputs. `load` is another number whenever the model is loaded again. `isolated_us`: as in ModelReady. `sequence`
    has what clients do not see of a model with sequences: `inputs` are those that they send. `joins`: what onnxruntime
    executes may be joined with other requests. `compounds`, `chooses_precision`, `has_is_ready`: as in ModelReady.
    `is_python`: model.py executes it. `most_answer_bytes`: of one answer. `embeddings`: how it gives these;
    `tokenizer`: of texts.
    """

    name: str
    version: int
    model_id: int
    config: ModelConfig
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    batched: bool
    max_batch_size: int
    max_rows: int
    symbols: tuple[str, ...] = ()
    compiled: Mapping[tuple[int, ...], CompiledSizes] = field(default_factory=dict)
    qos_us: float | None = None
    load_seconds: float = 0.0
    weights_bytes: int = 0
    isolated_us: float = 0.0
    policies: QueuePolicies = field(default_factory=QueuePolicies)
    statistics: Statistics = field(default_factory=Statistics)
    statistics_row: int = -1
    uses: RefCount = field(default_factory=RefCount)
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    sequence: SequenceTensors | None = None
    joins: bool = True
    compounds: messages.Compounds = ()
    chooses_precision: bool = False
    has_is_ready: bool = False
    is_python: bool = False
    most_answer_bytes: int = MOST_ANSWER_BYTES
    embeddings: EmbeddingSettings | None = None
    tokenizer: TextTokenizer | None = None
    load: int = field(default_factory=count(1).__next__)

    @classmethod
    def of(
        cls,
        message: messages.ModelReady,
        make_statistics: MakeStatistics = own_statistics,
        most_answer_bytes: int = MOST_ANSWER_BYTES,
    ) -> "ServedModel":
        """Return the model that the supervisor has announced."""
        config = ModelConfig.FromString(message.config)
        whole = message.engine is not Engine.NATIVE or is_ensemble(config)
        embeddings = EmbeddingSettings.of(config)
        return cls(
            name=message.name,
            version=message.version,
            model_id=message.model_id,
            config=config,
            inputs=_tensors(config.input, message.inputs, config.max_batch_size > 0),
            outputs=_tensors(config.output, message.outputs, config.max_batch_size > 0),
            batched=message.batched,
            max_batch_size=message.max_batch_size,
            max_rows=message.max_rows,
            symbols=message.symbols,
            compiled={} if whole else {(): CompiledSizes.whole(message)},
            qos_us=message.qos_us,
            load_seconds=message.load_seconds,
            weights_bytes=message.weights_bytes,
            isolated_us=message.isolated_us,
            policies=QueuePolicies.of(config),
            statistics=make_statistics(message.statistics_row, response_bounds_ns(config)),
            statistics_row=message.statistics_row,
            labels={each.name: each.classes for each in message.outputs if each.classes}
            | labels_of(dict(message.labels)),
            sequence=SequenceTensors.of(config, message.inputs, message.outputs, dict(message.initial_states)),
            joins=not is_batching_off(config),
            compounds=message.compounds,
            chooses_precision=message.chooses_precision,
            has_is_ready=message.has_is_ready,
            is_python=message.engine is Engine.PYTHON,
            most_answer_bytes=most_answer_bytes,
            embeddings=embeddings,
            tokenizer=TextTokenizer(message.tokenizer) if embeddings is not None and message.tokenizer else None,
        )

    @cached_property
    def is_ensemble(self) -> bool:
        """Whether it is made of other models; then it has no number that the executor knows."""
        return is_ensemble(self.config)

    @cached_property
    def is_decoupled(self) -> bool:
        """Whether a request may have any number of responses."""
        return self.config.model_transaction_policy.decoupled

    @cached_property
    def ragged(self) -> frozenset[int]:
        """The places of inputs whose shapes do not matter for which requests are joined."""
        names = {tensor.name for tensor in self.config.input if tensor.allow_ragged_batch}
        return frozenset(tensor.index for tensor in self.inputs.values() if tensor.name in names)

    @cached_property
    def takes_texts(self) -> bool:
        """Whether all its inputs are texts."""
        return all(tensor.datatype == "BYTES" for tensor in self.inputs.values())

    @property
    def all_inputs(self) -> tuple[Tensor, ...]:
        """Return the inputs with those that clients do not send."""
        return (*self.inputs.values(), *(self.sequence.hidden if self.sequence else ()))

    @property
    def has_rows(self) -> bool:
        """Whether the first dimensions are one batch, be its rows computed apart or not."""
        return self.batched or self.max_batch_size > 0

    @property
    def least_rows(self) -> int:
        """Return the least size of a symbolic first dimension: without max_batch_size it is a size like others."""
        return int(self.max_batch_size > 0 or (self.batched and self.sequence is not None))

    def compiled_for(self, shapes: Shapes) -> CompiledSizes | None:
        """Return what computes a request of these shapes; None: onnxruntime does."""
        compiled = self.compiled.get(self.key_of(shapes.sizes))
        if compiled is None or not self.symbols:
            return compiled
        return None if shapes.is_empty or shapes.rows > compiled.max_rows else compiled

    @property
    def has_values(self) -> bool:
        """Whether the values of some inputs decide what computes a request."""
        return any(tensor.value_symbol for tensor in self.inputs.values())

    def target_us(self, shapes: Shapes) -> float | None:
        """Return the latency target of requests of these shapes in microseconds; None: there is none."""
        compiled = self.compiled_for(shapes) if self.symbols else None
        return self.qos_us if compiled is None or compiled.qos_us is None else compiled.qos_us

    def key_of(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the sizes of the model's symbols, in their order; -1 where only an input has it that was left out.

        Values of inputs count as sizes.
        """
        return tuple(sizes.get(symbol, -1) for symbol in self.symbols)


def _tensors(
    tensors: Iterable[ModelInput | ModelOutput], specs: Sequence[TensorSpec], batch: bool
) -> dict[str, Tensor]:
    places = {spec.name: index for index, spec in enumerate(specs)}
    return {
        tensor.name: Tensor.of(tensor, batch, specs[places[tensor.name]], places[tensor.name]) for tensor in tensors
    }


def require_inputs(model: ServedModel, given: Collection[str]) -> None:
    """Raise RequestError (INVALID_ARGUMENT) unless all inputs are there, by their names, that are not optional."""
    required = [name for name, tensor in model.inputs.items() if not tensor.optional]
    missing = [name for name in required if name not in given]
    if missing:
        least, most = len(required), len(model.inputs)
        count = str(least) if least == most else f"between {least} and {most}"
        invalid(
            f"expected {count} inputs but got {len(given)} inputs for model '{model.name}'."
            f" Got input(s) {list(given)}, but missing required input(s) {missing}."
            " Please provide all required input(s)."
        )


def shapes_of(inputs: Sequence[tuple[InputTensor, Tensor]], model: ServedModel) -> Shapes:
    """Return the shapes of inputs, each beside the model's: a client's, or those between an ensemble's steps.

    The order of the checks and, where clients may depend on them, the texts of the messages are Triton's. Raises
    RequestError (INVALID_ARGUMENT).
    """
    rows: int | None = None
    sizes: dict[str, int] = {}
    for given, tensor in inputs:
        if given.datatype != tensor.datatype:
            invalid(
                f"inference input '{tensor.name}' data-type is '{given.datatype}', but model '{model.name}'"
                f" expects '{tensor.datatype}'"
            )
        shape = tuple(given.shape)
        if not tensor.may_have(shape, model.least_rows):
            invalid(
                f"unexpected shape for input '{tensor.name}' for model '{model.name}'."
                f" Expected {list(tensor.shape)}, got {list(shape)}"
            )
        for axis, symbol in enumerate(tensor.symbols):
            if symbol and sizes.setdefault(symbol, shape[axis]) != shape[axis] and (axis or not model.has_rows):
                invalid(
                    f"input '{tensor.name}' for model '{model.name}': dimension {axis} is '{symbol}', of which the"
                    f" request has two sizes, {sizes[symbol]} and {shape[axis]}"
                )
        if model.has_rows:
            rows = _check_rows(rows, shape[0], tensor, model)
    pairs = tuple((tensor, tuple(given.shape)) for given, tensor in inputs)
    return Shapes((rows or 1) if model.batched else 1, pairs, sizes, rows == 0, rows or 1)


def _check_rows(rows: int | None, size: int, tensor: Tensor, model: ServedModel) -> int:
    """Return the number of rows, which all inputs share; `rows` is that of the inputs before, None for the first."""
    if size > model.max_rows and not model.max_batch_size:
        invalid(f"model '{model.name}' computes at most {model.max_rows} rows at a time, got {size}")
    if size > model.max_rows:
        invalid(f"inference request batch-size must be <= {model.max_rows} for '{model.name}', got {size}")
    if rows not in (None, size):
        invalid(
            f"input '{tensor.name}' batch size does not match other inputs for '{model.name}'."
            f" Expected {rows}, got {size}"
        )
    return size


IDLE = "idle"  # workers load the model at the next request
MAX_VERSION_DIGITS = 100  # leading zeros do not count, as in Triton


@dataclass(frozen=True)
class Models:
    """Everything the supervisor has said so far, by name and version; never changed, but replaced as a whole.

    `absent`: the numbers of Python models for which nobody can answer at the moment, and why. `idle`: the numbers of
    models that workers load at the next request. `most_answer_bytes`: of any model.
    """

    entries: Mapping[tuple[str, int], ServedModel | messages.ModelUnavailable] = field(default_factory=dict)
    absent: Mapping[int, str] = field(default_factory=dict)
    idle: frozenset[int] = frozenset()
    most_answer_bytes: int = MOST_ANSWER_BYTES

    def updated(
        self,
        message: messages.ModelReady | messages.ModelUnavailable | messages.ModelRemoved,
        make_statistics: MakeStatistics = own_statistics,
    ) -> "Models":
        """Return the set after one more message. A version of use ends what was said about the model as a whole."""
        ended = (message.name, messages.WHOLE_MODEL) if messages.is_of_use(message) else None
        entries = {key: entry for key, entry in self.entries.items() if key != ended}
        key = (message.name, message.version)
        before = self.entries.get(key)
        if isinstance(message, messages.ModelReady):
            if isinstance(before, ServedModel) and before.statistics_row == message.statistics_row != -1:
                make_statistics = _kept(before.statistics)  # a row has one writer in a process
            entries[key] = ServedModel.of(message, make_statistics, self.most_answer_bytes)
        elif isinstance(message, messages.ModelUnavailable):
            entries[key] = message
        else:
            entries.pop(key, None)
        return replace(self, entries=dict(sorted(entries.items())))

    def with_presence(self, message: messages.ModelPresence) -> "Models":
        """Return the set after somebody can answer for a Python model, or nobody can any more."""
        others = {number: reason for number, reason in self.absent.items() if number != message.model_id}
        return replace(self, absent={**others, message.model_id: message.reason} if message.reason else others)

    def with_idle(self, message: messages.ModelIdleness) -> "Models":
        """Return the set after workers have given a model's memory back, or have it again."""
        others = self.idle - {message.model_id}
        return replace(self, idle=others | {message.model_id} if message.is_idle else others)

    def is_idle(self, model: ServedModel) -> bool:
        """Whether workers load a model at its next request."""
        return model.model_id in self.idle

    def note_of(self, model: ServedModel) -> str:
        """Return what is to be said of a model beside READY."""
        return IDLE * self.is_idle(model)

    def with_target(self, message: messages.ModelTarget) -> "Models":
        """Return the set after a model has got another latency target."""
        key = (message.name, message.version)
        model = self.entries.get(key)
        if not isinstance(model, ServedModel) or model.model_id != message.model_id:
            return self
        config = ModelConfig.FromString(message.config)
        changed = replace(model, config=config, qos_us=message.qos_us, isolated_us=message.isolated_us)
        return replace(self, entries={**self.entries, key: changed})

    def with_variant(self, message: messages.VariantReady | messages.VariantGone) -> "Models":
        """Return the set with more or less of a model compiled."""
        key = (message.name, message.version)
        model = self.entries.get(key)
        if not isinstance(model, ServedModel):
            return self
        compiled = {sizes: part for sizes, part in model.compiled.items() if part.variant != message.sizes}
        if isinstance(message, messages.VariantReady):
            compiled |= CompiledSizes.parts(message, model.batched)
        return replace(self, entries={**self.entries, key: replace(model, compiled=compiled)})

    @property
    def all_ready(self) -> bool:
        """Whether every model can be used that is to be served."""
        return not any(entry.is_missed for entry in self.unavailable)

    @property
    def unavailable(self) -> list[messages.ModelUnavailable]:
        """What answers no requests, and why."""
        states = map(self.state_of, self.entries.values())
        return [state for state in states if isinstance(state, messages.ModelUnavailable)]

    def state_of(self, entry: ServedModel | messages.ModelUnavailable) -> ServedModel | messages.ModelUnavailable:
        """Return an entry as clients shall see it: a model for which nobody can answer is none that is served."""
        if self.absent and isinstance(entry, ServedModel) and (reason := self._why_absent(entry)):
            return messages.ModelUnavailable(entry.name, entry.version, reason)
        return entry

    def _why_absent(self, model: ServedModel) -> str:
        """Return why nobody can answer for a model, or for one that it is made of; empty: somebody can."""
        for step in model.config.ensemble_scheduling.step:
            versions = self.served(step.model_name)
            for member in versions[-1:] if step.model_version < 0 else versions:
                if step.model_version in (-1, member.version) and (reason := self._why_absent(member)):
                    return f"model '{member.name}', version {member.version}, is not at ready state: {reason}"
        return "" if model.is_ensemble else self.absent.get(model.model_id, "")

    def served_as(self, name: str, version: int) -> ServedModel | None:
        """Return this version if it answers requests."""
        entry = self.entries.get((name, version))
        return entry if isinstance(entry, ServedModel) else None

    def served(self, name: str = "") -> list[ServedModel]:
        """Return the usable versions of one model or of all, ascending."""
        found = [entry for entry in self.entries.values() if isinstance(entry, ServedModel)]
        return [model for model in found if name in ("", model.name)]

    def find(self, name: str, version: str) -> ServedModel:
        """Return the model; an empty version means the highest one that is usable.

        Raises RequestError: NOT_FOUND if there is no such model or version, UNAVAILABLE if it is not ready, INTERNAL if
        it has ended worker processes.
        """
        number = parse_version(version)
        known = {key[1]: entry for key, entry in self.entries.items() if key[0] == name and not _is_unknown(entry)}
        if not known:
            near = did_you_mean(name, {model.name for model in self.served()})
            raise RequestError(StatusCode.NOT_FOUND, f"Request for unknown model: '{name}' is not found{near}")
        if number is None:
            usable = [entry for entry in known.values() if isinstance(entry, ServedModel)]
            if not usable and all(_is_unloaded(entry) for entry in known.values()):
                message = f"Request for unknown model: '{name}' has no available versions"
                raise RequestError(StatusCode.NOT_FOUND, message)
            entry = usable[-1] if usable else known.get(messages.WHOLE_MODEL, known[max(known)])
        elif number in known:
            entry = known[number]
        else:
            message = f"Request for unknown model: '{name}' version {number} is not found"
            raise RequestError(StatusCode.NOT_FOUND, message)
        entry = self.state_of(entry)
        if isinstance(entry, messages.ModelUnavailable):
            which = "" if entry.version == messages.WHOLE_MODEL else f" version {entry.version}"
            if entry.at_fault:
                internal(f"model '{name}'{which} is not executed any more: {entry.reason}")
            unavailable(f"model '{name}'{which} is not at ready state: {entry.reason}")
        return entry


def _is_unknown(entry: ServedModel | messages.ModelUnavailable) -> bool:
    return isinstance(entry, messages.ModelUnavailable) and entry.state == "UNKNOWN"


def _is_unloaded(entry: ServedModel | messages.ModelUnavailable) -> bool:
    return isinstance(entry, messages.ModelUnavailable) and entry.reason == messages.UNLOADED


def parse_version(text: str) -> int | None:
    """Return the version a client asks for, None for the highest. Raises RequestError."""
    if not text:
        return None
    if not (
        text.isascii() and text.isdigit() and len(text) <= MAX_VERSION_DIGITS and int(text) <= messages.MAX_VERSION
    ):
        invalid(
            f"failed to get model version from specified version string '{text}': expected 0 to {messages.MAX_VERSION}"
        )
    return int(text)
