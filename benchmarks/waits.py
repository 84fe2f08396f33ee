"""Python models that wait, in all their instances, beside an ONNX model with a latency target; what a switch costs.

Each model waits for half a second of a request, in a way of its own, and is kept busy by more clients than it has
instances. The ONNX model gets requests at a modest rate, alone and beside each of them.
"""

import argparse
import http.server
import statistics
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton

from benchmarks.serving.servers import warm_up, write_repository
from gangway.clients.open_loop import drive
from gangway.workload.arrivals import Arrivals
from gangway.workload.outcomes import summarise
from testing.isolated import Reference
from testing.live_server import LiveServer, live_server
from testing.load import running
from testing.processes import cpu_ns, descendants_of
from testing.reference import Example, example_of
from testing.report import Report, Row, add_repository_option, option_parser, start_report
from testing.repository import ensure_profiles, ensure_zoo, onnx_file

INSTANCES, CLIENTS = 2, 4
WAIT_S = 0.5
TARGET_TIMES = 3  # of the other model's isolated latency
IN_TIME_AT_LEAST = 0.99  # of what is in time without the waits
SWITCH_US_AT_MOST = 200
WARM_UP_S = 0.5
REQUESTS = 50  # of each kind, for the cost of a switch
BOTH = "leave, take again, answer"
COMPUTES = "alternating"  # half of the time, so that it keeps its core
WAYS = {
    "sleep": "time.sleep(WAIT)",
    "fetch": "urllib.request.urlopen(URL).read()",
    "child": "subprocess.run(['sleep', 'WAIT'])",
    "lock": "lock = threading.Lock(); lock.acquire(); lock.acquire(timeout=WAIT)",
    "threads": "list(ThreadPoolExecutor(4).map(time.sleep, [WAIT] * 4))",
    "processes": "list(self.processes.map(time.sleep, [WAIT] * 2))",
    "coroutine": "asyncio.run(asyncio.sleep(WAIT))",
    COMPUTES: "[(spin(.001), time.sleep(.001)) for _ in range(int(WAIT * 500))]",
}
CODE = """
import asyncio, subprocess, threading, time, urllib.request
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
import triton_python_backend_utils as pb_utils


def spin(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class TritonPythonModel:
    def initialize(self, args):
        self.processes = ProcessPoolExecutor(2)

    def execute(self, requests):
        wait, compute = map(float, requests[0].inputs()[0].as_numpy())
        WAY
        spin(compute)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""
CONFIG = f"""
backend: "python"
input {{ name: "x" data_type: TYPE_FP32 dims: [2] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [2] }}
instance_group {{ count: {INSTANCES} kind: KIND_CPU }}
"""


class SlowAnswer(http.server.BaseHTTPRequestHandler):
    """Answers after half a second."""

    def do_GET(self) -> None:
        """Answer."""
        time.sleep(WAIT_S)
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def slow_server() -> Iterator[str]:
    """Serve what is slow; return its URL."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), SlowAnswer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    thread.join()
    server.server_close()


def write_model(repository: Path, name: str, way: str) -> None:
    """Write a Python model."""
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(CODE.replace("WAY", textwrap.dedent(way)))
    (folder.parent / "config.pbtxt").write_text(CONFIG)


def ask(client: triton.InferenceServerClient, name: str, wait_s: float = 0, compute_s: float = 0) -> None:
    """Have a model wait and compute."""
    x = triton.InferInput("x", [2], "FP32")
    x.set_data_from_numpy(np.array([wait_s, compute_s], np.float32))
    client.infer(name, [x])


def tenant_row(server: LiveServer, options: argparse.Namespace, tenant: Example, target_us: float) -> dict[str, float]:
    """Ask the ONNX model at random times, each time at the same ones. Raises RuntimeError for errors."""
    count = int(options.rate * options.seconds)
    times_us = np.cumsum(np.random.default_rng(1).exponential(1e6 / options.rate, count))
    arrivals = Arrivals(times_us + WARM_UP_S * 1e6, np.zeros(count, dtype=np.int64))
    outcomes = drive(server.url, {options.tenant: tenant.request}, arrivals).outcomes
    total = summarise(outcomes, {"target": [target_us]}).total
    if not outcomes.answered.all() or total.satisfied["target"] is None or total.p99_us is None:
        raise RuntimeError(f"{options.tenant} was not always answered")
    return {"in time": total.satisfied["target"], "p99 ms": total.p99_us / 1000}


def beside(server: LiveServer, name: str, options: argparse.Namespace, tenant: Example, target_us: float) -> Row:
    """Ask the ONNX model while clients keep all instances of a Python model busy."""
    over, count = threading.Event(), [0] * CLIENTS

    def keep_asking(number: int) -> None:
        with triton.InferenceServerClient(server.url) as client:
            while not over.is_set():
                ask(client, name)
                count[number] += 1

    loops = [lambda number=number: keep_asking(number) for number in range(CLIENTS)]
    with running(loops, over):
        begin_s, begin_ns = time.monotonic(), cpu_of(server)
        row = tenant_row(server, options, tenant, target_us)
        rate = sum(count) / (time.monotonic() - begin_s)
        cores = (cpu_of(server) - begin_ns) / 1e9 / (time.monotonic() - begin_s)
    return {"beside": name, **row, "its requests/s": rate, "cores in use": cores}


def cpu_of(server: LiveServer) -> int:
    """Return nanoseconds that all the server's processes have computed."""
    root = server.process.pid
    return sum(map(cpu_ns, [root, *descendants_of(root)]))


def switch_us(server: LiveServer) -> dict[str, float]:
    """Return the CPU microseconds of all processes that a wait takes, by what follows after it."""
    kinds = {"no wait": (0.0, 0.0), "leave": (0.03, 0.0), "compute": (0.0, 0.02), "leave, take again": (0.03, 0.02)}
    found: dict[str, list[float]] = {kind: [] for kind in (*kinds, "idle")}
    with triton.InferenceServerClient(server.url) as client:
        for _ in range(REQUESTS):
            for kind, (wait_s, compute_s) in kinds.items():
                begin_ns = cpu_of(server)
                ask(client, "waits", wait_s, compute_s)
                found[kind].append((cpu_of(server) - begin_ns) / 1e3)
            begin_ns = cpu_of(server)
            time.sleep(0.03)
            found["idle"].append((cpu_of(server) - begin_ns) / 1e3)
    us = {kind: statistics.median(values) for kind, values in found.items()}
    return {
        "leave, answer": us["leave"] - us["no wait"] - us["idle"],
        BOTH: us["leave, take again"] - us["compute"] - us["idle"],
    }


def run(report: Report, options: argparse.Namespace) -> None:
    """Serve all models; measure one after the other."""
    models = ensure_zoo(options.repository, [options.tenant])
    ensure_profiles(models, [options.tenant])
    tenant = example_of(options.tenant, onnx_file(models, options.tenant))
    isolated_us = Reference(models, {options.tenant: tenant}).isolated_us([options.tenant])[options.tenant]
    target_us = TARGET_TIMES * isolated_us
    with tempfile.TemporaryDirectory() as folder, slow_server() as url:
        repository = Path(folder)
        write_repository(repository, models, {options.tenant: target_us / 1000})
        for name, way in WAYS.items():
            write_model(repository, name, way.replace("WAIT", str(WAIT_S)).replace("URL", repr(url)))
        write_model(repository, "waits", "time.sleep(wait)")
        with live_server(repository) as server:
            warm_up(server.url, {options.tenant: tenant})
            alone = tenant_row(server, options, tenant, target_us)
            rows: list[Row] = [{"beside": "-", **alone, "its requests/s": 0, "cores in use": 0}]
            rows += [beside(server, name, options, tenant, target_us) for name in options.ways]
            report.table(f"{options.tenant}, {options.rate:g}/s, target {target_us / 1000:.1f} ms", rows)
            costs = switch_us(server)
    for row in rows[1:]:
        if row["beside"] != COMPUTES:
            share = float(row["in time"]) / float(rows[0]["in time"])
            report.goal(f"in time beside {row['beside']}, over alone", share, IN_TIME_AT_LEAST)
    report.table("CPU us of a wait", [{"wait": what, "us": us} for what, us in costs.items()])
    report.target("a switch: CPU us, half of leaving and taking again", costs[BOTH] / 2, SWITCH_US_AT_MOST)


def main() -> int:
    """Run the benchmark; return 1 when a target is missed."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    add = parser.add_argument
    add("--ways", default=",".join(WAYS), type=lambda text: text.split(","), metavar="W[,W]")
    add("--tenant", default="googlenet", help="the ONNX model, of the zoo")
    add("--rate", type=float, default=20.0, help="of its requests, per second")
    add("--seconds", type=float, default=8.0, help="of these, beside each model")
    options = parser.parse_args()
    report = start_report("Python models that wait")
    run(report, options)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
