"""One trace live and simulated: `python -m benchmarks.replay`."""
