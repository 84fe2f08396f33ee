"""Where engines answer differently, beside Gangway: `python -m benchmarks.differences`."""
