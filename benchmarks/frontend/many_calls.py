"""How many threads, how much memory and CPU a front end needs for calls that are under way all at once."""

import sys
import tempfile
import time
from pathlib import Path

import grpc

from gangway.protos import grpc_service_pb2 as pb
from testing.live_server import LiveServer, live_server
from testing.load import raw_channel, raw_infer
from testing.processes import cpu_ns, memory_of, threads_of
from testing.report import Row, option_parser, start_report

MODEL = "slow"
CONFIG = """
name: "slow"
backend: "python"
input { name: "INPUT0" data_type: TYPE_FP32 dims: [1] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [1] }
"""
SOURCE = """
import time
import triton_python_backend_utils as utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep({seconds})
        inputs = [utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [utils.InferenceResponse([utils.Tensor("OUTPUT0", values)]) for values in inputs]
"""
THREADS_AT_MOST = 4
PERIOD_S = 0.05
TIMEOUT_S = 120


def write_model(repository: Path, seconds: float) -> None:
    """Write a model that takes so long for a request, and answers them one after another."""
    (repository / MODEL / "1").mkdir(parents=True)
    (repository / MODEL / "config.pbtxt").write_text(CONFIG)
    (repository / MODEL / "1" / "model.py").write_text(SOURCE.format(seconds=seconds))


def crowd(server: LiveServer, calls: int) -> Row:
    """Have so many calls under way until all are answered; return the most that the front end needed meanwhile."""
    (pid,) = server.pids()["front end"]
    request = pb.ModelInferRequest(model_name=MODEL, raw_input_contents=[bytes(4)])
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[1])
    threads, private_bytes = threads_of(pid), memory_of(pid).private_bytes
    begin_ns = cpu_ns(pid)
    with raw_channel(server.url) as channel:
        infer = raw_infer(channel)
        futures = [infer.future(request.SerializeToString(), timeout=TIMEOUT_S) for _ in range(calls)]
        while not all(future.done() for future in futures):
            threads, private_bytes = max(threads, threads_of(pid)), max(private_bytes, memory_of(pid).private_bytes)
            time.sleep(PERIOD_S)
        refused = sum(future.code() is grpc.StatusCode.UNAVAILABLE for future in futures)  # beyond the server's bounds
        failed = sum(future.code() is not grpc.StatusCode.OK for future in futures) - refused
    if failed:
        raise RuntimeError(f"{failed} calls failed")
    return {
        "calls": calls,
        "refused": refused,
        "threads": threads,
        "front end MB": private_bytes / 1e6,
        "front end CPU us a call": (cpu_ns(pid) - begin_ns) / calls / 1e3,
    }


def main() -> int:
    """Measure with one call and with many; return 1 when a target is missed."""
    parser = option_parser(__doc__ or "")
    parser.add_argument("--calls", type=int, default=1000, metavar="N", help="at a time (1000)")
    parser.add_argument("--milliseconds", type=float, default=2.0, help="that the model takes for a call (2)")
    options = parser.parse_args()
    report = start_report("calls under way at once")
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), options.milliseconds / 1000)
        with live_server(folder) as server:
            rows = [crowd(server, calls) for calls in (1, options.calls)]
    report.table("the front end at its most", rows)
    report.target(f"threads at {options.calls} calls", float(rows[-1]["threads"]), THREADS_AT_MOST)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
