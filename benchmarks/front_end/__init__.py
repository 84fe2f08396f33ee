"""The front end over gRPC beside its peers: `python -m benchmarks.front_end`."""
