"""Measurements, side by side with peers in one run: `python -m benchmarks.NAME --help`."""
