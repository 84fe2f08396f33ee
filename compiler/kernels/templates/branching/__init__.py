"""Templates whose kernels branch by what the numbers are."""
