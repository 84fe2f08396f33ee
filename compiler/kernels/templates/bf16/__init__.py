"""Templates of kernels with products in bfloat16, by vectors and by tiles of AMX."""
