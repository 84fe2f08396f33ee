"""Triton's protocol: our own .proto files, wire-compatible with Triton's; the build generates the modules."""
