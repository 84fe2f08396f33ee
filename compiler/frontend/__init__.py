"""From an ONNX file to a simplified graph: import, inference, functions, patterns, and the check of the batch."""
