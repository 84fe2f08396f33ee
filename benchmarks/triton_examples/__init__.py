"""Triton's client examples against our server: `python -m benchmarks.triton_examples`."""
