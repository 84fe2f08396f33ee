"""Templates of kernels whose weights stay integers in memory."""
