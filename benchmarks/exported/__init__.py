"""Small files as today's exporters write them, with random weights: made, checked statically, and compared."""
