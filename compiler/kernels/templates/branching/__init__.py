"""Templates whose kernels branch, or find their way, by what the numbers are."""
