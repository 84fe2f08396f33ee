"""What a checked request to an ensemble asks for, and how its answer is made of what the steps have left."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import grpc

from gangway.server.calls import MAX_ANSWER_BYTES, Sinks
from gangway.server.classification import Classes, classified
from gangway.server.ensemble.graph import Graph, TensorName
from gangway.server.ensemble.ways import Shape, Ways, fitted
from gangway.server.errors import RequestError
from gangway.server.models import Shapes
from gangway.server.regions import Region
from gangway.server.request_shapes import fits
from gangway.server.response import Answered, ResponseTemplate
from gangway.server.tensor import Tensor

MAX_TEMPLATES = 64
Result: TypeAlias = tuple[Shape, memoryview]  # shape and contents of a tensor
_NOTHING: Final = memoryview(b"")


@dataclass(frozen=True)
class EnsembleCall:
    """Equal requests share it. `graph` has the steps that the wanted `outputs` need, and no others.

    `classes`: outputs that are to be classified.
    """

    graph: Graph
    shapes: Shapes
    outputs: tuple[Tensor, ...]
    sinks: Sinks
    classes: Mapping[str, Classes]
    ways: Ways = field(default_factory=Ways)
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
