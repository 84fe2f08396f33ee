"""Models under latency targets beside Triton: `python -m benchmarks.serving`."""
