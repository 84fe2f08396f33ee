#!/usr/bin/env bash
# skl2onnx converts a GaussianProcessClassifier to a file that onnxruntime refuses to open.
#
# A good guess: what a converter supports and writes without an error or a warning, its runtime computes.
# Seen instead: the file has a node Solve of the domain com.microsoft, which onnxruntime does not have, so it refuses the
# file when it opens it. The regressor of the same family, also with its standard deviation, opens.
# Seen with: skl2onnx 1.20.0, scikit-learn 1.9.1, onnx 1.23.2, onnxruntime 1.31.1, Python 3.11.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  skl2onnx==1.20.0 scikit-learn==1.9.1 onnx==1.23.2 onnxruntime==1.31.1
cat > "$folder/look.py" <<'PYTHON'
from importlib.metadata import version

import numpy as np
import onnxruntime
from sklearn.datasets import load_iris
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from skl2onnx import to_onnx

x, kinds = load_iris(return_X_y=True)
x, kinds = x[:100].astype(np.float32), kinds[:100]


def tried(model, options=None):
    file = to_onnx(model.fit(x, kinds), x[:1], options={id(model): options} if options else None)
    foreign = sorted({f"{node.domain}.{node.op_type}" for node in file.graph.node if node.domain == "com.microsoft"})
    try:
        session = onnxruntime.InferenceSession(file.SerializeToString(), providers=["CPUExecutionProvider"])
    except Exception as error:
        return foreign, str(error)
    return foreign, [output.name for output in session.get_outputs()]


print(*(f"{name} {version(name)}" for name in ("skl2onnx", "scikit-learn", "onnx", "onnxruntime")))
classifier = tried(GaussianProcessClassifier())
regressor, deviation = tried(GaussianProcessRegressor()), tried(GaussianProcessRegressor(), {"return_std": True})
print("classifier:", *classifier, "regressor:", *regressor, "with its deviation:", *deviation, sep="\n")
assert classifier[0] == ["com.microsoft.Solve"]
assert "Solve" in classifier[1] and "is not a registered function/op" in classifier[1]
assert isinstance(regressor[1], list) and isinstance(deviation[1], list)
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/look.py" "$folder"
