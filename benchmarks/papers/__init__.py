"""Studies of the four papers: `python -m benchmarks.papers NAME -o OUT` draws their figures beside our numbers."""
