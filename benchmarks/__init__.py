"""Measurements, side by side with peers in one run: `python -m benchmarks.NAME --help`.

A folder is a suite, and has a page of results:

- `front_end`, `kernels`, `batching`, `precision`, `serving`, `simulator`, `many_machines`, `exported`, `faults`,
  `papers`: the page of that name in `docs/measurements`; `scheduling`: its notes; `startup`: its overview.
- `conformance` and `fuzz.differential`: `docs/reference/operators.md`; `differential`: `docs/reference/triton.md`;
  `differences`: `docs/reference/differences.md`.
- `embeddings`: `docs/measurements/serving.md`.
- `packages`: `docs/measurements/packages.md` (`canary`), `docs/how-to/install.md` (`install`).
- `other_clients`, `fuzz`: `docs/reference/clients.md`; `python_models`: `docs/how-to/python-models.md`.

`--json benchmarks/SUITE/results.json` enters the tables of a run there, of which `python -m docs.generate` makes pages.
`peers` has what several suites compare with.
"""

import os

# onnxruntime would start a thread that sends telemetry, and write below the user's home; a peer shall only compute.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
