#!/usr/bin/env bash
# The maximum of nothing but minus infinity is -inf or -3.4e38, by where the window lies, its rank and its dilations.
#
# A good guess: MaxPool ignores padding, so a window of -inf gives -inf; or a kernel that begins with the lowest finite
# float gives that everywhere.
# Seen instead: both in one answer. Of a padded 4 x 4 image of -inf, the left and the right column are -3.4028235e+38, what
# lies between is -inf, also at the upper and lower edge. Padded 1-D and 3-D windows give the finite number everywhere,
# dilated windows -inf everywhere. So a mask by -inf in front of a MaxPool leaves finite numbers at the edges.
# Seen with: onnxruntime 1.31.1 (CPU, x86-64), onnx 1.23.2, numpy 2.4.6.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.31.1 onnx==1.23.2 numpy==2.4.6
cat > "$folder/look.py" <<'PYTHON'
import numpy as np
import onnxruntime
from onnx import TensorProto, helper

LOWEST = np.finfo(np.float32).min


def pooled(rank, kernel, pad, dilation=1):
    x = np.full((1, 1, *[4] * rank), -np.inf, np.float32)
    node = helper.make_node(
        "MaxPool", ["x"], ["y"], kernel_shape=[kernel] * rank, pads=[pad] * 2 * rank, dilations=[dilation] * rank
    )
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10).SerializeToString()
    return onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0][0, 0]


image = pooled(2, kernel=3, pad=1)
others = {
    "2-D, no padding": pooled(2, kernel=3, pad=0),
    "2-D, dilated": pooled(2, kernel=2, pad=1, dilation=2),
    "1-D": pooled(1, kernel=3, pad=1),
    "3-D": pooled(3, kernel=3, pad=1),
}
print(image)
for name, values in others.items():
    print(f"{name}: {np.unique(values)}")
assert (image[:, [0, 3]] == LOWEST).all() and (image[:, 1:3] == -np.inf).all()
assert all((others[name] == -np.inf).all() for name in ("2-D, no padding", "2-D, dilated"))
assert all((others[name] == LOWEST).all() for name in ("1-D", "3-D"))
PYTHON
"$folder/venv/bin/python" "$folder/look.py"
