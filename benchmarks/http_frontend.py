"""What HTTP adds to computing: latency of one client beyond compute, CPU per request, requests per second."""

import json
import multiprocessing as mp
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPConnection
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import numpy as np

from gangway.clients.command import server_times
from gangway.clients.connection import ServerConnection
from testing.cost import ROLES, WARM_UP_S, cost_columns, cpu_by_role, run_in_rounds
from testing.fetch.perf_analyzer import BINARY
from testing.live_server import LiveServer, live_server
from testing.load import TOLERANCE, relative_error
from testing.perf_analyzer import closed_loop, run_one
from testing.reference import Example, example_of
from testing.report import Report, Row
from testing.repository import onnx_file

LOADS = (("mlp", 1, False), ("mlp", 1, True), ("mobilenetv2", 1, False), ("mlp", 16, False))  # model, clients, as JSON
DATATYPES = {"float32": "FP32", "int32": "INT32", "int64": "INT64"}
TIMEOUT_S = 30
PERF_ANALYZER_INTERVAL_MS = 1000


@dataclass(frozen=True)
class HttpRequest:
    """One inference, ready to be sent again and again."""

    path: str
    body: bytes
    headers: dict[str, str]

    @classmethod
    def of(cls, model: str, example: Example, as_json: bool) -> "HttpRequest":
        """Return the request for an example, both ways as JSON or both ways as binary data."""
        inputs = []
        for name, values in example.inputs.items():
            kind = DATATYPES[str(values.dtype)]
            how = {"data": values.ravel().tolist()} if as_json else {"parameters": {"binary_data_size": values.nbytes}}
            inputs.append({"name": name, "shape": list(values.shape), "datatype": kind, **how})
        text = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": not as_json}}).encode()
        tensors = b"" if as_json else b"".join(values.tobytes() for values in example.inputs.values())
        headers = {} if as_json else {"Inference-Header-Content-Length": str(len(text))}
        return cls(f"/v2/models/{model}/infer", text + tensors, headers)


@dataclass(frozen=True)
class Counted:
    """What a load process did."""

    latencies_ns: list[int]
    cpu_ns: int
    elapsed_ns: int
    answer: bytes  # the last one


def send(connection: HTTPConnection, request: HttpRequest) -> bytes:
    """Return the body of the answer. Raises RuntimeError unless it is a 200."""
    connection.request("POST", request.path, request.body, request.headers)
    response = connection.getresponse()
    body = response.read()
    if response.status != 200:
        raise RuntimeError(f"{request.path}: {response.status} {body[:200]!r}")
    return body


def run_load(url: str, request: HttpRequest, clients: int, seconds: float, pipe: Pipe) -> None:
    """Be some clients, each with a connection, for some time; send what was counted through the pipe."""
    counted: list[list[int]] = [[] for _ in range(clients)]
    answers: list[bytes] = [b""] * clients
    begin = threading.Barrier(clients + 1)

    def client(number: int) -> None:
        connection = HTTPConnection(url, timeout=TIMEOUT_S)
        send(connection, request)
        begin.wait()
        end_ns = time.monotonic_ns() + int(seconds * 1e9)
        while (start_ns := time.monotonic_ns()) < end_ns:
            answers[number] = send(connection, request)
            counted[number].append(time.monotonic_ns() - start_ns)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    begin.wait()
    pipe.send("running")
    start_ns, start_cpu_ns = time.monotonic_ns(), time.process_time_ns()
    for thread in threads:
        thread.join()
    spent_ns = time.process_time_ns() - start_cpu_ns
    latencies = [latency for mine in counted for latency in mine]
    pipe.send(Counted(latencies, spent_ns, time.monotonic_ns() - start_ns, answers[0]))


def measure(server: LiveServer, request: HttpRequest, clients: int, seconds: float) -> tuple[Counted, dict[str, int]]:
    """Return what clients in a process of their own saw, and CPU nanoseconds of the server by role of process."""
    context = mp.get_context("spawn")
    pipe, child = context.Pipe()
    process = context.Process(target=run_load, args=(server.http_url, request, clients, seconds, child), daemon=True)
    process.start()
    try:
        if not pipe.poll(TIMEOUT_S) or pipe.recv() != "running":
            raise RuntimeError("the load process did not start")
        before = cpu_by_role(server.pids)
        if not pipe.poll(seconds + TIMEOUT_S):
            raise RuntimeError("the load process did not end")
        counted = pipe.recv()
        after = cpu_by_role(server.pids)
    finally:
        process.kill()
        process.join()
    assert isinstance(counted, Counted)
    return counted, {role: after[role] - before[role] for role in after}


def check(example: Example, answer: bytes, as_json: bool) -> None:
    """Raise RuntimeError if the answer's first output is wrong."""
    (name, wanted), *_ = example.outputs.items()
    if as_json:
        got = np.array(json.loads(answer)["outputs"][0]["data"], wanted.dtype).reshape(wanted.shape)
    else:
        got = np.frombuffer(answer[-wanted.nbytes :], wanted.dtype).reshape(wanted.shape)
    if relative_error(got, wanted) > TOLERANCE:
        raise RuntimeError(f"{name} is wrong")


def row_of(
    case: tuple[str, int, bool], found: Sequence[tuple[Counted, dict[str, int]]], compute_ms: Sequence[float]
) -> Row:
    """Return the medians over the stretches. Workers' time includes compute."""
    model, clients, as_json = case
    cpu_us = {role: statistics.median(cpu[role] / len(c.latencies_ns) / 1000 for c, cpu in found) for role in ROLES}
    round_trip_ms = statistics.median(statistics.median(c.latencies_ns) for c, _ in found) / 1e6
    return {
        "model": model,
        "tensors": "JSON" if as_json else "binary",
        "clients": clients,
        "round trip ms": round_trip_ms,
        "beyond compute ms": round_trip_ms - statistics.median(compute_ms),
        "requests/s": statistics.median(len(c.latencies_ns) / c.elapsed_ns * 1e9 for c, _ in found),
        **cost_columns(cpu_us, statistics.median(c.cpu_ns / len(c.latencies_ns) / 1000 for c, _ in found)),
    }


def run(report: Report, repository: Path, rounds: int, seconds: float) -> None:
    """Measure every case; the cases take turns, so that all of them see the same machine."""
    examples = {model: example_of(model, onnx_file(repository, model)) for model, *_ in LOADS}
    found: dict[tuple[str, int, bool], list[tuple[Counted, dict[str, int]]]] = {case: [] for case in LOADS}
    compute_ms: dict[tuple[str, int, bool], list[float]] = {case: [] for case in LOADS}
    with live_server(repository) as server, ServerConnection(server.url, TIMEOUT_S) as connection:
        for number in range(rounds + 1):
            for case in LOADS:
                model, clients, as_json = case
                request = HttpRequest.of(model, examples[model], as_json)
                before = server_times(connection.model_statistics(model))
                counted, cpu = measure(server, request, clients, seconds if number else WARM_UP_S)
                check(examples[model], counted.answer, as_json)
                if number:  # the first round warms up
                    found[case].append((counted, cpu))
                    spent = server_times(connection.model_statistics(model)).since(before)
                    compute_ms[case].append(spent.mean_ms("compute_infer"))
        cases = [(model, clients) for model, clients, as_json in LOADS if not as_json]
        by_perf_analyzer = [perf_analyzer_row(server.http_url, *case) for case in cases if BINARY.exists()]
    report.table("HTTP, medians, CPU microseconds per request", [row_of(c, found[c], compute_ms[c]) for c in LOADS])
    if by_perf_analyzer:
        report.table("the same by perf_analyzer, whose client costs less than ours", by_perf_analyzer)


def perf_analyzer_row(url: str, model: str, clients: int) -> Row:
    """Measure one case with perf_analyzer."""
    mode = f"{clients} clients"
    return run_one(url, model, mode, closed_loop(clients), PERF_ANALYZER_INTERVAL_MS, protocol="http").row()


if __name__ == "__main__":
    sys.exit(run_in_rounds(__doc__, "HTTP front end: what serving over HTTP adds to computing", run, rounds=5))
