"""The front end over gRPC beside its peers: `python -m benchmarks.frontend`."""
