"""Batches beside Triton's: `python -m benchmarks.batching` measures latency, saturation, Poisson arrivals and steps."""
