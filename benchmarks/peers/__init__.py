"""Engines and servers that benchmarks compare with."""
