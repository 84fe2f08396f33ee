"""Compiled models against onnxruntime, and in bf16 against fp32: by their answers, and by their time."""
