"""The same Python models and requests, in Triton and here: `python -m benchmarks.differential`."""
