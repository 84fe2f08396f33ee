#!/usr/bin/env bash
# OpenVINO's QuantizeLinear adds the zero point before it rounds: with an odd one all ties go to the other neighbour.
#
# A good guess: rounding half to even and adding an integer may change places, since a zero point is a whole number.
# Seen instead: 0.5, 1.5 and 2.5 with zero point 1 are 2, 2 and 4 where onnxruntime and onnx's reference have 1, 3 and 3:
# the sum is rounded, and the sum of an odd number and a half has another even neighbour. With zero point 2 all agree. So
# activations on a grid of halves, as integers times a scale are, differ by one step in half of their numbers.
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

X = np.array([0.5, 1.5, 2.5, 3.5], np.float32)


def answers(zero_point: int) -> dict[str, list[int]]:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[4] x) => (uint8[4] y) { s = Constant<value = float {1}>() '
        f"z = Constant<value = uint8 {{{zero_point}}}>() y = QuantizeLinear(x, s, z) }}"
    )
    onnx.save(model, path := f"{sys.argv[1]}/model.onnx")
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return {
        "OpenVINO": compiled([X])[0].tolist(),
        "onnxruntime": session.run(None, {"x": X})[0].tolist(),
        "reference": ReferenceEvaluator(model).run(None, {"x": X})[0].tolist(),
    }


odd, even = answers(1), answers(2)
print(f"zero point 1: {odd}\nzero point 2: {even}")
assert odd["OpenVINO"] == [2, 2, 4, 4]
assert odd["onnxruntime"] == odd["reference"] == [1, 3, 3, 5]
assert even["OpenVINO"] == even["onnxruntime"] == even["reference"]
PYTHON
"$folder/venv/bin/python" "$folder/look.py" "$folder"
