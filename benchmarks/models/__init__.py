"""Whole models beside onnxruntime and OpenVINO: `python -m benchmarks.models`."""
