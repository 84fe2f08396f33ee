"""Where the time of a single request goes: `python -m benchmarks.way`."""
