"""The simulator beside live servers: `python -m benchmarks.simulator.replay`, and what its numbers rest on."""
