#!/usr/bin/env bash
# onnxmltools converts an XGBRegressor of several targets to a file that predicts the first one, by the trees of all.
#
# A good guess: what a converter takes without an error or a warning predicts what the model predicts, for each target.
# Seen instead: the file declares three targets and has a base value for each, but all leaves are those of target 0. So
# onnxruntime adds up the trees of three targets for the first, and answers 0 for the others, not even their base values.
# The output is declared as one column. A regressor of one target is converted rightly.
# Seen with: onnxmltools 1.16.0, xgboost-cpu 3.2.0, scikit-learn 1.9.1, skl2onnx 1.20.0, onnx 1.23.2, onnxruntime 1.31.1,
# Python 3.11.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  onnxmltools==1.16.0 xgboost-cpu==3.2.0 scikit-learn==1.9.1 skl2onnx==1.20.0 onnx==1.23.2 onnxruntime==1.31.1
cat > "$folder/look.py" <<'PYTHON'
from importlib.metadata import version

import numpy as np
import onnxruntime
from onnx import helper
from onnxmltools import convert_xgboost
from onnxmltools.convert.common.data_types import FloatTensorType
from xgboost import XGBRegressor

x = np.random.default_rng(0).standard_normal((200, 4)).astype(np.float32)
wanted = np.stack([x[:, 0], 10 * x[:, 1], 100 + x[:, 2]], axis=1)
options = onnxruntime.SessionOptions()
options.log_severity_level = 3


def answers(targets):
    model = XGBRegressor(n_estimators=8, max_depth=3).fit(x, wanted[:, :targets])
    file = convert_xgboost(model, initial_types=[("x", FloatTensorType([None, 4]))])
    (trees,) = file.graph.node
    attributes = {each.name: helper.get_attribute_value(each) for each in trees.attribute}
    session = onnxruntime.InferenceSession(file.SerializeToString(), options, providers=["CPUExecutionProvider"])
    answer = session.run(None, {"x": x[:3]})[0]
    predicted = model.predict(x[:3]).reshape(3, targets)
    print(f"{targets} target(s); leaves are of:", sorted(set(attributes["target_ids"])), "base values:",
          attributes["base_values"], "declared:", session.get_outputs()[0].shape)
    print("XGBoost:", predicted, "onnxruntime:", answer, sep="\n")
    return attributes, session.get_outputs()[0].shape, predicted, answer


names = ("onnxmltools", "xgboost-cpu", "scikit-learn", "skl2onnx", "onnx", "onnxruntime")
print(*(f"{name} {version(name)}" for name in names))
_, _, predicted, answer = answers(1)
np.testing.assert_allclose(answer, predicted, rtol=1e-5, atol=1e-5)
attributes, declared, predicted, answer = answers(3)
assert attributes["n_targets"] == len(attributes["base_values"]) == 3
assert set(attributes["target_ids"]) == {0}
assert declared[1] == 1 and answer.shape == (3, 3)
assert not answer[:, 1:].any() and abs(predicted[:, 2] - 100).max() < 5
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/look.py"
