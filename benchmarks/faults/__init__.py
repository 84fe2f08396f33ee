"""kill -9, limits, hangs, hostile clients and Python models: `python -m benchmarks.faults`."""
