"""Shapes that onnx's own inference leaves open, because they are computed by operators that it does not follow.

What depends on known shapes only is computed and given to inference as constants, until nothing new is found. Shapes
also go backwards through operators that keep them, from outputs whose shape the model declares.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper, shape_inference

from gangway.compiler.evaluate import evaluate_proto
from gangway.compiler.graph import TensorType
from gangway.compiler.protos import opset_of, tensor_types, value_proto
from gangway.compiler.specs import Array

_MOST_ELEMENTS = 256  # of a constant that a shape can depend on
_ROUNDS = 16  # more than any exporter chains up; each finds everything that follows from known shapes at once
_FOLLOWED = {
    *("Abs", "Add", "Cast", "CastLike", "Ceil", "Concat", "Constant", "ConstantOfShape", "Div", "Equal", "Expand"),
    *(
        "Floor",
        "Gather",
        "Identity",
        "Max",
        "Min",
        "Mod",
        "Mul",
        "Neg",
        "Range",
        "ReduceProd",
        "Reshape",
        "Slice",
    ),
    *("Squeeze", "Sub", "Transpose", "Unsqueeze", "Where"),
}
_KEEP_SHAPE = {"Sqrt", "Log", "Exp", "Abs", "Neg", "Cast", "CastLike", "Identity", "Reciprocal"}


def infer_shapes(model: Any, strict: bool = True) -> Any:
    """Return the model with all types that can be known. Raises shape_inference.InferenceError if it contradicts."""
    result = shape_inference.infer_shapes(model, check_type=True, strict_mode=strict, data_prop=True)
    if not any(_open(result)):
        return result
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    folded: dict[str, Array] = {}
    for _ in range(_ROUNDS):
        found = _fold(probe, tensor_types([*result.graph.input, *result.graph.value_info, *result.graph.output]))
        folded |= found
        if not _go_back(probe, result) and not found:
            break
        result = shape_inference.infer_shapes(probe, check_type=True, strict_mode=strict, data_prop=True)
    return _with_types(model, result, folded)


def _open(model: Any) -> Iterator[str]:
    """Outputs of nodes whose shape is not known."""
    known = tensor_types([*model.graph.value_info, *model.graph.output])
    return (name for node in model.graph.node for name in node.output if name and name not in known)


def _fold(model: Any, types: dict[str, TensorType]) -> dict[str, Array]:
    """Turn small nodes that depend on known shapes and constants only into initializers; return those by name.

    Not into Constant nodes: these hold floats only before opset 9.
    """
    values = {tensor.name: tensor for tensor in model.graph.initializer if math.prod(tensor.dims) <= _MOST_ELEMENTS}
    constants = {name: numpy_helper.to_array(tensor) for name, tensor in values.items()}
    opset, folded, kept = opset_of(model), {}, []
    for node in model.graph.node:
        found = _evaluate(node, constants, types, opset)
        if found is not None:
            constants[node.output[0]] = found
        if found is None or node.op_type == "Constant":
            kept.append(node)
        else:
            folded[node.output[0]] = found
    if folded:
        del model.graph.node[:]
        model.graph.node.extend(kept)
        model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in folded.items())
    return folded


def _evaluate(node: Any, constants: dict[str, Array], types: dict[str, TensorType], opset: int) -> Array | None:
    """Return the value of a node if it is known and small."""
    if node.op_type in ("Shape", "Size") and node.input[0] in types:
        shape = np.array(types[node.input[0]].shape, np.int64)
        if node.op_type == "Size":
            return np.array(shape.prod(), np.int64)
        span = {item.name: item.i for item in node.attribute}
        return np.asarray(shape[span.get("start", 0) : span.get("end")])
    if len(node.output) != 1 or any(name and name not in constants for name in node.input):
        return None
    kind = types.get(node.output[0])
    if kind and (node.op_type not in _FOLLOWED or math.prod(kind.shape) > _MOST_ELEMENTS):
        return None
    try:
        array = evaluate_proto(node, constants, opset)[node.output[0]]
    except Exception:  # whatever onnxruntime raises: then this stays unknown, and is missed by whoever needs it
        return None
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


def _with_types(model: Any, inferred: Any, folded: dict[str, Array]) -> Any:
    """Return the model with the types of another one, which has the same tensors, and of those folded there."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    values = {name: value_proto(name, TensorType(array.shape, array.dtype.name)) for name, array in folded.items()}
    found = {**{value.name: value for value in inferred.graph.output}, **values}
    for value in result.graph.output:
        value.CopyFrom(found[value.name])
        values.pop(value.name, None)
    del result.graph.value_info[:]
    result.graph.value_info.extend([*inferred.graph.value_info, *values.values()])
    return result
