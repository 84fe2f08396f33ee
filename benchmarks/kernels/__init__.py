"""Kernels beside onnxruntime's and oneDNN's: `python -m benchmarks.kernels`."""
