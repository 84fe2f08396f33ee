"""ZipMap: what converters from scikit-learn put behind a classifier, so that each row's scores become a map.

A request cannot hold a sequence of maps. So the operator is left out, and its output is the tensor of scores that it
was given, [rows, classes] in the order of the labels.
"""

from typing import Any

from onnx import TensorProto, helper

_OPSET = 13  # of ONNX's own operators, for a model that imports none


def outputs_of_zip_maps(model: Any) -> list[str]:
    """Return the outputs of a model that a ZipMap makes."""
    made = {node.output[0] for node in model.graph.node if _is_zip_map(node)}
    return [value.name for value in model.graph.output if value.name in made]


def drop_zip_maps(model: Any) -> None:
    """Replace each ZipMap whose result is an output, in place."""
    names = outputs_of_zip_maps(model)
    if names and not any(item.domain in ("", "ai.onnx") for item in model.opset_import):
        model.opset_import.append(helper.make_opsetid("", _OPSET))
    for node in model.graph.node:
        if node.output[0] not in names:
            continue
        classes = max((len(item.ints) or len(item.strings) for item in node.attribute), default=0)
        (output,) = (value for value in model.graph.output if value.name == node.output[0])
        output.CopyFrom(helper.make_tensor_value_info(output.name, TensorProto.FLOAT, [None, classes]))
        rows = output.type.tensor_type.shape.dim[0]
        for value in model.graph.input:
            dims = value.type.tensor_type.shape.dim
            rows.CopyFrom(dims[0] if len(dims) > 1 else rows)
        node.CopyFrom(helper.make_node("Identity", node.input[:1], node.output, name=node.name))


def _is_zip_map(node: Any) -> bool:
    return bool(node.op_type == "ZipMap" and node.domain == "ai.onnx.ml")
