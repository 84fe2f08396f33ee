"""The scheduler's processor time for a request beside `decide`: its rings, tables and application of decisions.

The live scheduler has `model_fcfs`, whose `decide` takes about a microsecond and starts nothing natively. So what its
process uses are whole turns, less that. Clients of a small model in a closed loop: one client makes turns of one event
each, more clients make turns of several. A request is two events, it comes and it ends.
"""

import sys
import tempfile
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.python_models.pipeline.repository import Asked
from benchmarks.scheduling.scheduler_cpu import Stretch, closed_loop
from benchmarks.serving.servers import warm_up, write_repository
from testing.live_server import live_server
from testing.reference import example_of
from testing.report import Row, add_repository_option, option_parser, start_report
from testing.repository import ensure_zoo, onnx_file

MODEL = "mlp"
POLICY = "model_fcfs"
CLIENTS = (1, 2, 4, 8, 16)
EVENTS = 2  # of a request


def main() -> int:
    """Measure; return 0."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument("--turns", type=int, default=5, help="of all numbers of clients (%(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each (%(default)s)")
    options = parser.parse_args()
    report = start_report("the scheduler's turn beside the decision")
    models = ensure_zoo(options.repository, [MODEL])
    example = example_of(MODEL, onnx_file(models, MODEL))
    request = Asked(example.request, dict(example.outputs))
    found: dict[int, list[tuple[float, float, float]]] = {clients: [] for clients in CLIENTS}
    with tempfile.TemporaryDirectory() as folder:
        write_repository(Path(folder), models, {MODEL: None})
        with live_server(Path(folder), [f"--scheduler={POLICY}"]) as server:
            warm_up(server.url, {MODEL: example})
            for _ in range(options.turns):
                for clients in CLIENTS:
                    found[clients].append(of_a_request(closed_loop(server, request, options.seconds, clients)))
    rows: list[Row] = []
    for clients, runs in found.items():
        rate, cpu_us, wakes = (median(values) for values in zip(*runs, strict=True))
        rows.append({"clients": clients, "requests/s": rate, "CPU us a request": cpu_us, "wake-ups a request": wakes})
    report.table(f"{MODEL}, {POLICY}, medians of {options.turns}", rows)
    every = np.array([run for runs in found.values() for run in runs])
    turn_us, request_us = np.polyfit(every[:, 2], every[:, 1], 1).tolist()
    report.table("least squares", [{"turn us": turn_us, "event us": request_us / EVENTS}])
    return report.finish(options.json)


def of_a_request(stretch: Stretch) -> tuple[float, float, float]:
    """Return requests a second, and microseconds and wake-ups of the scheduler for each."""
    count, used = stretch.requests, stretch.used
    return count / stretch.seconds, used.run_ns / 1e3 / count, used.turns / count


if __name__ == "__main__":
    sys.exit(main())
