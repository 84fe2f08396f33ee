"""Branches and loops that shapes and constants decide on."""
