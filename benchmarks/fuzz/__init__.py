"""Coverage-guided fuzzing of what reads clients' bytes: `python -m benchmarks.fuzz`."""
