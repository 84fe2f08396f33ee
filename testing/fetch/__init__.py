"""Programs that tests and benchmarks need and git does not hold: each module fetches one of them into `tools/`."""
