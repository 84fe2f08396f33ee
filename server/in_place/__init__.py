"""Clients' shared memory in place: workers map it, and kernels read inputs from it and write outputs to it."""
