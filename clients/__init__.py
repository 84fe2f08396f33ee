"""Command-line clients."""
