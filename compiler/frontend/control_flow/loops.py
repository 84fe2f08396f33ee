"""Shapes of what loops compute. ONNX lets a loop change the shapes of its tensors, so its inference states none.

If the body makes tensors of the same shapes of those that the loop begins with, all have these shapes, by induction. A
loop of a known number of steps, which nothing ends earlier, has as many parts in each result that it collects.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from gangway.compiler.frontend.graph import TensorType
from gangway.compiler.frontend.subgraphs import captured_tensors, graphs_of

Infer = Callable[[Any], Mapping[str, TensorType]]
_FIRST_STATE = 2  # inputs of a loop, and of its body, before the tensors that it changes


def loop_types(node: Any, model: Any, known: Mapping[str, TensorType], infer: Infer) -> dict[str, TensorType]:
    """Return the types that can be known of a loop's results, of which nothing is `known`.

    `infer` returns the types in a model.
    """
    values = {tensor.name: tensor for tensor in model.graph.initializer}
    (body,) = graphs_of(node)
    names, captured = node.input[_FIRST_STATE:], captured_tensors(node)
    if any(name not in known and name not in values for name in (*names, *captured)):
        return {}
    kinds: list[TensorType | None] = [_type(name, known, values) for name in names]
    count = len(kinds)
    while True:
        probe = _probe(body, kinds, captured, known, values, model.opset_import)
        found = infer(probe)
        made = [found.get(value.name) for value in probe.graph.output[1:]]
        same = [before if before == after else None for before, after in zip(kinds, made, strict=False)]
        if same == kinds:
            break
        kinds = same
    states = zip(node.output, kinds, strict=False)
    types = {name: kind for name, kind in states if name and kind}
    steps = _steps(node, body, values)
    for name, kind in zip(node.output[count:], made[count:], strict=False):
        if name and kind and steps is not None:
            types[name] = TensorType((steps, *kind.shape), kind.dtype)
    return types


def _type(name: str, known: Mapping[str, TensorType], values: Mapping[str, Any]) -> TensorType:
    if name in known:
        return known[name]
    array = numpy_helper.to_array(values[name])
    return TensorType(array.shape, array.dtype.name)


def _probe(
    body: Any,
    kinds: list[TensorType | None],
    captured: tuple[str, ...],
    known: Mapping[str, TensorType],
    values: Mapping[str, Any],
    imports: Any,
) -> Any:
    """Return the body as a model, whose states have these types; None: a type of which only the elements are known."""
    graph = onnx.GraphProto()
    graph.CopyFrom(body)
    types = [TensorType((), "int64"), TensorType((), "bool"), *kinds]
    for value, kind in zip(graph.input, types, strict=False):
        if kind is None:
            value.type.tensor_type.ClearField("shape")
        else:
            _declare(value, kind)
    for value in graph.output:
        value.type.tensor_type.ClearField("shape")
    for name in captured:
        if name in values:
            graph.initializer.append(values[name])
        else:
            _declare(graph.input.add(name=name), known[name])
    return helper.make_model(graph, opset_imports=imports)


def _declare(value: Any, kind: TensorType) -> None:
    element = helper.np_dtype_to_tensor_dtype(np.dtype(kind.dtype))
    value.type.CopyFrom(helper.make_tensor_type_proto(element, kind.shape))


def _steps(node: Any, body: Any, values: Mapping[str, Any]) -> int | None:
    """Return how many steps a loop has, None if a request, or a step, may decide that."""
    trips, condition = node.input[0], node.input[1]
    if trips not in values or (condition and condition not in values):
        return None
    if condition and not numpy_helper.to_array(values[condition]).all():
        return 0
    again, given = body.output[0].name, body.input[1].name
    copies = {item.output[0]: item.input[0] for item in body.node if item.op_type == "Identity"}
    if copies.get(again, again) != given:
        return None
    return max(0, int(numpy_helper.to_array(values[trips]).reshape(())))
