"""kill -9, limits, hangs and hostile clients: `python -m benchmarks.faults`."""
