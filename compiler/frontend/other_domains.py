"""Replace operators of other domains by their definitions in ONNX's own, before anything else looks at a model.

Those are the operators of ai.onnx.ml, which converters from scikit-learn and its kind write, and of com.microsoft,
which onnxruntime's optimisers write. ONNX's inference knows few of their shapes. So definitions are written from the
inputs on, each as soon as the types of its inputs are known.
"""

from collections.abc import Mapping
from typing import Any

from onnx import defs, helper, numpy_helper, shape_inference

from gangway.compiler.errors import UnsupportedModelError
from gangway.compiler.frontend import (
    contrib_operators,
    ml_operators,
    quantised_operators,
    tree_ensembles,
)
from gangway.compiler.frontend.attention import grouped
from gangway.compiler.frontend.attention import operators as attention_operators
from gangway.compiler.frontend.decompositions import is_defined, write_body
from gangway.compiler.frontend.definitions import einsum, fourier, piecewise, scans
from gangway.compiler.frontend.functions import infer_body
from gangway.compiler.frontend.graph import PRIVATE_DOMAIN, Graph, Node, TensorType
from gangway.compiler.frontend.packed import operators as packed_operators
from gangway.compiler.frontend.shape_inference import (
    evaluate,
    infer_shapes,
    node_proto,
    tensor_types,
    value_proto,
)
from gangway.compiler.kernels.specs import Array
from gangway.compiler.opsets import OWN_DOMAINS, add_import, opset_of

__all__ = [
    "attention_operators",
    "contrib_operators",
    "define_operators",
    "einsum",
    "fourier",
    "grouped",
    "ml_operators",
    "packed_operators",
    "piecewise",
    "quantised_operators",
    "scans",
    "tree_ensembles",
]

_OPSET = 21  # of ONNX's own operators, for a model that imports none
_MOST_CONSTANT_ELEMENTS = 256  # larger constants of definitions are kept apart from the model
_VIEWS = {"Reshape", "Identity"}  # of constants, whose content definitions may read
_WITH_GRAPHS = {"If", "Loop", "Scan"}


def define_operators(model: Any, constants: dict[str, Array], batched: bool) -> None:
    """Replace nodes of other domains in a model, in place; add the large constants of definitions to `constants`.

    `constants` are the model's initializers. Nodes that nothing defines stay. Raises UnsupportedModelError for one that
    its definition does not cover.
    """
    if not any(_domain(node, opset_of(model)) for node in model.graph.node):
        return
    add_import(model, "", _OPSET)
    add_import(model, PRIVATE_DOMAIN, 1)  # of what definitions have; onnx infers the model again and again
    opset = opset_of(model)
    while foreign := [node for node in model.graph.node if _domain(node, opset)]:
        if not _define_known(model, constants, batched, opset):
            first = _read(foreign[0], opset)
            raise first.unsupported("the shape of an input depends on data or cannot be inferred")


def _domain(node: Any, opset: int) -> str:
    """Return the domain whose definition a node gets; empty if it gets none.

    onnxruntime knows a few operators in ONNX's domain that ONNX has added in newer operator sets, or never.
    """
    if node.domain not in OWN_DOMAINS:
        return str(node.domain) if is_defined(node.domain, node.op_type) else ""
    lacks = opset and node.op_type in contrib_operators.IN_ONNX_DOMAIN and not defs.has(node.op_type, opset)
    return contrib_operators.DOMAIN if lacks else ""


def _read(proto: Any, opset: int) -> Node:
    attributes = {item.name: helper.get_attribute_value(item) for item in proto.attribute}
    name = proto.name or next(iter(proto.output), proto.op_type)
    domain = _domain(proto, opset)
    return Node(name, proto.op_type, tuple(proto.input), tuple(proto.output), attributes, domain)


def _define_known(model: Any, constants: dict[str, Array], batched: bool, opset: int) -> bool:
    """Replace the nodes whose inputs' types can be known now; return whether there are any."""
    try:
        inferred = infer_shapes(model, strict=False).graph
    except shape_inference.InferenceError as error:
        raise UnsupportedModelError(f"its types contradict each other: {error}") from error
    types = tensor_types([*inferred.input, *inferred.value_info, *inferred.output])
    known = dict(constants)
    found = tuple(_read(proto, opset) for proto in model.graph.node)
    graph = Graph((), (), batched, found, known, types, opset=opset)
    nodes: list[Any] = []
    changed = False
    for node, proto in zip(found, list(model.graph.node), strict=True):
        if node.operator == "Constant" and "value" in node.attributes:
            known[node.outputs[0]] = numpy_helper.to_array(node.attributes["value"])
        elif node.operator in _VIEWS and not node.domain and all(name in known for name in node.inputs):
            known.update(evaluate(node, known, opset))
        ready = all(name in types or name in known for name in node.inputs if name)
        if node.domain and ready:
            nodes += _defined(node, graph, types, model, constants)
            changed = True
            continue
        if ready and any(name and name not in types and name not in known for name in node.outputs):
            types.update(_types_of(node, graph))
        nodes.append(proto)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return changed


def _defined(
    node: Node, graph: Graph, types: dict[str, TensorType], model: Any, constants: dict[str, Array]
) -> list[Any]:
    """Return the nodes of a definition, as messages; take its constants out, of which large ones become inputs.

    A Constant node holds floats only before opset 9; an initializer holds any type in all of them.
    """
    body = write_body(node, graph)
    types.update(infer_body(node, body, types, graph))
    protos = []
    for inner in body:
        if inner.operator != "Constant":
            protos.append(node_proto(inner, graph.opset))
            continue
        name, tensor = inner.outputs[0], inner.attributes["value"]
        constants[name] = value = numpy_helper.to_array(tensor)
        if value.size > _MOST_CONSTANT_ELEMENTS:
            model.graph.input.append(value_proto(name, TensorType(value.shape, value.dtype.name)))
        else:
            model.graph.initializer.append(numpy_helper.from_array(value, name))
    return protos


def _types_of(node: Node, graph: Graph) -> Mapping[str, TensorType]:
    """Return the types of a node's outputs, as far as those of its inputs say them."""
    if node.domain or node.operator in _WITH_GRAPHS:
        return {}
    try:
        return infer_body(node, (node,), graph.types, graph)
    except UnsupportedModelError:
        return {}
