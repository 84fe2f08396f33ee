"""Multi-version compilation after VELTAIR's Algorithm 1: what is tried, measured, kept (`docs/versions.md`)."""
