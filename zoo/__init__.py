"""Example models: true architectures with seeded random weights, written as ONNX files with a config.pbtxt."""
