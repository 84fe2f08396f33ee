"""Where the batch is in the results of If, Loop and Scan: their graphs are followed as the model itself.

A loop's tensors must have the batch at the same place after every step. How many steps there are, and which branch is
taken, must not depend on it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from onnx import numpy_helper, shape_inference

from gangway.compiler.frontend.batch.places import BatchAxis, BatchedTensor
from gangway.compiler.frontend.folding import CONSTANTS
from gangway.compiler.frontend.graph import WIDE_BATCH, Graph, Node, TensorType, apply_rule
from gangway.compiler.frontend.importer import graph_node
from gangway.compiler.frontend.shape_inference import infer_shapes, model_proto, tensor_types
from gangway.compiler.kernels.specs import Array

Follow = Callable[[Graph, Mapping[str, Array], dict[str, BatchedTensor]], Mapping[str, BatchedTensor]]
BODIES = ("If", "Loop", "Scan")
_DECIDES = "rows of the batch decide what is computed"
_SMALL = 256  # elements of a constant that a shape can depend on
_SCAN_WITHOUT_BATCH = 9  # the first operator set with it


def rows_of_results(
    node: Node, tensors: Sequence[BatchedTensor], graph: Graph, follow: Follow
) -> tuple[BatchAxis | None, ...]:
    """Return the places in the outputs of a node; `follow` returns what is known of the tensors of a graph.

    Raises UnsupportedModelError.
    """
    own = len(node.inputs) - len(node.captured)
    outer = dict(zip(node.captured, tensors[own:], strict=True))
    match node.operator:
        case "If":
            if tensors[0].rows:
                raise node.mixed(_DECIDES)
            found = [_results(node, name, [], outer, graph, follow) for name in ("then_branch", "else_branch")]
            if found[0] != found[1]:
                raise node.unsupported("the batch is at different places in its branches")
            return tuple(found[0])
        case "Loop":
            return _loop(node, tensors[:own], outer, graph, follow)
    return _scan(node, tensors[:own], outer, graph, follow)


def _loop(
    node: Node, tensors: Sequence[BatchedTensor], outer: Mapping[str, BatchedTensor], graph: Graph, follow: Follow
) -> tuple[BatchAxis | None, ...]:
    if any(tensor.rows for tensor in tensors[:2]):
        raise node.mixed(_DECIDES)
    states = [_unknown(tensor) for tensor in tensors[2:]]
    given = [BatchedTensor((), "int64"), BatchedTensor((), "bool"), *states]
    again, *results = _results(node, "body", given, outer, graph, follow)
    if again:
        raise node.mixed(_DECIDES)
    return (*_kept(node, states, results), *(_stacked(rows, 0) for rows in results[len(states) :]))


def _scan(
    node: Node, tensors: Sequence[BatchedTensor], outer: Mapping[str, BatchedTensor], graph: Graph, follow: Follow
) -> tuple[BatchAxis | None, ...]:
    if graph.opset < _SCAN_WITHOUT_BATCH:
        raise node.unsupported(f"Scan of opset {graph.opset}")
    count = node.attributes["num_scan_inputs"]
    states, sequences = tensors[: len(tensors) - count], tensors[len(tensors) - count :]
    axes = node.attributes.get("scan_input_axes") or [0] * count
    given = [_unknown(tensor) for tensor in states]
    for tensor, place in zip(sequences, axes, strict=True):
        axis = place % len(tensor.shape)
        if tensor.rows and tensor.rows.axis == axis:
            raise node.mixed("its steps go along the batch")
        rows = tensor.rows and replace(tensor.rows, axis=tensor.rows.axis - (axis < tensor.rows.axis))
        given.append(replace(_unknown(tensor), shape=tensor.shape[:axis] + tensor.shape[axis + 1 :], rows=rows))
    results = _results(node, "body", given, outer, graph, follow)
    stacked = results[len(states) :]
    axes = node.attributes.get("scan_output_axes") or [0] * len(stacked)
    if min(axes, default=0) < 0:
        raise node.unsupported("an axis of its outputs counts from the end")
    return (*_kept(node, states, results), *map(_stacked, stacked, axes))


def _kept(node: Node, states: Sequence[BatchedTensor], results: Sequence[BatchAxis | None]) -> list[BatchAxis | None]:
    """Return the places in what each step changes, which must be where they were."""
    places = [tensor.rows for tensor in states]
    if places != list(results[: len(states)]):
        raise node.unsupported("it is not known whether it mixes rows of the batch: a step moves the batch")
    return places


def _stacked(rows: BatchAxis | None, axis: int) -> BatchAxis | None:
    """Return the place in results of all steps beside each other."""
    return rows and replace(rows, axis=rows.axis + (axis <= rows.axis))


def _unknown(tensor: BatchedTensor) -> BatchedTensor:
    """Return the tensor in any step: its numbers are not known."""
    return BatchedTensor(tensor.shape, tensor.dtype, tensor.rows)


def _results(
    node: Node,
    name: str,
    given: Sequence[BatchedTensor],
    outer: Mapping[str, BatchedTensor],
    graph: Graph,
    follow: Follow,
) -> list[BatchAxis | None]:
    """Return the places in what a graph in an attribute makes of its inputs and of tensors outside of it."""
    body = node.attributes[name]
    inputs = {value.name: tensor for value, tensor in zip(body.input, given, strict=True)}
    seen = {name: tensor for name, tensor in outer.items() if name not in inputs}
    constants = {name: tensor.value for name, tensor in seen.items() if tensor.value is not None and not tensor.rows}
    known = {**inputs, **{name: tensor for name, tensor in seen.items() if name not in constants}}
    inside = apply_rule(_graph(node, body, known, constants, graph), CONSTANTS)
    found = {**known, **follow(inside, inside.constants, known)}
    results = [found.get(value.name) for value in body.output]
    if any(tensor is not None and tensor.varies for tensor in results):
        raise node.mixed("a number that it computes depends on how many rows there are")
    return [None if tensor is None else tensor.rows for tensor in results]


def _graph(
    node: Node, body: Any, known: Mapping[str, BatchedTensor], constants: Mapping[str, Array], graph: Graph
) -> Graph:
    """Return a graph in an attribute as one of its own, with the shapes at batch 1 and in a larger batch."""
    values = {**constants, **{tensor.name: numpy_helper.to_array(tensor) for tensor in body.initializer}}
    try:
        types, wide = (_types(body, known, values, graph, rows) for rows in (1, WIDE_BATCH))
    except shape_inference.InferenceError as error:
        raise node.unsupported(f"its graph '{body.name}' has no known shapes: {error}") from error
    return Graph(
        inputs=tuple(known),
        outputs=tuple(value.name for value in body.output),
        batched=True,
        nodes=tuple(graph_node(item) for item in body.node),
        constants=values,
        types=types,
        wide_shapes={name: kind.shape for name, kind in wide.items()},
        opset=graph.opset,
        domains=graph.domains,
    )


def _types(
    body: Any, known: Mapping[str, BatchedTensor], values: Mapping[str, Array], graph: Graph, rows: int
) -> dict[str, TensorType]:
    """Return the types of a body's tensors in a batch of `rows`. Raises shape_inference.InferenceError."""
    given = {name: TensorType(_shape(tensor, rows), tensor.dtype) for name, tensor in known.items()}
    small = {name: value for name, value in values.items() if value.size <= _SMALL}
    large = {name: TensorType(value.shape, value.dtype.name) for name, value in values.items() if name not in small}
    made = {name for item in body.node for name in item.output}
    results = {value.name: None for value in body.output if value.name in made}
    model = model_proto(list(body.node), {**given, **large}, results, small, graph.opset, graph.domains)
    inferred = infer_shapes(model, strict=False).graph
    return tensor_types([*inferred.input, *inferred.value_info, *inferred.output])


def _shape(tensor: BatchedTensor, rows: int) -> tuple[int, ...]:
    shape = list(tensor.shape)
    if tensor.rows:
        shape[tensor.rows.axis] *= rows
    return tuple(shape)
