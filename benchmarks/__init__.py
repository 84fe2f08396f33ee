"""Measurements, side by side with peers in one run: `python -m benchmarks.NAME --help`."""

import os

# onnxruntime would start a thread that sends telemetry, and write below the user's home; a peer shall only compute.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
