"""The supervisor: starts every other process, keeps it alive, and ends it in order."""
