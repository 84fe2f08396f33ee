"""Kernels over tensors of 8-bit numbers."""
