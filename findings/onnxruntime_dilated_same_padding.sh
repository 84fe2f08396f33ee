#!/usr/bin/env bash
# onnxruntime pads pools with auto_pad SAME as if they had no dilations: its session declares 8 x 8 and answers 6 x 6.
#
# A good guess: SAME_UPPER means what ONNX says, an output of ceil(input / stride), so dilations only add padding; and
# a session's declared output shape, if all its dimensions are numbers, is the shape that comes.
# Seen instead: MaxPool, AveragePool and LpPool pad for the kernel without its dilations, and the declared shape, which
# is that of onnx's strict inference, is wrong. Explicit pads give 8 x 8. Conv with the same attributes loads, and is
# refused at each run.
# Seen with: onnxruntime 1.32.0, onnx 1.23.2, numpy 2.4.6.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
cat > "$folder/look.py" <<'PYTHON'
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

onnxruntime.set_default_logger_severity(3)
IMAGE = np.arange(64, dtype=np.float32).reshape(1, 1, 8, 8)
WEIGHT = helper.make_tensor("w", TensorProto.FLOAT, [1, 1, 3, 3], np.ones(9, np.float32))


def session_of(operator: str, **padding: object) -> onnxruntime.InferenceSession:
    inputs = ["x", "w"] if operator == "Conv" else ["x"]
    node = helper.make_node(operator, inputs, ["y"], kernel_shape=[3, 3], dilations=[2, 2], **padding)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, 8, 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1, "height", "width"])
    graph = helper.make_graph([node], "g", [x], [y], [WEIGHT] if operator == "Conv" else [])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def shapes(operator: str, **padding: object) -> tuple[list[int], list[int]]:
    session = session_of(operator, **padding)
    return session.get_outputs()[0].shape, list(session.run(None, {"x": IMAGE})[0].shape)


same = {name: shapes(name, auto_pad="SAME_UPPER") for name in ("MaxPool", "AveragePool", "LpPool")}
explicit = shapes("MaxPool", pads=[2, 2, 2, 2])
for name, (declared, came) in same.items():
    print(f"{name}, SAME_UPPER: declared {declared}, came {came}")
print(f"MaxPool, pads of 2: declared {explicit[0]}, came {explicit[1]}")
convolution = session_of("Conv", auto_pad="SAME_UPPER")
try:
    refused = f"came {list(convolution.run(None, {'x': IMAGE})[0].shape)}"
except Exception as error:
    refused = str(error).rpartition("Status Message: ")[2]
print(f"Conv, SAME_UPPER: loaded, then: {refused}")
assert all(found == ([1, 1, 8, 8], [1, 1, 6, 6]) for found in same.values())
assert explicit == ([1, 1, 8, 8], [1, 1, 8, 8])
assert refused.startswith("Dilation not supported")
PYTHON
"$folder/venv/bin/python" "$folder/look.py"
