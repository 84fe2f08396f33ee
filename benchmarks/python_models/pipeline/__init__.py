"""An image from bytes to labels, in Python, ONNX and Python, by Gangway and by Triton from the same files."""
