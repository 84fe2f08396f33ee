"""Prometheus metrics: Triton's names, and ours beside them (docs/metrics.md)."""
