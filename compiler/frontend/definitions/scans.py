"""Scan without its steps: where none needs another one, all are computed at once, along an axis in front of all others.

So converters from scikit-learn write distances: each step subtracts one vector from a matrix.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import helper, numpy_helper

from gangway.compiler.frontend.batch.rules import ELEMENTWISE, REDUCTIONS
from gangway.compiler.frontend.decompositions import Body, defines

_WITHOUT_BATCH = 9  # the first operator set with a Scan that has no axis of the batch
_AXES_BY_INPUT = 13  # of Unsqueeze
_EACH = {*ELEMENTWISE.split(), "Identity", "Dropout"}
_REDUCTIONS = {f"Reduce{name}" for name in REDUCTIONS.split()}


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the steps: its name outside, its rank in a step, and whether the steps lie along a first axis."""

    name: str
    rank: int
    stepped: bool


@defines("Scan")
def scan(body: Body) -> None:
    """Operators on each number, and reductions, of all steps; no step may change a state."""
    node, graph = body.node, body.node.attributes["body"]
    given = node.inputs[: len(node.inputs) - len(node.captured)]
    count = body.attribute("num_scan_inputs", 1)
    states = len(given) - count
    if body.graph.opset < _WITHOUT_BATCH:
        raise node.unsupported(f"opset {body.graph.opset}")
    options = ("scan_input_axes", "scan_input_directions", "scan_output_axes", "scan_output_directions")
    if any(any(body.attribute(name, ())) for name in options):
        raise node.unsupported("its steps are along another axis than the first one, or go backwards")
    known: dict[str, _Tensor] = {}
    for index, value in enumerate(graph.input):
        stepped = index >= states
        known[value.name] = _Tensor(given[index], len(body.type(index).shape) - stepped, stepped)
    for inside, name in zip(node.captured, node.inputs[len(given) :], strict=True):
        known[inside] = _Tensor(name, len(body.type_of(name).shape), stepped=False)
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for name, array in values.items():
        known[name] = _Tensor(body.constant(array), array.ndim, stepped=False)
    for inner in graph.node:
        _add(body, inner, known, values)
    for index, (value, output) in enumerate(zip(graph.output, node.outputs, strict=True)):
        made = known[value.name]
        if made.stepped != (index >= states) or (index < states and made.name != given[index]):
            raise node.unsupported("a step needs the one before it, or gives what all steps give")
        if output:
            body.op("Identity", made.name, output=output)


def _add(body: Body, inner: Any, known: dict[str, _Tensor], values: dict[str, Any]) -> None:
    """Add what a node of a step is of all steps. Raises UnsupportedModelError."""
    attributes = {item.name: helper.get_attribute_value(item) for item in inner.attribute}
    inputs, output = [known[name] for name in inner.input if name], inner.output[0]
    if inner.domain or len(inputs) != len(inner.input) or any(inner.output[1:]):
        raise body.node.unsupported(f"{inner.op_type} in its steps")
    if inner.op_type == "Constant" and "value" in attributes:
        values[output] = numpy_helper.to_array(attributes["value"])
        known[output] = _Tensor(body.constant(values[output]), values[output].ndim, stepped=False)
    elif inner.op_type == "Identity":
        known[output] = inputs[0]
    elif inner.op_type in _EACH:
        rank, stepped = max(item.rank for item in inputs), any(item.stepped for item in inputs)
        names = [_widened(body, item, rank) if stepped else item.name for item in inputs]
        known[output] = _Tensor(body.op(inner.op_type, *names, **attributes), rank, stepped)
    elif inner.op_type in _REDUCTIONS and not attributes.get("noop_with_empty_axes", 0):
        x, *others = inputs
        if others and inner.input[1] not in values:
            raise body.node.unsupported(f"{inner.op_type} over axes that are no constants")
        axes = values[inner.input[1]].tolist() if others else attributes.get("axes", ())
        axes = [axis % x.rank for axis in axes or range(x.rank)]
        keeps = attributes.get("keepdims", 1)
        name = body.reduce(inner.op_type, x.name, [axis + x.stepped for axis in axes], keepdims=keeps)
        known[output] = _Tensor(name, x.rank if keeps else x.rank - len(axes), x.stepped)
    else:
        raise body.node.unsupported(f"{inner.op_type} in its steps")


def _widened(body: Body, tensor: _Tensor, rank: int) -> str:
    """A tensor of all steps whose axes, behind that of the steps, are aligned with those of others of this rank."""
    if not tensor.stepped or tensor.rank == rank:
        return tensor.name
    axes: Sequence[int] = range(1, 1 + rank - tensor.rank)
    if body.graph.opset >= _AXES_BY_INPUT:
        return body.op("Unsqueeze", tensor.name, body.constant(np.array(axes, np.int64)))
    return body.op("Unsqueeze", tensor.name, axes=list(axes))
