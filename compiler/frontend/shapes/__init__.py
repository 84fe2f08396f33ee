"""Shapes beyond what onnx infers: those that onnxruntime computes, and what a request only repeats of them."""
