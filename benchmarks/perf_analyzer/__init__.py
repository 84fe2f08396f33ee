"""Triton's perf_analyzer against our server: `python -m benchmarks.perf_analyzer`."""
