"""Loading, reloading and unloading models of a running server: what it leaves behind, and what others notice of it."""

import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from gangway.clients.connection import SERVICE
from gangway.protos import grpc_service_pb2 as pb
from testing.live_server import LiveServer, live_server
from testing.load import raw_channel, raw_infer
from testing.reference import example_of
from testing.report import Report, Row, add_repository_option, option_parser, start_report
from testing.repository import ensure_zoo, onnx_file
from testing.resources import resources_of

WATCHED = "mobilenetv2"  # asked all the time, while other models come and go
OTHER = "resnet18"
CYCLED = (WATCHED, "whole")  # compiled, and for onnxruntime
CYCLES, WARM_UP_CYCLES = 50, 5
PERIOD_S = 0.025
PHASE_S = 20.0
CALL_TIMEOUT_S = 600.0
GROWTH_MB = 1.0
RISE = 1.2


class Repository:
    """The RPCs of the model repository."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def load(self, name: str, config: str = "") -> None:
        """Load or reload; return when the model answers."""
        request = pb.RepositoryModelLoadRequest(model_name=name)
        if config:
            request.parameters["config"].string_param = config
        self._call("RepositoryModelLoad", request.SerializeToString())

    def unload(self, name: str) -> None:
        """Unload; return when all of it is given back."""
        self._call("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name=name).SerializeToString())
        while self._state(name) != "UNAVAILABLE":
            time.sleep(0.01)

    def _state(self, name: str) -> str:
        answer = pb.RepositoryIndexResponse.FromString(self._call("RepositoryIndex", b""))
        return next((model.state for model in answer.models if model.name == name), "")

    def _call(self, method: str, message: bytes) -> bytes:
        answer: bytes = self._channel.unary_unary(SERVICE + method)(message, timeout=CALL_TIMEOUT_S)
        return answer


class Watch(threading.Thread):
    """Asks a model at fixed times and notes how long the answers take, in milliseconds."""

    def __init__(self, channel: grpc.Channel, request: bytes) -> None:
        super().__init__(daemon=True)
        self._infer = raw_infer(channel)
        self._request = request
        self._stopping = threading.Event()
        self.latencies_ms: list[float] = []

    def run(self) -> None:
        """Ask until stopped. A time at which the last answer was still under way is left out."""
        due = time.monotonic()
        while not self._stopping.wait(max(0.0, due - time.monotonic())):
            begin = time.monotonic()
            self._infer(self._request, timeout=CALL_TIMEOUT_S)
            now = time.monotonic()
            self.latencies_ms.append((now - begin) * 1e3)
            due = max(due + PERIOD_S, now)

    def stop(self) -> list[float]:
        """Return the latencies."""
        self._stopping.set()
        self.join()
        return self.latencies_ms


def write_whole_model(repository: Path) -> None:
    """Write a model of 16 MB that is left to onnxruntime."""
    path = repository / "whole" / "1" / "model.onnx"
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = np.random.default_rng(0).standard_normal((2048, 2048)).astype(np.float32)
    tensors = [numpy_helper.from_array(weights, "w"), numpy_helper.from_array(np.array([5]), "k")]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 2048])
    outputs = [
        helper.make_tensor_value_info("values", TensorProto.FLOAT, ["N", 5]),
        helper.make_tensor_value_info("indices", TensorProto.INT64, ["N", 5]),
    ]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("TopK", ["y", "k"], ["values", "indices"])]
    graph = helper.make_graph(nodes, "whole", [x], outputs, tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


@contextmanager
def copied(repository: Path) -> Iterator[Path]:
    """Give a repository of one's own with the models, to change them."""
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder)
        for name in (WATCHED, OTHER):
            (own / name).symlink_to((repository / name).resolve())
        write_whole_model(own)
        (own / "changing" / "1").mkdir(parents=True)
        yield own


def new_weights(source: Path, target: Path, number: int) -> None:
    """Write a model again with one weight changed, so that nobody has compiled it before."""
    model = onnx.load(source)
    tensor = next(item for item in model.graph.initializer if item.data_type == TensorProto.FLOAT)
    values = numpy_helper.to_array(tensor).copy()
    values.flat[0] = number / 1000
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    beside = target.with_suffix(".new")
    onnx.save(model, beside)
    beside.rename(target)


def measure_leaks(report: Report, server: LiveServer, repository: Repository, cycles: int) -> None:
    """Load and unload again and again, and compare what the server has before and after."""
    rows: list[Row] = []
    for name in CYCLED:
        for _ in range(WARM_UP_CYCLES):
            _cycle(repository, name)
        before, begin = resources_of(server), time.monotonic()
        for _ in range(cycles):
            _cycle(repository, name)
        seconds, after = (time.monotonic() - begin) / cycles, resources_of(server)
        rows += [{"model": name, "when": "before", **before.row(), "s per cycle": ""}]
        rows += [{"model": name, "when": f"after {cycles}", **after.row(), "s per cycle": seconds}]
        growth_mb = (after.private_bytes - before.private_bytes) / 1e6
        report.target(f"{name}: growth of private memory, MB", growth_mb, GROWTH_MB)
        shared_mb = (after.shared_bytes - before.shared_bytes) / 1e6
        report.target(f"{name}: growth of shared memory, MB", shared_mb, GROWTH_MB)
        report.target(f"{name}: further descriptors", after.descriptors - before.descriptors, 0)
        report.target(f"{name}: further mapped files", after.mappings - before.mappings, 0)
    report.table("load and unload", rows)


def _cycle(repository: Repository, name: str) -> None:
    repository.load(name)
    repository.unload(name)


def measure_others(report: Report, url: str, repository: Repository, folder: Path, seconds: float) -> None:
    """Watch one model while others are loaded, reloaded and compiled."""
    number = iter(range(1, 1_000_000))

    def reload() -> None:
        repository.load(OTHER, json.dumps({"max_batch_size": 1 + next(number) % 8}))

    def compile_and_load() -> None:
        new_weights(onnx_file(folder, WATCHED), onnx_file(folder, "changing"), next(number) + time.time_ns() % 1000)
        repository.load("changing")

    phases: list[tuple[str, Callable[[], None]]] = [
        ("nothing else", lambda: time.sleep(0.1)),
        ("load and unload, compiled", lambda: _cycle(repository, OTHER)),
        ("load and unload, for onnxruntime", lambda: _cycle(repository, "whole")),
        ("reload", reload),
        ("compile, load", compile_and_load),
        ("nothing else, again", lambda: time.sleep(0.1)),
    ]
    request = example_of(WATCHED, onnx_file(folder, WATCHED)).request
    rows: list[Row] = []
    with raw_channel(url) as channel:
        for title, action in phases:
            watch = Watch(channel, request)
            watch.start()
            begin, times = time.monotonic(), 0
            while time.monotonic() < begin + seconds:
                action()
                times += 1
            rows.append(_latency_row(title, times, watch.stop()))
    quiet_ms = max(float(rows[0]["p99 ms"]), float(rows[-1]["p99 ms"]))
    report.table(f"{WATCHED} every {PERIOD_S * 1e3:.0f} ms, while others come and go", rows)
    for row in rows[1:-1]:
        report.target(f"p99, {row['meanwhile']}, over that of a quiet server", float(row["p99 ms"]) / quiet_ms, RISE)


def _latency_row(title: str, times: int, latencies_ms: Sequence[float]) -> Row:
    ordered = np.sort(latencies_ms)
    quantiles = {f"p{q} ms": float(np.percentile(ordered, q)) for q in (50, 95, 99)}
    return {"meanwhile": title, "times": times, "requests": len(ordered), **quantiles, "max ms": float(ordered[-1])}


def main() -> int:
    """Run the benchmark; return 1 when a target is missed."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument("--cycles", type=int, default=CYCLES, help="of load and unload")
    parser.add_argument("--seconds", type=float, default=PHASE_S, help="of each phase")
    options = parser.parse_args()
    report = start_report("Loading and unloading")
    with copied(ensure_zoo(options.repository, (WATCHED, OTHER))) as folder, tempfile.TemporaryDirectory() as cache:
        flags = ["--model-control-mode=explicit", f"--cache-dir={cache}"]
        with live_server(folder, flags) as server, grpc.insecure_channel(server.url) as channel:
            repository = Repository(channel)
            measure_leaks(report, server, repository, options.cycles)
            repository.load(WATCHED)
            repository.load(OTHER)  # compiled now
            repository.unload(OTHER)
            measure_others(report, server.url, repository, folder, options.seconds)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
