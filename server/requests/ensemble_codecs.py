"""What a checked request to an ensemble asks for, and how its answer is made of what the steps have left."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import grpc

from gangway.server.errors import RequestError, invalid
from gangway.server.models.ensembles import Graph, Step, TensorName
from gangway.server.models.served import Compiled
from gangway.server.models.tensors import Shapes, Tensor
from gangway.server.requests.codecs import (
    MAX_ANSWER_BYTES,
    Answered,
    Classes,
    FrameCodec,
    ResponseTemplate,
    Sinks,
    classified,
    frame_codec_of,
)
from gangway.server.requests.regions import Region
from gangway.server.requests.shapes import InputTensor, fits, shapes_of

# How one step of an ensemble is executed with inputs of certain types and shapes.

MAX_STEP_CODECS = 256  # that are remembered; those of a few requests with other shapes

Shape = tuple[int, ...]
Kind = tuple[str, Shape]  # of a tensor: its type and shape


@dataclass(frozen=True)
class StepCodec:
    """`compiled` is what answers, if it is compiled for these sizes; else, or if that has gone, `frame` does.

    `output_shapes` are those of the compiled model's outputs by name, as clients get them.
    """

    shapes: Shapes
    compiled: Compiled | None
    frame: FrameCodec
    output_shapes: Mapping[str, Shape]


@dataclass(frozen=True)
class StepCodecs:
    """Remembers the codecs of one graph's steps. Safe for threads: at worst one is made twice."""

    _known: dict[tuple[int, tuple[tuple[str, Kind], ...]], StepCodec] = field(default_factory=dict)

    def of(self, index: int, step: Step, inputs: Mapping[str, Kind]) -> StepCodec:
        """Return the codec of a step with these inputs, by their names in the model. Raises RequestError."""
        key = index, tuple(inputs.items())
        codec = self._known.get(key)
        if codec is None:
            if len(self._known) >= MAX_STEP_CODECS:
                self._known.clear()
            codec = self._known[key] = step_codec_of(step, inputs)
        return codec


def step_codec_of(step: Step, inputs: Mapping[str, Kind]) -> StepCodec:
    """Check the inputs of a step as those of a client are checked. Raises RequestError."""
    model = step.model
    missing = [name for name, tensor in model.inputs.items() if not (tensor.optional or name in inputs)]
    if missing:
        invalid(f"missing required input(s) {missing} for model '{model.name}'")
    given = []
    for name, (datatype, shape) in inputs.items():
        tensor = model.inputs[name]
        given.append((InputTensor(name=name, datatype=datatype, shape=fitted(shape, tensor, model.least_rows)), tensor))
    shapes = shapes_of(given, model)
    compiled = model.compiled_for(shapes)
    output_shapes, rows = {}, 0 if shapes.is_empty else shapes.rows
    if compiled is not None:
        for name, tensor in model.outputs.items():
            own = compiled.outputs[tensor.index].shape
            output_shapes[name] = tensor.client_shape((rows, *own[1:]) if model.batched else own)
    return StepCodec(shapes, compiled, frame_codec_of(model, shapes, list(model.outputs.values())), output_shapes)


def fitted(shape: Shape, tensor: Tensor, least_rows: int) -> Shape:
    """Return a shape as a model wants it that has another opinion of batches: with a 1 more or less in front.

    If neither is right it stays as it is.
    """
    choices = [shape, (1, *shape)] + [shape[1:]] * (shape[:1] == (1,))
    return next((choice for choice in choices if fits(choice, tensor, least_rows)), shape)


MAX_TEMPLATES = 64
Result: TypeAlias = tuple[Shape, memoryview]  # shape and contents of a tensor
_NOTHING: Final = memoryview(b"")


@dataclass(frozen=True)
class EnsembleCodec:
    """Equal requests share it. `graph` has the steps that the wanted `outputs` need, and no others.

    `classes`: outputs that are to be classified.
    """

    graph: Graph
    shapes: Shapes
    outputs: tuple[Tensor, ...]
    sinks: Sinks
    classes: Mapping[str, Classes]
    steps: StepCodecs = field(default_factory=StepCodecs)
    _templates: dict[tuple[tuple[Shape, int], ...], ResponseTemplate] = field(default_factory=dict)

    @property
    def wanted(self) -> tuple[TensorName, ...]:
        """The tensors that the answer is made of."""
        return tuple((tensor.name,) for tensor in self.outputs)

    def answer(self, request_id: bytes, results: Mapping[TensorName, Result], regions: Mapping[str, Region]) -> bytes:
        """Return the serialised response. Outputs that belong to regions are written there.

        Raises RequestError if they cannot be, if a shape is not what the ensemble's config says, or if the response
        would be too large to be sent.
        """
        model = self.graph.model
        tensors = [_NOTHING] * len(model.outputs)
        found: list[tuple[Shape, int]] = []
        for tensor in self.outputs:
            shape, content = results[(tensor.name,)]
            found.append((self._checked(tensor, shape), len(content)))
            tensors[tensor.index] = content
        template = self._template(tuple(found))
        for place, sink in self.sinks.items():
            sink.within(regions).write(tensors[place])
        response = template.fill(request_id, tensors)
        return classified(response, self.classes, model.max_batch_size > 0) if self.classes else response

    def _checked(self, tensor: Tensor, shape: Shape) -> Shape:
        model = self.graph.model
        own = fitted(shape, tensor, model.least_rows)
        if not fits(own, tensor, model.least_rows):
            message = f"in ensemble '{model.name}', unexpected shape for output '{tensor.name}'."
            message += f" Expected {list(tensor.shape)}, got {list(shape)}"
            raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, message)
        return own

    def _template(self, found: tuple[tuple[Shape, int], ...]) -> ResponseTemplate:
        template = self._templates.get(found)
        if template is None:
            template = self._make_template(found)
            if len(self._templates) >= MAX_TEMPLATES:
                self._templates.clear()
            self._templates[found] = template
        return template

    def _make_template(self, found: Sequence[tuple[Shape, int]]) -> ResponseTemplate:
        model = self.graph.model
        total_bytes = sum(size_bytes for _, size_bytes in found)
        if total_bytes > MAX_ANSWER_BYTES:
            message = f"the answer of ensemble '{model.name}' has {total_bytes} bytes, {MAX_ANSWER_BYTES} are possible"
            raise RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        answered = []
        for tensor, (shape, size_bytes) in zip(self.outputs, found, strict=True):
            sink = self.sinks.get(tensor.index)
            if sink is not None:
                sink.require(size_bytes, tensor.name)
            answered.append(Answered(tensor, shape, size_bytes, sink))
        return ResponseTemplate.of(model, answered)
