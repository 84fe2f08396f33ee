"""ONNX's own node tests: `python -m benchmarks.conformance`."""
