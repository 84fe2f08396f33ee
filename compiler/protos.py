"""Nodes and tensor types as ONNX's own messages, for what onnx and TVM do with single nodes."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from onnx import defs, helper, numpy_helper

from gangway.compiler.graph import Node, TensorType
from gangway.compiler.specs import Array

OWN_DOMAINS = ("", "ai.onnx")  # of ONNX's own operators
_REDEFINED = {  # opsets that gave an operator another meaning, but neither other inputs nor other attributes
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), (13,)),
    "AveragePool": (19,),
    "BatchNormalization": (9, 14),
    "DFT": (20,),
    "Dropout": (10, 12),
    "GroupNormalization": (21,),
    "LpPool": (18,),
    "Resize": (11, 13),
    "RoiAlign": (16,),
    "Scan": (9,),
}


def node_proto(node: Node, opset: int) -> Any:
    """Return the node as a message. Raises defs.SchemaError if this opset has no such operator."""
    proto = helper.make_node(node.operator, node.inputs, node.outputs, name=node.name)
    known: Any = defs.get_schema(node.operator, opset, "").attributes
    for name, value in node.attributes.items():
        kind = known[name].type.value if name in known else None
        proto.attribute.append(helper.make_attribute(name, value, attr_type=kind))
    return proto


def opset_of(model: Any) -> int:
    """Return the version of ONNX's own operators that a model, or a function, imports; 0 if it imports none."""
    return next((opset.version for opset in model.opset_import if opset.domain in OWN_DOMAINS), 0)


def means_the_same(operator: str, opset: int, other: int) -> bool:
    """Whether a node that is valid in two operator sets computes the same in both."""
    low, high = sorted((opset, other))
    return not any(low < version <= high for version in _REDEFINED.get(operator, ()))


def value_proto(name: str, kind: TensorType) -> Any:
    """Return a typed name."""
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(kind.dtype)), kind.shape)


def model_proto(
    nodes: Iterable[Any],
    inputs: Mapping[str, TensorType],
    outputs: Mapping[str, TensorType | None],
    constants: Mapping[str, Array],
    opset: int,
) -> Any:
    """Return a model of these nodes; outputs without a type are inferred by whoever reads it."""
    graph = helper.make_graph(
        list(nodes),
        "part",
        [value_proto(name, kind) for name, kind in inputs.items()],
        [
            value_proto(name, kind) if kind else helper.make_empty_tensor_value_info(name)
            for name, kind in outputs.items()
        ],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def tensor_types(values: Iterable[Any]) -> dict[str, TensorType]:
    """Return the types that are fully known."""
    types = {}
    for value in values:
        tensor = value.type.tensor_type
        dims = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim]
        if tensor.elem_type and tensor.HasField("shape") and min(dims, default=0) >= 0:
            dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type)).name
            types[value.name] = TensorType(tuple(dims), dtype)
    return types
