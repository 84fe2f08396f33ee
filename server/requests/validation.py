"""From a request's header to what is to be done: what can be wrong with a request is found here.

What its model says of names, datatypes and shapes stands in `server/models/served.py`.

The order of the checks and, where clients may depend on them, the texts of the messages are Triton's.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

from google.protobuf.message import DecodeError

from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import invalid
from gangway.server.models.sequences import SequencePosition, check_position, position_of
from gangway.server.models.served import InputTensor, Models, ServedModel, require_inputs, shapes_of
from gangway.server.models.settings import Terms
from gangway.server.models.tensors import Shapes, Tensor, item_bytes
from gangway.server.requests.codecs import CLASSIFICATION, Classes, Codec, Sinks, integer_of, wanted_classes
from gangway.server.requests.contents import (
    EMPTY_FINAL_PARAMETER,
    MalformedRequestError,
    MessageForm,
    check_contents,
    check_sources,
    mixed_contents,
    raw_contents,
    split_request,
    to_bytes,
)
from gangway.server.requests.ensemble_graphs import Graphs
from gangway.server.requests.ensembles import EnsembleCodec
from gangway.server.requests.mapped_tensors import Candidates, candidates_of
from gangway.server.requests.python_codec import MAX_INT64, PythonCodec, about_of, codecs_of
from gangway.server.requests.regions import NO_REGIONS, REGION, Contents, Region, RegionRange
from gangway.server.requests.remembered import Remembered

MAX_CACHED_VALUES = 16
QUICK_ELEMENTS = 1024  # of BYTES are looked at in less than a millisecond
QUICK_BYTES = 1 << 20  # are copied in less than that
MAX_FORMS = 4  # of messages of one length to one model

REPORT_PARAMETER = "gangway_stats"  # the answer shall say how the request was served
RESERVED_PREFIX = "triton_"

OutputTensor = pb.ModelInferRequest.InferRequestedOutputTensor


@dataclass(frozen=True)
class RequestPlan:
    """A checked request. `typed` are the contents, if these came in the header.

    `fallback` is another codec, for a compiled variant of a model that may be unloaded at any time. `sources` says
    which inputs are in regions, in the request's order (empty: none); `typed` leaves these out. `sinks` are outputs
    that are to be in regions. Regions are looked up by name for each request, since they change while plans stay.
    `cached_header`: what counts for the response cache, which may answer it if no tensor is in a region; empty: it may
    not. `members`: of an ensemble.
    `sequence`: where in a sequence it stands, if the model has those; `waited_ns`: until its turn there. `calls`
    returns codec and fallback, if values of inputs decide on them; `by_values` keeps the plans for some values.
    """

    model: ServedModel
    shapes: Shapes
    typed: tuple[bytes, ...] | None
    codec: Codec | EnsembleCodec
    terms: Terms
    fallback: Codec | None = None
    wants_report: bool = False
    sources: tuple[RegionRange | None, ...] = ()
    sinks: Sinks = field(default_factory=dict)
    cached_header: bytes = b""
    members: tuple[ServedModel, ...] = ()
    sequence: SequencePosition | None = None
    waited_ns: int = 0
    calls: Callable[[Shapes], tuple[Codec, Codec | None]] | None = None
    is_unique: bool = False  # no other request is likely to have an equal header
    by_values: dict[tuple[int, ...], "RequestPlan"] = field(default_factory=dict)

    def decided(self, contents: Contents) -> "RequestPlan":
        """Return the plan for these contents, in the request's order; another one if their values decide something.

        Raises RequestError if a region has become too small.
        """
        if self.calls is None:
            return self
        given = zip(self.shapes.inputs, contents, strict=True)
        pairs = [(tensor, content) for (tensor, _), content in given if tensor.value_symbol]
        values = {tensor.value_symbol: integer_of(content, tensor.datatype) for tensor, content in pairs}
        key = tuple(values.values())
        if key not in self.by_values:
            shapes = replace(self.shapes, sizes={**self.shapes.sizes, **values})
            codec, fallback = self.calls(shapes)
            if len(self.by_values) >= MAX_CACHED_VALUES:
                self.by_values.clear()
            self.by_values[key] = replace(self, shapes=shapes, codec=codec, fallback=fallback, calls=None, by_values={})
        return self.by_values[key]

    @cached_property
    def regions(self) -> frozenset[str]:
        """The names of all regions that the request needs."""
        if not (self.sources or self.sinks):
            return frozenset()
        sources = [source for source in self.sources if source is not None]
        return frozenset(place.region for place in (*sources, *self.sinks.values()))

    @cached_property
    def mappable(self) -> Candidates | None:
        """The tensors that workers may use where the client has them. A request that changes state is not run twice."""
        if self.model.config.HasField("sequence_batching") or isinstance(self.codec, EnsembleCodec):
            return None
        return candidates_of(self.codec, self.shapes, self.sources, self.model.outputs)

    @property
    def refuses_late(self) -> bool:
        """Whether it is refused once it is late.

        By a target of the configuration only when a request has met as short a one: one that none can meet would have
        all of them refused.
        """
        terms = self.terms
        return terms.rejects_late and (terms.by_client or self.model.statistics.least_met_us <= terms.target_us)

    @property
    def cacheable(self) -> bool:
        """Whether the response cache may answer it."""
        return bool(self.cached_header) and not self.regions

    @cached_property
    def plain_codec(self) -> Codec | None:
        """How it is carried out, if its header has no contents, and the sizes of these are known."""
        if self.typed or self.cached_header or self.wants_report or self.model.config.HasField("sequence_batching"):
            return None
        if any(tensor.datatype == "BYTES" for tensor, _ in self.shapes.inputs):
            return None
        if isinstance(self.codec, EnsembleCodec):
            return None
        if isinstance(self.codec, PythonCodec):  # regions are copied for it, which takes its time
            return None if self.model.is_decoupled or self.regions else self.codec
        return self.codec

    @cached_property
    def input_sizes(self) -> tuple[int, ...]:
        """Bytes of each input, in the request's order; of a model without strings."""
        return tuple(math.prod(shape) * item_bytes(tensor.datatype) for tensor, shape in self.shapes.inputs)

    @cached_property
    def takes_long(self) -> bool:
        """Whether `contents` would hold the loop: it looks at each element of BYTES, and copies those of regions."""
        sources = self.sources or (None,) * len(self.shapes.inputs)
        given = zip(self.shapes.inputs, sources, strict=True)
        strings = [(math.prod(shape), source) for (tensor, shape), source in given if tensor.datatype == "BYTES"]
        copied_bytes = sum(source.size_bytes for _, source in strings if source is not None)
        return sum(count for count, _ in strings) > QUICK_ELEMENTS or copied_bytes > QUICK_BYTES

    @cached_property
    def _checked_sizes(self) -> tuple[int, ...] | None:
        """Bytes of each input, if there is nothing else to check."""
        is_plain = self.typed is None and not (self.sources or self.sinks)
        is_plain = is_plain and not any(tensor.datatype == "BYTES" for tensor, _ in self.shapes.inputs)
        return self.input_sizes if is_plain else None

    def contents(self, raws: list[memoryview], regions: Mapping[str, Region] = NO_REGIONS) -> Contents:
        """Return the contents of each input, in the request's order, their sizes checked. Raises RequestError."""
        if tuple(map(len, raws)) == self._checked_sizes:
            return raws
        name, inputs = self.model.name, self.shapes.inputs
        for sink in self.sinks.values():
            sink.within(regions)  # so that nothing is computed that cannot be written
        if self.sources:
            return mixed_contents(inputs, self.sources, raws if self.typed is None else self.typed, regions, name)
        return raw_contents(inputs, raws, name) if self.typed is None else self.typed


_NO_FORMS: list[MessageForm] = []

KnownRequest: TypeAlias = tuple[RequestPlan, bytes, list[memoryview]]
"""The plan of a request, its id and its raw tensors, which have the right sizes if it names no region."""


class RequestPlanner:
    """Plans for one set of models. Equal headers (a client's requests differ only in id and tensors) are read once."""

    def __init__(self, models: Models) -> None:
        self.models = models
        self._plans: Remembered[tuple[bytes, bool], RequestPlan] = Remembered()
        self._forms: Remembered[tuple[int, bytes], list[MessageForm]] = Remembered()
        self._messages: Remembered[tuple[bytes, ...], RequestPlan] = Remembered()
        self._graphs = Graphs(models)

    def known(self, message: bytes) -> KnownRequest | None:
        """Return the parts of a request with an equal header as one before, and with a plain codec; None of others.

        The first field, which is the model's name, and the length find the forms that such a message may have; its
        fixed parts find the plan. Steps of a decoder have one form, and many plans: their headers differ in shapes.
        """
        key = len(message), message[: 2 + message[1]] if len(message) > 1 else b""
        forms = self._forms.known.get(key, _NO_FORMS)
        try:
            for form in forms:
                if (plan := self._messages.known.get(form.fixed_in(message))) is not None:
                    return plan, *form.split(message)
            header, request_id, raws = split_request(message)
            known = self.known_parts(header, request_id, raws)
            if known is not None:
                self._remember(key, message, known[0], len(header))
        except MalformedRequestError:
            return None
        return known

    def _remember(self, key: tuple[int, bytes], message: bytes, plan: RequestPlan, header_bytes: int) -> None:
        """Remember the plan of a message, unless too many forms have its length."""
        forms, form = self._forms.known.get(key, []), MessageForm.of(message)
        if form not in forms:
            if len(forms) == MAX_FORMS:
                return
            forms.append(form)
            self._forms.add(key, forms)
        self._messages.add(form.fixed_in(message), plan, header_bytes)

    def known_parts(self, header: bytes, request_id: bytes, raws: list[memoryview]) -> KnownRequest | None:
        """Do the same with a request in parts."""
        plan = self._plans.known.get((header, bool(raws)))
        if plan is None or plan.plain_codec is None:
            return None
        if not plan.regions and tuple(map(len, raws)) != plan.input_sizes:
            return None
        return plan, request_id, raws

    def plan(self, header: bytes, has_raws: bool) -> RequestPlan:
        """Return what the header asks for. Raises RequestError."""
        plan = self._plans.known.get((header, has_raws))
        if plan is None:
            plan = make_plan(self.models, header, has_raws, self._graphs)
            if not (plan.typed or plan.is_unique):
                self._plans.add((header, has_raws), plan, len(header))
        return plan


def make_plan(models: Models, header: bytes, has_raws: bool, graphs: Graphs | None = None) -> RequestPlan:
    """Check a header. `has_raws`: the request has raw_input_contents, so typed contents are refused.

    `graphs`: those of the same models that are known already.
    """
    try:
        request = pb.ModelInferRequest.FromString(header)
    except DecodeError:
        invalid("the request is not a ModelInferRequest")
    model = models.find(request.model_name, request.model_version)
    _check_reserved(request, model)
    timeout_us = _count(request, "timeout", model)
    step = _step(request, timeout_us, model)
    priority = _count(request, "priority", model)
    inputs = _named_inputs(request, model)
    shapes = shapes_of(inputs, model)
    if step is not None and model.sequence is not None:
        check_position(step, model.sequence.settings, shapes.rows, model.name)
    sources = _sources(inputs, model)
    typed = None if has_raws else _typed(inputs, model)
    if has_raws and any(given.HasField("contents") for given, _ in inputs):
        name = next(given.name for given, _ in inputs if given.HasField("contents"))
        invalid(
            f"contents field must not be specified when using raw_input_contents for '{name}' for model '{model.name}'"
        )
    outputs, sinks = _requested_outputs(request, model)
    classes = _classes(request, model)
    codec: Codec | EnsembleCodec
    fallback: Codec | None = None
    members: tuple[ServedModel, ...] = ()
    if model.is_ensemble:
        graph = (graphs or Graphs(models)).of(model).needed([tensor.name for tensor in outputs])
        members = graph.members
        codec = EnsembleCodec(
            model=model,
            outputs=tuple(outputs),
            sinks=sinks,
            classes=classes,
            graph=graph,
            shapes=shapes,
            wants_empty_final=_flag(request, EMPTY_FINAL_PARAMETER, model),
            about=about_of(request),
        )
    else:
        codec, fallback = _calls(model, shapes, outputs, sinks, classes, request)
    terms = model.policies.terms(timeout_us, priority, model.target_us(shapes))
    wants_report = _flag(request, REPORT_PARAMETER, model)
    is_cached = model.config.response_cache.enable and not wants_report
    # A client's process writes the members of a map in an order of its own.
    cached_header = request.SerializeToString(deterministic=True) if is_cached else b""
    decides = model.has_values and model.sequence is None and not model.is_ensemble
    calls = (lambda decided: _calls(model, decided, outputs, sinks, classes, request)) if decides else None
    is_unique = step is not None and step.is_unique
    if isinstance(codec, EnsembleCodec):  # a step may have sequences
        is_unique = bool(codec.about.get("flags"))
    return RequestPlan(
        model, shapes, typed, codec, terms, fallback, wants_report, sources, sinks, cached_header, members, step,
        calls=calls, is_unique=is_unique,
    )  # fmt: skip


def _step(request: pb.ModelInferRequest, timeout_us: int, model: ServedModel) -> SequencePosition | None:
    """Return a request's place in its sequence; None if the model has none: then it means nothing, as in Triton."""
    position = position_of(request, timeout_us)
    return None if model.sequence is None else position


def _calls(
    model: ServedModel,
    shapes: Shapes,
    outputs: list[Tensor],
    sinks: Sinks,
    classes: Mapping[str, Classes],
    request: pb.ModelInferRequest,
) -> tuple[Codec, Codec | None]:
    """Return how a model answers, and another way if that one may go."""
    wants_empty_final = _flag(request, EMPTY_FINAL_PARAMETER, model)
    about = about_of(request) if model.is_python else {}
    return codecs_of(model, shapes, outputs, sinks, classes, about, wants_empty_final)


def _count(request: pb.ModelInferRequest, name: str, model: ServedModel) -> int:
    """Return a request parameter that is a number, 0 without it."""
    if name not in request.parameters:
        return 0
    choice = request.parameters[name].WhichOneof("parameter_choice")
    if choice not in ("int64_param", "uint64_param"):
        invalid(f"parameter '{name}' for model '{model.name}': expected int64_param, got {choice}")
    value = int(getattr(request.parameters[name], choice))
    if not 0 <= value <= MAX_INT64:
        invalid(f"parameter '{name}' for model '{model.name}': expected 0 to {MAX_INT64}, got {value}")
    return value


def _flag(request: pb.ModelInferRequest, name: str, model: ServedModel) -> bool:
    """Return a request parameter that is yes or no, no without it."""
    if name not in request.parameters:
        return False
    choice = request.parameters[name].WhichOneof("parameter_choice")
    if choice != "bool_param":
        invalid(f"parameter '{name}' for model '{model.name}': expected bool_param, got {choice}")
    return request.parameters[name].bool_param


def _check_reserved(request: pb.ModelInferRequest, model: ServedModel) -> None:
    for parameter in request.parameters:
        if parameter.startswith(RESERVED_PREFIX) and parameter != EMPTY_FINAL_PARAMETER:
            prefix = f"parameter keys starting with '{RESERVED_PREFIX}'"
            invalid(f"{prefix} are reserved for Triton usage, got '{parameter}'")
    _flag(request, EMPTY_FINAL_PARAMETER, model)


def _named_inputs(request: pb.ModelInferRequest, model: ServedModel) -> list[tuple[InputTensor, Tensor]]:
    """Pair each tensor of the request with the model's."""
    pairs: dict[str, tuple[InputTensor, Tensor]] = {}
    for given in request.inputs:
        tensor = model.inputs.get(given.name)
        if tensor is None:
            expected = ", ".join(f"'{name}'" for name in model.inputs)
            invalid(f"unexpected inference input '{given.name}' for model '{model.name}'. Expected input(s) {expected}")
        if given.name in pairs:
            invalid(f"input '{given.name}' for model '{model.name}' is given twice")
        _refuse_parameters(given, f"input '{given.name}' for model '{model.name}'")
        pairs[given.name] = (given, tensor)
    require_inputs(model, pairs)
    return list(pairs.values())


def _refuse_parameters(given: InputTensor | OutputTensor, where: str) -> None:
    for parameter in given.parameters:
        if parameter == CLASSIFICATION and isinstance(given, InputTensor):
            invalid(f"{where}: parameter '{parameter}' is for outputs")


def _sources(inputs: list[tuple[InputTensor, Tensor]], model: ServedModel) -> tuple[RegionRange | None, ...]:
    """Return where the inputs are, empty if all of them are in the message."""
    sources = tuple(RegionRange.of(given) for given, _ in inputs)
    for (given, tensor), source in zip(inputs, sources, strict=True):
        if source is not None and given.HasField("contents"):
            invalid(
                f"unexpected 'content' provided when using shared memory for input tensor '{tensor.name}'"
                f" for model '{model.name}'"
            )
    check_sources(sources, model.name)
    return sources if any(sources) else ()


def _typed(inputs: list[tuple[InputTensor, Tensor]], model: ServedModel) -> tuple[bytes, ...]:
    contents = []
    for given, tensor in inputs:
        if REGION in given.parameters:
            continue
        elements = math.prod(given.shape)
        contents.append(to_bytes(given.contents, tensor.name, tensor.datatype, elements, model.name))
        check_contents(tensor, tuple(given.shape), contents[-1], model.name)
    return tuple(contents)


def _requested_outputs(request: pb.ModelInferRequest, model: ServedModel) -> tuple[list[Tensor], Sinks]:
    """Return the outputs that are asked for, in that order, all of the model's if none is; and which go to regions."""
    wanted: dict[str, Tensor] = {}
    sinks: dict[int, RegionRange] = {}
    for output in request.outputs:
        if output.name not in model.outputs:
            expected = ", ".join(f"'{name}'" for name in model.outputs)
            invalid(
                f"unexpected inference output '{output.name}' for model '{model.name}'. Expected output(s) {expected}"
            )
        if output.name in wanted:
            invalid(f"output '{output.name}' for model '{model.name}' is requested twice")
        _refuse_parameters(output, f"output '{output.name}' for model '{model.name}'")
        wanted[output.name] = model.outputs[output.name]
        sink = RegionRange.of(output)
        if sink is not None:
            sinks[wanted[output.name].index] = sink
    return list(wanted.values()) or list(model.outputs.values()), sinks


def _classes(request: pb.ModelInferRequest, model: ServedModel) -> dict[str, Classes]:
    """Return the outputs that are to be classified."""
    found = {output.name: wanted_classes(output, model.outputs[output.name], model) for output in request.outputs}
    return {name: classes for name, classes in found.items() if classes is not None}
