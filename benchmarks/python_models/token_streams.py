"""Streams of a decoupled Python model: how fast many responses come, and tokens beside another busy model.

Gangway and Triton serve the same files on two cores, and take turns. First `execute` sends many responses, which a
client of grpcio and one of tritonclient take. Then a thread of the model's own makes tokens, as engines of language
models do, alone and while clients keep both cores busy with another Python model.
"""

import argparse
import os
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc as triton

from benchmarks.peers.triton_server import triton_serving
from gangway.clients.connection import SERVICE
from gangway.protos import grpc_service_pb2 as pb
from testing.fetch.triton import fetch
from testing.fetching import FetchError
from testing.live_server import live_server
from testing.load import raw_channel, running
from testing.report import Report, Row, option_parser, start_report

CORES, CLIENTS = 2, 4
TOKEN_S = 0.01  # of computing
TIMEOUT_S = 120
RATE_AT_LEAST, TIME_AT_MOST = 1.0, 1.5  # times Triton's
SENDS = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(int(request.inputs()[0].as_numpy()[0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([number], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
COMPUTES = """
import queue, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils


def compute(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class TritonPythonModel:
"""
ENGINE = f"""{COMPUTES}
    def initialize(self, args):
        self.asked = queue.Queue()
        threading.Thread(target=self.make, daemon=True).start()

    def make(self):
        while True:
            sender, count = self.asked.get()
            for number in range(count):
                compute({TOKEN_S})
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([number], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def execute(self, requests):
        for request in requests:
            self.asked.put((request.get_response_sender(), int(request.inputs()[0].as_numpy()[0])))
"""
BUSY = f"""{COMPUTES}
    def execute(self, requests):
        responses = []
        for request in requests:
            milliseconds = request.inputs()[0].as_numpy()
            compute(milliseconds[0] / 1000)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", milliseconds)]))
        return responses
"""
CONFIG = """
backend: "python"
input { name: "N" data_type: TYPE_INT32 dims: [1] }
output { name: "OUT" data_type: TYPE_INT32 dims: [1] }
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"
MODELS = {
    "sends": (SENDS, DECOUPLED),
    "engine": (ENGINE, DECOUPLED),
    "busy": (BUSY, f"instance_group {{ count: {CORES} kind: KIND_CPU }}"),
}
Way = Callable[[str, int], tuple[float, float]]  # url, responses: seconds to the first and to the last response


@contextmanager
def sides(with_triton: bool) -> Iterator[dict[str, str]]:
    """Serve the models; return the servers' addresses by their names."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name, (code, more) in MODELS.items():
            (folder / name / "1").mkdir(parents=True)
            (folder / name / "1" / "model.py").write_text(code)
            (folder / name / "config.pbtxt").write_text(CONFIG + more)
        found = {"gangway": stack.enter_context(live_server(folder)).url}
        if with_triton:
            found["triton"] = stack.enter_context(triton_serving(folder)).url
        yield found


def input_of(number: int) -> list[triton.InferInput]:
    """Return the input of each of the models."""
    found = triton.InferInput("N", [1], "INT32")
    found.set_data_from_numpy(np.array([number], np.int32))
    return [found]


def by_grpcio(url: str, count: int) -> tuple[float, float]:
    """Take serialised responses. Raises RuntimeError for an error, or another number of responses."""
    request = pb.ModelInferRequest(model_name="sends", raw_input_contents=[np.array([count], np.int32).tobytes()])
    request.inputs.add(name="N", datatype="INT32", shape=[1])
    over = threading.Event()

    def requests() -> Iterator[bytes]:
        yield request.SerializeToString()
        over.wait(TIMEOUT_S)

    with raw_channel(url) as channel:
        method: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(SERVICE + "ModelStreamInfer")
        begin_s, first_s, answers = time.perf_counter(), 0.0, []
        for answer in method(requests(), timeout=TIMEOUT_S):
            answers.append(answer)
            first_s = first_s or time.perf_counter() - begin_s
            if len(answers) == count:
                break
        last_s = time.perf_counter() - begin_s
        over.set()
    last = pb.ModelStreamInferResponse.FromString(answers[-1])
    if last.error_message or last.infer_response.raw_output_contents[0] != np.int32(count - 1).tobytes():
        raise RuntimeError(f"{url}: the responses are not those of the model: {last}")
    return first_s, last_s


def by_tritonclient(url: str, count: int, name: str = "sends") -> tuple[float, float]:
    """Take responses of a model. Raises the error of one."""
    responses: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
    with triton.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: responses.put((result, error)))
        begin_s, first_s = time.perf_counter(), 0.0
        client.async_stream_infer(name, input_of(count))
        for _ in range(count):
            _, error = responses.get(timeout=TIMEOUT_S)
            if error is not None:
                raise error
            first_s = first_s or time.perf_counter() - begin_s
        last_s = time.perf_counter() - begin_s
        client.stop_stream()
    return first_s, last_s


def by_turns(servers: dict[str, str], way: Way, count: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Ask all servers, again and again."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
    for _ in range(rounds):
        for name, url in servers.items():
            found[name].append(way(url, count))
    return found


def median_s(times: Sequence[tuple[float, float]], place: int = 1) -> float:
    """Return the median of the times to the first (0) or last (1) response."""
    return statistics.median(each[place] for each in times)


def rates(report: Report, servers: dict[str, str], options: argparse.Namespace) -> None:
    """Take many responses on one stream."""
    rows: list[Row] = []
    ways: dict[str, Way] = {"grpcio": by_grpcio, "tritonclient": by_tritonclient}
    for client, way in ways.items():
        found = by_turns(servers, way, options.responses, options.rounds)
        for server, times in found.items():
            rate, first_ms = options.responses / median_s(times), median_s(times, 0) * 1000
            rows.append({"client": client, "server": server, "responses/s": rate, "first ms": first_ms})
        if "triton" in found:
            ratio = median_s(found["triton"]) / median_s(found["gangway"])
            report.goal(f"{client}: responses/s over Triton's", ratio, RATE_AT_LEAST)
    report.table(f"{options.responses} responses on one stream", rows)


@contextmanager
def kept_busy(url: str, milliseconds: int) -> Iterator[None]:
    """Have clients ask the busy model while the block lasts; 0: none."""
    over = threading.Event()

    def ask() -> None:
        with triton.InferenceServerClient(url) as client:
            while not over.is_set():
                client.infer("busy", input_of(milliseconds), client_timeout=TIMEOUT_S)

    with running([ask] * (CLIENTS if milliseconds else 0), over):
        time.sleep(0.5)
        yield


def tokens(report: Report, servers: dict[str, str], options: argparse.Namespace) -> None:
    """Have a thread of a model make tokens, alone and beside another model."""
    rows: list[Row] = []
    for milliseconds in (0, *options.busy_ms):

        def way(url: str, count: int, milliseconds: int = milliseconds) -> tuple[float, float]:
            with kept_busy(url, milliseconds):
                return by_tritonclient(url, count, "engine")

        found = by_turns(servers, way, options.tokens, options.rounds)
        for server, times in found.items():
            row: Row = {"requests beside": f"{milliseconds} ms" if milliseconds else "none", "server": server}
            rows.append({**row, "first ms": median_s(times, 0) * 1000, "all ms": median_s(times) * 1000})
        if "triton" in found:
            ratio = median_s(found["gangway"]) / median_s(found["triton"])
            report.target(f"tokens beside requests of {milliseconds} ms: time over Triton's", ratio, TIME_AT_MOST)
    report.table(f"{options.tokens} tokens of {TOKEN_S * 1000:g} ms of computing each", rows)


def main() -> int:
    """Run the benchmark; return 1 when a target is missed, 2 when there is no Triton to be had."""
    parser = option_parser(__doc__ or "")
    add = parser.add_argument
    add("--parts", default="rates,tokens", type=lambda text: text.split(","), metavar="P[,P]")
    add("--rounds", type=int, default=7, help="of all servers, by turns")
    add("--responses", type=int, default=5000, help="on one stream")
    add("--tokens", type=int, default=30)
    add("--busy-ms", default=[20, 200], type=lambda text: [int(one) for one in text.split(",")], metavar="MS[,MS]")
    add("--no-triton", action="store_true", help="measure Gangway only")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    report = start_report("Streams of a decoupled Python model")
    try:
        if not options.no_triton:
            fetch()
        with sides(not options.no_triton) as servers:
            for name, url in servers.items():
                by_tritonclient(url, 1)
                by_tritonclient(url, 1, "engine")
                with kept_busy(url, 1):
                    print(f"{name} is ready")
            if "rates" in options.parts:
                rates(report, servers, options)
            if "tokens" in options.parts:
                tokens(report, servers, options)
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
