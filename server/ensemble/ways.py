"""How one step of an ensemble is executed with inputs of certain types and shapes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gangway.server.calls import FrameCall, frame_call_of
from gangway.server.ensemble.graph import Step
from gangway.server.errors import invalid
from gangway.server.models import Compiled, Shapes
from gangway.server.request_shapes import InputTensor, fits, shapes_of
from gangway.server.tensor import Tensor

MAX_WAYS = 256  # that are remembered; those of a few requests with other shapes

Shape = tuple[int, ...]
Kind = tuple[str, Shape]  # of a tensor: its type and shape


@dataclass(frozen=True)
class StepWay:
    """`compiled` is what answers, if it is compiled for these sizes; else, or if that has gone, `frame` does.

    `output_shapes` are those of the compiled model's outputs by name, as clients get them.
    """

    shapes: Shapes
    compiled: Compiled | None
    frame: FrameCall
    output_shapes: Mapping[str, Shape]


@dataclass(frozen=True)
class Ways:
    """Remembers the ways of one graph's steps. Safe for threads: at worst one is made twice."""

    _known: dict[tuple[int, tuple[tuple[str, Kind], ...]], StepWay] = field(default_factory=dict)

    def of(self, index: int, step: Step, inputs: Mapping[str, Kind]) -> StepWay:
        """Return the way of a step with these inputs, by their names in the model. Raises RequestError."""
        key = index, tuple(inputs.items())
        way = self._known.get(key)
        if way is None:
            if len(self._known) >= MAX_WAYS:
                self._known.clear()
            way = self._known[key] = way_of(step, inputs)
        return way


def way_of(step: Step, inputs: Mapping[str, Kind]) -> StepWay:
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
    return StepWay(shapes, compiled, frame_call_of(model, shapes, list(model.outputs.values())), output_shapes)


def fitted(shape: Shape, tensor: Tensor, least_rows: int) -> Shape:
    """Return a shape as a model wants it that has another opinion of batches: with a 1 more or less in front.

    If neither is right it stays as it is.
    """
    choices = [shape, (1, *shape)] + [shape[1:]] * (shape[:1] == (1,))
    return next((choice for choice in choices if fits(choice, tensor, least_rows)), shape)
