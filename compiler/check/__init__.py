"""What will serve the parts of ONNX files, found without code."""
