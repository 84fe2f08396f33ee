#!/usr/bin/env bash
# A TreeEnsembleClassifier with weights for both of two classes has label 1 in onnxruntime, whichever class has more.
#
# A good guess: the label is that of `classlabels_int64s` whose class has the largest score, as with three classes.
# Seen instead: scores are right, [0.9, 0.1], and the label is 1, also if the labels are 10 and 20: weights that are all
# positive make any score of the second class above 0 the positive label, which is 1. With weights of both signs it is 1
# or 0. Files that give weights to one class only, as skl2onnx writes them, have their labels. onnx's reference
# evaluator answers 10.
# Seen with: onnxruntime 1.32.0, onnx 1.23.2, numpy 2.4.6.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
cat > "$folder/look.py" <<'PYTHON'
import numpy as np
import onnx
import onnx.parser
import onnxruntime
from onnx.reference import ReferenceEvaluator

X = np.array([[0.5], [0.6]], np.float32)  # one in each leaf


def answers(weights: list[float], class_ids: list[int], labels: list[int]) -> tuple[list[int], list[int], object]:
    count = len(weights)
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 3]>
    g (float[2,1] x) => (int64[2] label, float[2,2] scores) {{
        label, scores = ai.onnx.ml.TreeEnsembleClassifier<
            nodes_treeids = [0, 0, 0], nodes_nodeids = [0, 1, 2], nodes_featureids = [0, 0, 0],
            nodes_values = [0.5, 0.0, 0.0], nodes_modes = ["BRANCH_LEQ", "LEAF", "LEAF"],
            nodes_truenodeids = [1, 0, 0], nodes_falsenodeids = [2, 0, 0], class_treeids = {[0] * count},
            class_nodeids = {[1] * (count // 2) + [2] * (count // 2)}, class_ids = {class_ids},
            class_weights = {weights}, classlabels_int64s = {labels}>(x)
    }}""")
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    label, scores = session.run(None, {"x": X})
    return label.tolist(), ReferenceEvaluator(model).run(["label"], {"x": X})[0].tolist(), scores.tolist()


POSITIVE, SIGNED, BOTH = [0.9, 0.1, 0.3, 0.7], [-1.0, 1.0, 1.0, -1.0], [0, 1, 0, 1]
for labels in ([0, 1], [10, 20]):
    found, reference, scores = answers(POSITIVE, BOTH, labels)
    print(f"labels {labels}, scores {scores}: onnxruntime {found}, onnx's reference {reference}")
    assert found == [1, 1]
    assert reference == labels
found, reference, _ = answers(SIGNED, BOTH, [10, 20])
print(f"weights of both signs: onnxruntime {found}, onnx's reference {reference}")
assert (found, reference) == ([1, 0], [20, 10])
found, _, scores = answers([0.1, 0.7], [0, 0], [10, 20])
print(f"weights of one class: onnxruntime {found}, scores {scores}")
assert found == [10, 20]
PYTHON
"$folder/venv/bin/python" "$folder/look.py"
