"""KServe's and MLServer's client libraries against our server: `python -m benchmarks.other_clients`."""
