"""Definitions of operators in simpler ones, by kind: see `decompositions.py`."""
