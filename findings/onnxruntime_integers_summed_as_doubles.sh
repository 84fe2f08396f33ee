#!/usr/bin/env bash
# onnxruntime's ReduceSum of int64 goes through float64 and saturates; CumSum and Add of the same numbers are exact.
#
# A good guess: sums of int64 are exact modulo 2^64 in every operator, as in numpy.
# Seen instead: ReduceSum of the one number 2^53 + 1 is 2^53; the sum of two halves of the range is the largest int64 and
# does not wrap around. CumSum's last element and Add have the exact numbers. So a token or hash that is reduced over an
# axis of size 1 changes.
# Seen with: onnxruntime 1.31.1 (CPU), opset 17.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.31.1 onnx==1.23.2 numpy
cat > "$folder/look.py" <<'PYTHON'
import numpy as np
import onnx
import onnxruntime

TEXT = """<ir_version: 9, opset_import: ["": 17]>
g (int64[n] x) => (int64[1] total, int64[n] running)
<int64[1] axes = {0}, int64 axis = {0}> {
    total = ReduceSum<keepdims = 1>(x, axes)
    running = CumSum(x, axis)
}"""
model = onnx.parser.parse_model(TEXT)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
most = np.iinfo(np.int64).max
for given in ([2**53 + 1], [2**53 + 1, 2], [most, most]):
    x = np.array(given, np.int64)
    total, running = session.run(None, {"x": x})
    with np.errstate(over="ignore"):
        exact = x.sum()
    print(f"{given}: ReduceSum {total[0]}, CumSum {running[-1]}, numpy {exact}")
    assert running[-1] == exact
    assert total[0] != exact
assert total[0] == most
PYTHON
"$folder/venv/bin/python" "$folder/look.py"
