"""Operators that ONNX itself defines by simpler ones (as functions), replaced by those.

Whether a node needs that is the caller's decision: what a template computes in one piece should stay whole.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import onnx
from gangway.compiler.bodies import own_body
from gangway.compiler.errors import UnsupportedModelError
from gangway.compiler.graph import Graph, Node, TensorType
from gangway.compiler.inference import infer_shapes
from gangway.compiler.protos import model_proto, node_proto, tensor_types, value_proto
from gangway.compiler.specs import Array
from onnx import defs, helper, shape_inference

_CONTROL_FLOW = {"If", "Loop", "Scan", "SequenceMap"}
_MOST_CONSTANT_ELEMENTS = 256  # values that shapes may depend on; of larger ones inference is told the type only


def expand(graph: Graph, names: Collection[str], constants: Mapping[str, Array] | None = None) -> Graph:
    """Return the graph with the bodies of some nodes in their place, given by their first outputs.

    Nodes without a body stay as they are. Types of what is new are inferred. `constants` are those that are known
    beside the graph's own.
    """
    nodes: list[Node] = []
    types, wide_shapes = dict(graph.types), dict(graph.wide_shapes)
    for node in graph.nodes:
        body = _body(node, _knowing(graph, constants)) if node.outputs[0] in names else ()
        if body:
            types = _infer(node, body, types, graph) | types
            if graph.batched:
                wide = {name: replace(kind, shape=wide_shapes.get(name, kind.shape)) for name, kind in types.items()}
                found = _infer(node, body, {name: wide[name] for name in node.inputs if name in wide}, graph)
                wide_shapes = {name: kind.shape for name, kind in found.items()} | wide_shapes
        nodes += body or (node,)
    return replace(graph, nodes=tuple(nodes), types=types, wide_shapes=wide_shapes)


def has_body(node: Node, graph: Graph, constants: Mapping[str, Array] | None = None) -> bool:
    """Whether ONNX defines the node by simpler ones, in straight line."""
    return bool(_body(node, _knowing(graph, constants)))


def _knowing(graph: Graph, constants: Mapping[str, Array] | None) -> Graph:
    return replace(graph, constants={**graph.constants, **constants}) if constants else graph


def _body(node: Node, graph: Graph) -> tuple[Node, ...]:
    """Return the simpler nodes, empty if there are none."""
    if own := own_body(node, graph):
        return own
    function = _function(node, graph)
    if function is None or any(inner.op_type in _CONTROL_FLOW for inner in function.node):
        return ()
    names = _names(node, function)
    values = _attributes(node, graph.opset, function)
    return tuple(_inner_node(inner, names, values, f"{node.name}/{index}") for index, inner in enumerate(function.node))


def _function(node: Node, graph: Graph) -> Any:
    """Return the newest definition that the model's opset allows; None if there is none."""
    try:
        schema: Any = defs.get_schema(node.operator, graph.opset, "")
    except defs.SchemaError:
        return None
    if schema.deprecated:
        return None
    if versions := [version for version in schema.function_opset_versions if version <= graph.opset]:
        return _parsed(schema.get_function_with_opset_version(max(versions)))
    if versions := [version for version in schema.context_dependent_function_opset_versions if version <= graph.opset]:
        types = [_type_bytes(name, graph) for name in node.inputs]
        content = node_proto(node, graph.opset).SerializeToString()
        return _parsed(schema.get_context_dependent_function_with_opset_version(max(versions), content, types))
    return None


def _parsed(content: bytes) -> Any:
    function = onnx.FunctionProto()
    function.ParseFromString(content)
    return function if function.node else None


def _type_bytes(name: str, graph: Graph) -> bytes:
    if not name:
        return bytes(onnx.TypeProto().SerializeToString())
    return bytes(value_proto(name, _type(name, graph.types, graph.constants)).type.SerializeToString())


def _type(name: str, types: Mapping[str, TensorType], constants: Mapping[str, Array]) -> TensorType:
    if name in constants:
        return TensorType(constants[name].shape, constants[name].dtype.name)
    if name not in types:
        raise UnsupportedModelError(f"the shape of tensor '{name}' depends on data or cannot be inferred")
    return types[name]


def _names(node: Node, function: Any) -> dict[str, str]:
    """Return the names in the graph of the body's inputs and outputs; a missing optional one is an empty string."""
    names = dict.fromkeys(function.input, "")
    names.update(zip(function.input, node.inputs, strict=False))
    names.update((formal, name) for formal, name in zip(function.output, node.outputs, strict=False) if name)
    inside = [name for inner in function.node for name in inner.output]
    return {"": "", **{name: f"{node.outputs[0]}/{name}" for name in inside}, **names}


def _attributes(node: Node, opset: int, function: Any) -> dict[str, Any]:
    """Return the values that the body's attributes refer to: the node's, the function's defaults, the operator's."""
    known = defs.get_schema(node.operator, opset, "").attributes
    defaults = {name: item.default_value for name, item in known.items() if item.default_value.name}
    protos = {**defaults, **{item.name: item for item in function.attribute_proto}}
    return {**protos, **{item.name: item for item in node_proto(node, opset).attribute}}


def _inner_node(inner: Any, names: Mapping[str, str], values: Mapping[str, Any], name: str) -> Node:
    attributes = {}
    for item in inner.attribute:
        if not item.ref_attr_name:
            attributes[item.name] = helper.get_attribute_value(item)
        elif item.ref_attr_name in values:
            attributes[item.name] = helper.get_attribute_value(values[item.ref_attr_name])
    inputs, outputs = (tuple(names[each] for each in side) for side in (inner.input, inner.output))
    return Node(name, inner.op_type, inputs, outputs, attributes)


def _infer(node: Node, body: tuple[Node, ...], types: Mapping[str, TensorType], graph: Graph) -> dict[str, TensorType]:
    """Return the types inside of a body."""
    given = {name: _type(name, types, graph.constants) for name in node.inputs if name}
    small = {
        name: graph.constants[name]
        for name in given
        if name in graph.constants and graph.constants[name].size <= _MOST_CONSTANT_ELEMENTS
    }
    inputs = {name: kind for name, kind in given.items() if name not in small}
    protos = [node_proto(inner, graph.opset) for inner in body]
    model = model_proto(protos, inputs, {name: types.get(name) for name in node.outputs if name}, small, graph.opset)
    try:
        model = infer_shapes(model, strict=False)
    except shape_inference.InferenceError as error:
        raise node.unsupported(f"its definition by simpler operators does not fit: {error}") from error
    return tensor_types([*model.graph.value_info, *model.graph.output])
