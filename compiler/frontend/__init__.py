"""From an ONNX file to a simplified graph: import, inference, functions, patterns. Nothing here knows about kernels."""
