"""Container images, built and run, for tests and benchmarks."""
