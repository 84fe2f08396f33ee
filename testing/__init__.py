"""What several benchmarks, and tests, share: servers, load, processes, references, reports."""
