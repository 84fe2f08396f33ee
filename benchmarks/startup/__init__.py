"""From a start to the first answer: `python -m benchmarks.startup`; loading, container images."""
