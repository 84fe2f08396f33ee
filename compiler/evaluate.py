"""The value of an ONNX node all of whose inputs are constants, by the meaning it has in the model's operator set.

onnxruntime computes it, since that knows every set from 7 on. ONNX's own evaluator knows types that onnxruntime has no
kernels for, such as bfloat16, but follows the newest definition of most operators.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from onnx import defs, helper, numpy_helper

from gangway.compiler.errors import ModelError
from gangway.compiler.graph import Node
from gangway.compiler.protos import means_the_same, node_proto
from gangway.compiler.specs import Array


def evaluate(node: Node, constants: Mapping[str, Array], opset: int) -> dict[str, Array]:
    """Return the outputs of a node whose inputs are all constant. Raises ModelError if it cannot be computed."""
    try:
        return evaluate_proto(node_proto(node, opset), constants, opset)
    except Exception as error:  # whatever onnxruntime and numpy raise on hostile shapes
        message = " ".join(str(error).split())[:300]
        raise ModelError(f"node '{node.name}' ({node.operator}) of constants: {message}") from error


def evaluate_proto(node: Any, constants: Mapping[str, Array], opset: int) -> dict[str, Array]:
    """Return the outputs of a node, as a message, by name. Raises what onnxruntime, onnx and numpy raise."""
    if node.op_type == "Constant" and node.attribute[0].name == "value":
        return {node.output[0]: numpy_helper.to_array(node.attribute[0].t)}
    if node.op_type == "Identity":
        return {node.output[0]: constants[node.input[0]]}  # which may be large
    feeds = {name: constants[name] for name in node.input if name}
    if node.op_type in ("Div", "Mod"):
        _require_quotients(*(constants[name] for name in node.input))
    values = _run(_model_of(node, feeds, opset), feeds, means_the_same(node.op_type, opset, defs.onnx_opset_version()))
    names = [name for name in node.output if name]
    if not all(isinstance(value, np.ndarray | np.generic) for value in values):
        raise ValueError("its outputs are no tensors")
    return {name: np.asarray(value) for name, value in zip(names, values, strict=True)}


def _model_of(node: Any, feeds: Mapping[str, Array], opset: int) -> bytes:
    """Return a model of one node, with inputs of any shape and outputs of whatever type they become."""
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), None)
        for name, value in feeds.items()
    ]
    outputs = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
    graph = helper.make_graph([node], "node", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return bytes(model.SerializeToString())


def _require_quotients(dividends: Array, divisors: Array) -> None:
    """Raise ValueError for integers without a quotient: onnxruntime's process dies of the least one divided by -1."""
    if divisors.dtype.kind not in "iu":
        return
    if not divisors.all():
        raise ValueError("integer division by zero")
    is_least = dividends == np.iinfo(dividends.dtype).min
    if divisors.dtype.kind == "i" and divisors.dtype.itemsize >= 4 and (is_least & (divisors == -1)).any():
        raise ValueError("the least integer divided by -1 is no integer of its type")


def _run(model: bytes, feeds: Mapping[str, Array], newest: bool) -> list[Any]:
    """Return the model's outputs; `newest`: its operator means what the newest definition says."""
    from gangway.artifact.onnx_session import open_session  # noqa: PLC0415 - most models have nothing to fold

    try:
        values: list[Any] = open_session(model, optimised=False).run(None, feeds)
        return values
    except Exception as error:  # onnxruntime's own exceptions have no common base
        if not newest:
            raise
        refusal = error
    from onnx.reference import ReferenceEvaluator  # noqa: PLC0415

    try:
        return list(ReferenceEvaluator(model).run(None, dict(feeds)))
    except Exception:
        raise refusal from None
