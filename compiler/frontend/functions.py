"""Replace operators by their definitions in simpler ones (functions of ONNX, of the model, or of `decompositions.py`).

Those that a model defines are replaced in any case. Whether a node needs that whose definition is ONNX's is the
caller's decision: what a template computes in one piece should stay whole.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import onnx
from onnx import defs, helper, inliner, numpy_helper, shape_inference

from gangway.compiler.errors import UnreadableModelError, UnsupportedModelError
from gangway.compiler.frontend.decompositions import decompose, hide_keys
from gangway.compiler.frontend.graph import Editor, Graph, Node, Rule, TensorType, apply_rule
from gangway.compiler.frontend.shape_inference import (
    infer_shapes,
    model_proto,
    node_proto,
    tensor_types,
    value_proto,
)
from gangway.compiler.frontend.subgraphs import all_nodes
from gangway.compiler.kernels.specs import Array
from gangway.compiler.opsets import OWN_DOMAINS, add_import, domain_of, means_the_same, opset_of

_CONTROL_FLOW = {"If", "Loop", "Scan", "SequenceMap"}
_MOST_NODES = 1 << 17  # of a model that calls functions, which may call functions, and so on
_MOST_CONSTANT_ELEMENTS = 256  # values that shapes may depend on; of larger ones inference is told the type only


def inline_functions(model: Any) -> Any:
    """Return the model with the bodies of its own functions where it calls them.

    Raises UnsupportedModelError if a function imports an operator set in which it is not what it is in the model's,
    by which onnxruntime reads it; UnreadableModelError if the functions call each other without an end.
    """
    if not model.functions:
        return model
    opset = opset_of(model)
    for function in model.functions:
        _check_operators(function, opset or defs.onnx_opset_version())
    bodies, sizes = {_key(function, function.name): function for function in model.functions}, dict[Any, float]()
    if sum(_size(_key(node, node.op_type), bodies, sizes) for node in all_nodes(model.graph.node)) > _MOST_NODES:
        raise UnreadableModelError(f"its functions call each other without an end, or to more than {_MOST_NODES} nodes")
    if not opset:
        opset = max(opset_of(function) for function in model.functions)
        add_import(model, "", opset)
    for function in model.functions:
        for item in function.opset_import:
            item.version = opset if item.domain in OWN_DOMAINS else item.version
            add_import(model, domain_of(item), item.version)
    _write_defaults(model, bodies)
    return inliner.inline_local_functions(model)


def _write_defaults(model: Any, bodies: Mapping[Any, Any]) -> None:
    """Write the values that functions give their attributes to the nodes without them: onnx's inliner forgets those."""
    for node in (*all_nodes(model.graph.node), *(node for each in model.functions for node in all_nodes(each.node))):
        if not (function := bodies.get(_key(node, node.op_type))):
            continue
        given = {item.name for item in node.attribute}
        node.attribute.extend(item for item in function.attribute_proto if item.name not in given)
        for name in sorted({*function.attribute} - given):
            calls = (inner for inner in all_nodes(function.node) if _key(inner, inner.op_type) in bodies)
            if any(item.ref_attr_name == name for inner in calls for item in inner.attribute):
                why = f"function '{function.name}' is called without '{name}', which it passes to another one"
                raise UnsupportedModelError(why)


def _check_operators(function: Any, opset: int) -> None:
    """Compare what a function's operators are by its own imports and by the model's."""
    if function.domain in OWN_DOMAINS:
        raise UnsupportedModelError(f"function '{function.name}' replaces an operator of ONNX")
    own = opset_of(function)
    for node in all_nodes(function.node):
        if node.domain in OWN_DOMAINS and not means_the_same(node.op_type, own, opset):
            raise UnsupportedModelError(
                f"function '{function.name}' imports opset {own}, in which {node.op_type} is another operator than in"
                f" opset {opset}"
            )


def _key(proto: Any, name: str) -> tuple[str, str, str]:
    return proto.domain, name, proto.overload


def _size(key: tuple[str, str, str], bodies: Mapping[Any, Any], sizes: dict[Any, float]) -> float:
    """Return how many nodes a node of this operator becomes."""
    if key not in bodies:
        return 1
    if key not in sizes:
        sizes[key] = math.inf  # as long as it is not known: what calls itself has no end
        sizes[key] = sum(_size(_key(node, node.op_type), bodies, sizes) for node in all_nodes(bodies[key].node))
    return sizes[key]


def expand(graph: Graph, names: Collection[str], constants: Mapping[str, Array] | None = None) -> Graph:
    """Return the graph with the bodies of some nodes in their place, given by their first outputs.

    Nodes without a body stay as they are. Types of what is new are inferred. `constants` are those that are known
    beside the graph's own.
    """
    known = _knowing(graph, constants)

    def define(editor: Editor, node: Node) -> None:
        body = _body(node, known) if node.outputs[0] in names else ()
        if not body:
            return
        editor.types = types = infer_body(node, body, editor.types, graph) | editor.types
        if graph.batched and not graph.apart:
            shapes = editor.wide_shapes
            wide = {name: replace(kind, shape=shapes.get(name, kind.shape)) for name, kind in types.items()}
            found = infer_body(node, body, {name: wide[name] for name in node.inputs if name in wide}, graph)
            editor.wide_shapes = {name: kind.shape for name, kind in found.items()} | shapes
        editor.replace(node.outputs[0], list(body))

    return apply_rule(graph, Rule((), define))


def has_body(node: Node, graph: Graph, constants: Mapping[str, Array] | None = None) -> bool:
    """Whether ONNX defines the node by simpler ones, in straight line."""
    return bool(_body(node, _knowing(graph, constants)))


def _knowing(graph: Graph, constants: Mapping[str, Array] | None) -> Graph:
    return replace(graph, constants={**graph.constants, **constants}) if constants else graph


def _body(node: Node, graph: Graph) -> tuple[Node, ...]:
    """Return the simpler nodes, empty if there are none."""
    if own := decompose(node, graph):
        return own
    function = _function(node, graph)
    if function is None or any(inner.op_type in _CONTROL_FLOW for inner in function.node):
        return ()
    hidden = hide_keys(node, graph) if node.operator == "Attention" else None
    node = replace(node, inputs=(*node.inputs[:3], hidden[-1].outputs[0], *node.inputs[4:])) if hidden else node
    names = _names(node, function)
    values = _attributes(node, graph.opset, function)
    inner = (_inner_node(inner, names, values, f"{node.name}/{index}") for index, inner in enumerate(function.node))
    return *(hidden or ()), *inner


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


def infer_body(
    node: Node, body: tuple[Node, ...], types: Mapping[str, TensorType], graph: Graph
) -> dict[str, TensorType]:
    """Return the types of what a node's body computes. Raises UnsupportedModelError if the body does not fit."""
    given = {name: _type(name, types, graph.constants) for name in node.inputs if name}
    small = {
        name: graph.constants[name]
        for name in given
        if name in graph.constants and graph.constants[name].size <= _MOST_CONSTANT_ELEMENTS
    }
    inputs = {name: kind for name, kind in given.items() if name not in small}
    written = _constants_of(body)  # not as nodes, which hold floats only before opset 9
    outputs = {name: types.get(name) for name in node.outputs if name}
    try:
        protos = [node_proto(inner, graph.opset) for inner in body if inner.outputs[0] not in written]
        model = infer_shapes(model_proto(protos, inputs, outputs, {**small, **written}, graph.opset), strict=False)
    except (shape_inference.InferenceError, defs.SchemaError) as error:
        raise node.unsupported(f"its definition by simpler operators does not fit: {error}") from error
    found = tensor_types([*model.graph.value_info, *model.graph.output])
    return {name: TensorType(value.shape, value.dtype.name) for name, value in written.items()} | found


def _constants_of(body: tuple[Node, ...]) -> dict[str, Array]:
    return {
        node.outputs[0]: numpy_helper.to_array(node.attributes["value"])
        for node in body
        if node.operator == "Constant" and "value" in node.attributes
    }
