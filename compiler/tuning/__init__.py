"""Other versions of a model's kernels, and artifacts that hold them. Nothing is measured or decided here."""
