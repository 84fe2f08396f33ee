"""Traces of single requests: which ones, what is known of them, and where that goes (docs/how-to/traces.md)."""
