#!/usr/bin/env bash
# With ceil_mode OpenVINO counts what lies beyond the padding, and has windows of nothing: -3.4e38 in a MaxPool's answer.
#
# A good guess: ceil_mode=1 rounds an output's size up, and a window ends where the padding does, as in PyTorch:
# count_include_pad counts padding only, and a window that would begin in the padding at the end is left out.
# Seen instead: the last mean of [1, 2, 3, 4] (kernel 3, stride 2, pads 1 and 1) is 4/3 where onnxruntime and onnx's
# reference have 2; and a MaxPool of two numbers (kernel 2, stride 3, pads 1 and 1) has a second number, the lowest
# float32. The declared shape says so as well, so what follows is of another size.
# Seen with: openvino 2026.4.1, onnxruntime 1.32.0, onnx 1.23.2, numpy 2.4.6.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check openvino==2026.4.1 onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
cat > "$folder/look.py" <<'PYTHON'
import sys

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import openvino
from onnx.reference import ReferenceEvaluator


def answers(pool: str, numbers: list[float]) -> dict[str, object]:
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> g (float[1,1,1,{len(numbers)}] x) => (float[1,1,1,n] y) '
        f"{{ y = {pool}(x) }}"
    )
    onnx.save(model, path := f"{sys.argv[1]}/model.onnx")
    x = np.array(numbers, np.float32).reshape(1, 1, 1, -1)
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return {
        "OpenVINO": compiled([x])[0].flatten(),
        "onnxruntime": session.run(None, {"x": x})[0].flatten(),
        "reference": ReferenceEvaluator(model).run(None, {"x": x})[0].flatten(),
    }


mean = answers(
    "AveragePool<kernel_shape = [1, 3], strides = [1, 2], pads = [0, 1, 0, 1], ceil_mode = 1, count_include_pad = 1>",
    [1, 2, 3, 4],
)
largest = answers("MaxPool<kernel_shape = [1, 2], strides = [1, 3], pads = [0, 1, 0, 1], ceil_mode = 1>", [1, 2])
print(f"AveragePool: {mean}\nMaxPool: {largest}")
np.testing.assert_allclose(mean["OpenVINO"], [1, 3, 4 / 3], rtol=1e-6)
np.testing.assert_array_equal(largest["OpenVINO"], [1, np.finfo(np.float32).min])
for other in ("onnxruntime", "reference"):
    np.testing.assert_allclose(mean[other], [1, 3, 2], rtol=1e-6)
    np.testing.assert_array_equal(largest[other], [1])
PYTHON
"$folder/venv/bin/python" "$folder/look.py" "$folder"
