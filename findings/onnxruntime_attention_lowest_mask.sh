#!/usr/bin/env bash
# onnxruntime's Attention (opset 23) answers zeros for a mask row of the lowest float32, and the mean one step above it.
#
# A good guess: an additive mask of one number in a whole row changes nothing, since Softmax does not see what is added
# to all. So exporters write "hidden" as the lowest float32, where -inf would give NaN.
# Seen instead: a row of exactly -3.4028235e38 counts as fully hidden, as -inf does: the answer is zeros. The next larger
# float32 gives the mean of the values. onnx's reference evaluator answers the mean for both, and zeros for -inf only.
# Seen with: onnx 1.23.2, onnxruntime 1.31.1, numpy 2.4.6.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnx==1.23.2 onnxruntime==1.31.1 numpy==2.4.6
cat > "$folder/look.py" <<'PYTHON'
import numpy as np
import onnx
import onnxruntime
from onnx.reference import ReferenceEvaluator

model = onnx.parser.parse_model(
    '<ir_version: 10, opset_import: ["": 23]> g (float[1,1,1,2] q, float[1,1,3,2] k, float[1,1,3,2] v, float[1,3] mask)'
    "=> (float[1,1,1,2] y) { y = Attention(q, k, v, mask) }"
)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
reference = ReferenceEvaluator(model)
lowest = np.finfo(np.float32).min
values = np.array([1, 1, 2, 2, 6, 6], np.float32).reshape(1, 1, 3, 2)
keys, query = np.zeros((1, 1, 3, 2), np.float32), np.ones((1, 1, 1, 2), np.float32)
wanted = {lowest: (0.0, 3.0), np.nextafter(lowest, np.float32(0)): (3.0, 3.0), np.float32(-np.inf): (0.0, 0.0)}
for number, expected in wanted.items():
    inputs = {"q": query, "k": keys, "v": values, "mask": np.full((1, 3), number, np.float32)}
    seen = tuple(float(engine.run(None, inputs)[0][0, 0, 0, 0]) for engine in (session, reference))
    print(repr(number), "onnxruntime, reference:", seen)
    assert seen == expected, number
PYTHON
"$folder/venv/bin/python" "$folder/look.py"
# Seen: -3.4028235e+38 (0.0, 3.0); -3.4028233e+38 (3.0, 3.0); -inf (0.0, 0.0).
