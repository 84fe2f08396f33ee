#!/usr/bin/env bash
# A YOLO that ultralytics exports with nms=True and dynamic=True finds nothing in all images of a batch but the first.
#
# A good guess: dynamic=True makes the batch a dimension that may be chosen at run time, as it does without nms=True;
# the file states it so. What an image contains does not depend on the images beside it.
# Seen instead: the loop over images is traced for the example of one image. At a batch of three the answer has three
# rows, but the second and third hold zeros only, without an error; each image alone has its detections.
# Seen with: ultralytics 8.4.190, torch 2.15.0, onnx 1.23.2, onnxruntime 1.31.1, Python 3.11. About 4 GB of packages.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-cache-dir \
  ultralytics==8.4.190 torch==2.15.0 onnx==1.23.2 onnxruntime==1.31.1
cat > "$folder/look.py" <<'PYTHON'
import os
import sys
from importlib.metadata import version

os.environ.update(YOLO_OFFLINE="true", YOLO_AUTOINSTALL="false", YOLO_CONFIG_DIR=sys.argv[1])
import numpy as np
import onnxruntime
import torch
from ultralytics import YOLO

torch.manual_seed(0)
model = YOLO("yolo11n.yaml", task="detect")
with torch.no_grad():
    for branch in model.model.model[-1].cv3:  # random weights, which are sure of every box
        branch[-1].bias.fill_(3.0)
path = model.export(format="onnx", nms=True, dynamic=True, imgsz=64, simplify=False, conf=0.25, max_det=20, opset=17)
session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
images = np.random.default_rng(0).random((3, 3, 64, 64), np.float32)


def found(batch):
    return [int((rows[:, 4] > 0).sum()) for rows in session.run(None, {"images": batch})[0]]


together, alone = found(images), [found(images[n : n + 1])[0] for n in range(3)]
print(*(f"{name} {version(name)}" for name in ("ultralytics", "torch", "onnx", "onnxruntime")))
print("input:", session.get_inputs()[0].shape)
print("detections of three images together:", together, "each alone:", alone)
assert session.get_inputs()[0].shape[0] == "batch"
assert together[0] == alone[0] and together[1:] == [0, 0] and min(alone) > 0
PYTHON
cd "$folder" && "$folder/venv/bin/python" -W ignore "$folder/look.py" "$folder"
