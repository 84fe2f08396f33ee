"""Versions: kernels of a model that can be had, and artifacts with several of them. Decides and measures nothing."""
