"""An ensemble as the front end carries it out: how each of its steps computes, and how its answers are made."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from gangway.server.models.served import InputTensor, require_inputs, shapes_of
from gangway.server.models.tensors import Shapes, Tensor
from gangway.server.requests.codecs import AnswerTensor, Codec, ResponseForm, Shape
from gangway.server.requests.ensemble_graphs import EnsembleGraph, EnsembleStep, TensorName
from gangway.server.requests.python_codec import codecs_of, parameters_text
from gangway.server.requests.regions import Region
from gangway.server.requests.remembered import Remembered

MAX_STEP_PLANS = 256  # that are remembered; those of a few requests with other shapes

Kind = tuple[str, Shape]  # of a tensor: its type and shape


class StepPlan(NamedTuple):
    """How a step is executed with inputs of certain types and shapes, and another way if that one may go."""

    shapes: Shapes
    codec: Codec
    fallback: Codec | None


def step_plan_of(step: EnsembleStep, inputs: Mapping[str, Kind], about: Mapping[str, Any]) -> StepPlan:
    """Check the inputs of a step as those of a client are checked. `about`: as `EnsembleCodec` has it.

    Raises RequestError.
    """
    model = step.model
    require_inputs(model, inputs)
    given = []
    for name, (datatype, shape) in inputs.items():
        tensor = model.inputs[name]
        given.append((InputTensor(name=name, datatype=datatype, shape=fitted(shape, tensor, model.least_rows)), tensor))
    shapes = shapes_of(given, model)
    outputs = [tensor for name, tensor in model.outputs.items() if name in step.outputs]
    return StepPlan(shapes, *codecs_of(model, shapes, outputs, about=about))


def fitted(shape: Shape, tensor: Tensor, least_rows: int) -> Shape:
    """Return a shape as a model wants it that has another opinion of batches: with a 1 more or less in front.

    If neither is right it stays as it is.
    """
    choices = [shape, (1, *shape)] + [shape[1:]] * (shape[:1] == (1,))
    return next((choice for choice in choices if tensor.may_have(choice, least_rows)), shape)


@dataclass(frozen=True, kw_only=True)
class EnsembleCodec(ResponseForm):
    """How a request to an ensemble is carried out, and its answer made. Equal requests share it.

    `graph` has the steps that the wanted `outputs` need, and no others. `about`: what Python models are told of the
    request (`about_of`), each as if it were its own.
    """

    graph: EnsembleGraph
    shapes: Shapes
    wants_empty_final: bool = False  # the client is told that there is no further response
    about: Mapping[str, Any] = field(default_factory=dict)
    _plans: Remembered[tuple[int, tuple[tuple[str, Kind], ...]], StepPlan] = field(
        init=False, default_factory=lambda: Remembered(MAX_STEP_PLANS), compare=False
    )

    @cached_property
    def _refitted(self) -> frozenset[TensorName]:
        """The tensors of steps that may have another opinion of batches or scalars than the ensemble.

        A Python model's, with its own opinion of batches, are as it gives them.
        """
        has_rows = self.model.max_batch_size > 0
        steps = self.graph.steps
        others = [each for each in steps if not each.model.is_python or (each.model.max_batch_size > 0) != has_rows]
        return frozenset(tensor for step in others for tensor in step.outputs.values())

    @property
    def wanted(self) -> tuple[TensorName, ...]:
        """The tensors that the answer is made of."""
        return tuple((tensor.name,) for tensor in self.outputs)

    def step_plan(self, index: int, inputs: Mapping[str, Kind]) -> StepPlan:
        """Return the plan of a step with these inputs, by their names in its model. Raises RequestError."""
        key = index, tuple(inputs.items())
        plan = self._plans.known.get(key)
        if plan is None:
            plan = step_plan_of(self.graph.steps[index], inputs, self.about)
            self._plans.add(key, plan)
        return plan

    def answer(
        self,
        request_id: bytes,
        results: Mapping[TensorName, AnswerTensor],
        parameters: Mapping[str, Any],
        regions: Mapping[str, Region],
    ) -> bytes:
        """Return the serialised response. Outputs that belong to regions are written there, missing ones are left out.

        Raises RequestError if they cannot be, or if the response would be too large to be sent.
        """
        outputs = {}
        for tensor in self.outputs:
            result = results.get((tensor.name,))
            if result is not None:
                refits = (tensor.name,) in self._refitted
                shape = fitted(result.shape, tensor, self.model.least_rows) if refits else result.shape
                outputs[tensor.name] = result._replace(shape=shape)
        return self.response_of(request_id, outputs, regions) + parameters_text(parameters)
