"""Inputs of one integer that decide what a model computes: which branch of an If, how often a Loop runs, or a shape.

With such a value fixed the rest of the model is static, so a model is compiled for each value as for each size.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from gangway.compiler.errors import UnsupportedModelError
from gangway.compiler.frontend.control_flow.branches import rename
from gangway.compiler.frontend.subgraphs import all_nodes
from gangway.compiler.kernels.specs import Array

_INTEGERS = {onnx.TensorProto.BOOL, onnx.TensorProto.INT32, onnx.TensorProto.INT64}
_DECIDING = {  # which inputs of an operator decide how it continues, or what shape it gives
    "ConstantOfShape": (0,),
    "Expand": (1,),
    "If": (0,),
    "Loop": (0, 1),
    "OneHot": (1,),
    "Pad": (1,),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Resize": (2, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Tile": (1,),
    "TopK": (1,),
}
_SHAPES = {"Shape", "Size"}  # what they give depends on no value


def find_deciding_inputs(model: Any) -> tuple[str, ...]:
    """Return the names of such inputs of an ONNX model."""
    initial = {tensor.name for tensor in model.graph.initializer}
    candidates = [value.name for value in model.graph.input if value.name not in initial and _is_integer(value)]
    if not candidates:
        return ()
    nodes = [*all_nodes(model.graph.node)]
    needed = {
        node.input[index] for node in nodes for index in _DECIDING.get(node.op_type, ()) if index < len(node.input)
    }
    for node in reversed(nodes):  # an inner node comes after the one it is in, and before those that read the outer one
        if node.op_type not in _SHAPES and not needed.isdisjoint(node.output):
            needed.update(node.input)
    return tuple(name for name in candidates if name in needed)


def fix_values(model: Any, values: Mapping[str, int]) -> dict[str, Array]:
    """Let all nodes read these numbers in place of the inputs, which stay; return the constants that they read now.

    Raises UnsupportedModelError for an input that is not one integer, or another number than its type has.
    """
    constants: dict[str, Array] = {}
    for value in model.graph.input:
        if value.name not in values:
            continue
        kind = value.type.tensor_type
        if not _is_integer(value):
            raise UnsupportedModelError(f"input '{value.name}' is not one integer, so it cannot be fixed")
        shape = [dim.dim_value for dim in kind.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
        number = np.array(values[value.name], np.int64).astype(dtype)
        if int(number) != values[value.name]:
            raise UnsupportedModelError(f"input '{value.name}' cannot be {values[value.name]}")
        constants[_fixed(value.name)] = number.reshape(shape)
    if constants:
        rename(model.graph.node, {name: _fixed(name) for name in values})
        model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    return constants


def _fixed(name: str) -> str:
    return f"{name}:value"


def _is_integer(value: Any) -> bool:
    kind = value.type.tensor_type
    fixed = kind.HasField("shape") and all(dim.dim_value == 1 for dim in kind.shape.dim)
    return kind.elem_type in _INTEGERS and fixed
