"""Measurements of models and machines: profiles, tunings, reports. The server starts them as processes."""
