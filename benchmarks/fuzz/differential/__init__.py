"""Models of one operator, drawn at random, here and in onnxruntime: `python -m benchmarks.fuzz.differential`."""
