"""Detectors of ultralytics, by its own `export`, from the networks' descriptions."""

import os
import tempfile

os.environ.update({"YOLO_OFFLINE": "1", "YOLO_AUTOINSTALL": "false", "YOLO_VERBOSE": "false"})

import files
import torch
from files import sizes, tensor
from ultralytics import RTDETR, YOLO

ANY = sizes("B H W", (1, 128, 128), (3, 128, 128), (1, 96, 160), (2, 96, 160))
NETWORKS = {  # name -> description, options of the export
    "yolo11_dynamic": ("yolo11n.yaml", {"dynamic": True}),
    "yolo11": ("yolo11n.yaml", {}),
    "yolo11_four": ("yolo11n.yaml", {"batch": 4}),
    "yolo11_nms": ("yolo11n.yaml", {"nms": True}),
    "yolo11_nms_dynamic": ("yolo11n.yaml", {"nms": True, "dynamic": True}),
    "yolo11_simplified": ("yolo11n.yaml", {"simplify": True, "dynamic": True}),
    "yolo11_seg": ("yolo11n-seg.yaml", {"dynamic": True}),
    "yolo11_pose": ("yolo11n-pose.yaml", {"dynamic": True}),
    "yolo11_pose_half": ("yolo11n-pose.yaml", {"half": True}),
    "yolo11_obb": ("yolo11n-obb.yaml", {"dynamic": True}),
    "yolo11_cls": ("yolo11n-cls.yaml", {"dynamic": True}),
    "yolo26_dynamic": ("yolo26n.yaml", {"dynamic": True}),
    "yolo26": ("yolo26n.yaml", {}),
    "yolo26_seg": ("yolo26n-seg.yaml", {"dynamic": True}),
    "yolo26_pose": ("yolo26n-pose.yaml", {"dynamic": True}),
    "yolov8_dynamic": ("yolov8n.yaml", {"dynamic": True}),
    "yolov5_dynamic": ("yolov5n.yaml", {"dynamic": True}),
    "yolov10_dynamic": ("yolov10n.yaml", {"dynamic": True}),
    "yolo12_dynamic": ("yolo12n.yaml", {"dynamic": True}),
    "rt_detr_dynamic": ("rtdetr-l.yaml", {"dynamic": True}),
    "rt_detr": ("rtdetr-l.yaml", {}),
}


def export(description, options):
    def write(path):
        torch.manual_seed(0)
        network = (RTDETR if description.startswith("rtdetr") else YOLO)(description)
        with tempfile.TemporaryDirectory() as scratch:
            before = os.getcwd()
            os.chdir(scratch)
            try:
                made = network.export(format="onnx", imgsz=128, **{"simplify": False, **options})
                files.moved(os.path.abspath(made), path)
            finally:
                os.chdir(before)

    return write


for name, (description, options) in NETWORKS.items():
    dynamic = options.get("dynamic")
    shape = ("B", 3, "H", "W") if dynamic else (options.get("batch", 1), 3, 128, 128)
    dtype = "float16" if options.get("half") else "float32"
    files.add(name, export(description, options), {"images": tensor(*shape, dtype=dtype, draw="uniform")},
              ANY if dynamic else [{}], 1e-2 if dtype == "float16" else 1e-3)  # fmt: skip
if __name__ == "__main__":
    files.main("ultralytics", ["ultralytics", "torch", "onnxslim"])
