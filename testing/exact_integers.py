"""onnxruntime as a judge of quantised models: what the file says, on every processor.

Without fusions, QuantizeLinear and DequantizeLinear are computed in float32. Operators that multiply integers are not:
without VNNI their products of uint8 and int8 saturate. So weights become uint8: 128 more, as are their zero points.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from gangway.artifact.onnx_session import open_session

_PLACES = {  # of a weight and its zero point among the inputs
    "MatMulInteger": (1, 3),
    "ConvInteger": (1, 3),
    "QLinearMatMul": (3, 5),
    "QLinearConv": (3, 5),
    "QGemm": (3, 5),
}


def exact_session(path: Path) -> Any:
    """Return a session of the model that computes what its file says, slowly."""
    model = onnx.load(path)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for number, node in enumerate(model.graph.node):
        weight, zero = _PLACES.get(node.op_type, (0, 0))
        if not weight or node.input[weight] not in tensors:
            continue
        weights = numpy_helper.to_array(tensors[node.input[weight]])
        if weights.dtype != np.int8:
            continue
        given = node.input[zero] if len(node.input) > zero else ""
        zeros = numpy_helper.to_array(tensors[given]) if given else np.zeros((), np.int8)
        node.input.extend([""] * (zero + 1 - len(node.input)))
        for place, values in ((weight, weights), (zero, zeros)):
            node.input[place] = f"uint8 {number} {place}"
            shifted = (values.astype(np.int16) + 128).astype(np.uint8)
            model.graph.initializer.append(numpy_helper.from_array(shifted, node.input[place]))
    return open_session(model.SerializeToString(), optimise=False)
