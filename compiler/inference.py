"""Shapes that onnx's own inference leaves open, because they are computed by operators that it does not follow.

What depends on known shapes only is computed and given to inference as constants, until nothing new is found. Shapes
also go backwards through operators that keep them, from outputs whose shape the model declares.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from gangway.compiler.graph import TensorType
from gangway.compiler.protos import tensor_types, value_proto
from gangway.compiler.specs import Array
from onnx import helper, numpy_helper, shape_inference
from onnx.reference import ReferenceEvaluator

_MOST_ELEMENTS = 256  # of a constant that a shape can depend on
_ROUNDS = 16  # more than any exporter chains up; each finds everything that follows from known shapes at once
_FOLLOWED = {
    *("Abs", "Add", "Cast", "CastLike", "Ceil", "Concat", "Constant", "ConstantOfShape", "Div", "Equal", "Expand"),
    *("Floor", "Gather", "Identity", "Max", "Min", "Mod", "Mul", "Neg", "Range", "ReduceProd", "Reshape", "Slice"),
    *("Squeeze", "Sub", "Unsqueeze", "Where"),
}
_KEEP_SHAPE = {"Sqrt", "Log", "Exp", "Abs", "Neg", "Cast", "CastLike", "Identity", "Reciprocal"}


def infer_shapes(model: Any, strict: bool = True) -> Any:
    """Return the model with all types that can be known. Raises shape_inference.InferenceError if it contradicts."""
    result = shape_inference.infer_shapes(model, check_type=True, strict_mode=strict, data_prop=True)
    if not any(_open(result)):
        return result
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    for _ in range(_ROUNDS):
        changed = _fold(probe, tensor_types([*result.graph.input, *result.graph.value_info, *result.graph.output]))
        changed |= _go_back(probe, result)
        if not changed:
            break
        result = shape_inference.infer_shapes(probe, check_type=True, strict_mode=strict, data_prop=True)
    return _with_types(model, result)


def _open(model: Any) -> Iterator[str]:
    """Outputs of nodes whose shape is not known."""
    known = tensor_types([*model.graph.value_info, *model.graph.output])
    return (name for node in model.graph.node for name in node.output if name and name not in known)


def _fold(model: Any, types: dict[str, TensorType]) -> bool:
    """Turn small nodes that depend on known shapes and constants only into Constants; return whether there were any."""
    values = {tensor.name: tensor for tensor in model.graph.initializer if math.prod(tensor.dims) <= _MOST_ELEMENTS}
    constants = {name: numpy_helper.to_array(tensor) for name, tensor in values.items()}
    changed = False
    for node in model.graph.node:
        found = _evaluate(node, constants, types)
        if found is None:
            continue
        constants[node.output[0]] = found
        if node.op_type != "Constant":
            constant = helper.make_node("Constant", [], [node.output[0]], value=numpy_helper.from_array(found))
            node.CopyFrom(constant)
            changed = True
    return changed


def _evaluate(node: Any, constants: dict[str, Array], types: dict[str, TensorType]) -> Array | None:
    """Return the value of a node if it is known and small."""
    if node.op_type in ("Shape", "Size") and node.input[0] in types:
        shape = np.array(types[node.input[0]].shape, np.int64)
        if node.op_type == "Size":
            return np.array(shape.prod(), np.int64)
        span = {item.name: item.i for item in node.attribute}
        return np.asarray(shape[span.get("start", 0) : span.get("end")])
    if node.op_type not in _FOLLOWED or any(name and name not in constants for name in node.input):
        return None
    if (
        len(node.output) != 1
        or math.prod(types[node.output[0]].shape if node.output[0] in types else ()) > _MOST_ELEMENTS
    ):
        return None
    try:
        outputs: Any = ReferenceEvaluator(node).run(None, {name: constants[name] for name in node.input if name})
    except Exception:  # whatever numpy raises: then this stays unknown, and is missed by whoever needs it
        return None
    array = np.asarray(outputs[0])
    return array if array.size <= _MOST_ELEMENTS else None


def _go_back(model: Any, inferred: Any) -> bool:
    """Declare the shapes of inputs of shape-keeping operators with known outputs; return whether there were any."""
    known = tensor_types([*inferred.graph.input, *inferred.graph.value_info, *inferred.graph.output])
    elements = {value.name: value.type.tensor_type.elem_type for value in inferred.graph.value_info}
    declared = {value.name for value in model.graph.value_info}
    initial = {tensor.name for tensor in model.graph.initializer}
    changed = False
    for node in reversed(model.graph.node):
        source = node.input[0] if node.op_type in _KEEP_SHAPE else ""
        element = elements.get(source, 0)
        if not element or source in known or source in declared or source in initial or node.output[0] not in known:
            continue
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(element)).name
        known[source] = TensorType(known[node.output[0]].shape, dtype)
        model.graph.value_info.append(value_proto(source, known[source]))
        changed = True
    return changed


def _with_types(model: Any, inferred: Any) -> Any:
    """Return the model with the types of another one, which has the same tensors."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    del result.graph.value_info[:]
    result.graph.value_info.extend(inferred.graph.value_info)
    found = {value.name: value for value in inferred.graph.output}
    for value in result.graph.output:
        value.CopyFrom(found[value.name])
    return result
