"""Ways of a request to the server, one client: tensors in the message or in shared memory, ModelInfer or a stream."""

import queue
import statistics
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import grpc
from gangway.clients.connection import SERVICE, Connection
from gangway.clients.timing import server_times
from gangway.protos import grpc_service_pb2 as pb

from benchmarks.live_server import LiveServer, live_server
from benchmarks.load import raw_channel, raw_infer
from benchmarks.processes import cpu_ns
from benchmarks.reference import example_of
from benchmarks.report import Report, Row, add_repository_option, option_parser, start_report
from benchmarks.repository import ensure_zoo, onnx_file

MODELS = {"mlp": 400, "mobilenetv2": 40}  # requests of a slice; 1x16 floats, 1x3x224x224 floats
SERVING = ("front end", "scheduler")
TIMEOUT_S = 10
REGION = "image"

Send = Callable[[], object]  # one request, until its answer is there


@dataclass(frozen=True)
class Slice:
    """A few requests in a row: means. `cpu_us`: of the processes that serve, and of this one."""

    round_trip_ms: float
    compute_ms: float
    cpu_us: Mapping[str, float]


@contextmanager
def region_with(channel: grpc.Channel, contents: bytes) -> Iterator[None]:
    """Have the server know a segment with these contents as REGION."""
    memory = SharedMemory(f"transports-{uuid.uuid4().hex[:12]}", create=True, size=len(contents))
    try:
        memory.buf[: len(contents)] = contents
        register = pb.SystemSharedMemoryRegisterRequest(name=REGION, key=f"/{memory.name}", byte_size=len(contents))
        channel.unary_unary(SERVICE + "SystemSharedMemoryRegister")(register.SerializeToString(), timeout=TIMEOUT_S)
        yield
        channel.unary_unary(SERVICE + "SystemSharedMemoryUnregister")(b"", timeout=TIMEOUT_S)
    finally:
        memory.close()
        memory.unlink()


def in_region(message: bytes) -> bytes:
    """Return the same request with its one input in REGION."""
    request = pb.ModelInferRequest.FromString(message)
    (tensor,), (raw,) = request.inputs, request.raw_input_contents
    tensor.parameters["shared_memory_region"].string_param = REGION
    tensor.parameters["shared_memory_byte_size"].int64_param = len(raw)
    request.ClearField("raw_input_contents")
    return request.SerializeToString()


@contextmanager
def stream_of(channel: grpc.Channel, message: bytes) -> Iterator[Send]:
    """Send requests over one stream."""
    requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    call = channel.stream_stream(SERVICE + "ModelStreamInfer")(iter(requests.get, None))

    def send() -> object:
        requests.put(message)
        return next(call)

    yield send
    requests.put(None)
    call.cancel()


def measure_slice(server: LiveServer, connection: Connection, model: str, send: Send, count: int) -> Slice:
    """Be the only client for so many requests."""
    before_times, before_cpu = server_times(connection.model_statistics(model)), _cpu_ns(server)
    begin_ns = time.monotonic_ns()
    for _ in range(count):
        send()
    elapsed_ns = time.monotonic_ns() - begin_ns
    after_cpu = _cpu_ns(server)
    spent = server_times(connection.model_statistics(model)).since(before_times)
    cpu_us = {role: (after_cpu[role] - before_cpu[role]) / count / 1e3 for role in after_cpu}
    return Slice(elapsed_ns / count / 1e6, spent.mean_ms("compute_infer"), cpu_us)


def _cpu_ns(server: LiveServer) -> dict[str, int]:
    pids = server.pids()
    return {role: sum(map(cpu_ns, pids[role])) for role in SERVING} | {"(client)": time.process_time_ns()}


def row(model: str, way: str, slices: Sequence[Slice]) -> Row:
    """Return medians over the slices."""
    return {
        "model": model,
        "way": way,
        "round trip ms": statistics.median(part.round_trip_ms for part in slices),
        "beyond compute ms": statistics.median(part.round_trip_ms - part.compute_ms for part in slices),
        "CPU us, serving": statistics.median(sum(part.cpu_us[role] for role in SERVING) for part in slices),
        **{role: statistics.median(part.cpu_us[role] for part in slices) for role in (*SERVING, "(client)")},
    }


def measure(server: LiveServer, repository: Path, model: str, rounds: int, count: int) -> list[Row]:
    """Measure all ways of one model; they take turns, so that all of them see the same machine."""
    example = example_of(model, onnx_file(repository, model))
    (raw,) = pb.ModelInferRequest.FromString(example.request).raw_input_contents
    with (
        Connection(server.url, TIMEOUT_S) as connection,
        raw_channel(server.url) as channel,
        region_with(channel, raw),
        stream_of(channel, example.request) as streamed,
        stream_of(channel, in_region(example.request)) as streamed_region,
    ):
        infer, other = raw_infer(channel), in_region(example.request)
        ways: dict[str, Send] = {
            "message": lambda: infer(example.request, timeout=TIMEOUT_S),
            "shared memory": lambda: infer(other, timeout=TIMEOUT_S),
            "message, stream": streamed,
            "shared memory, stream": streamed_region,
        }
        slices: dict[str, list[Slice]] = {way: [] for way in ways}
        for number in range(rounds + 1):
            for way, send in ways.items():
                found = measure_slice(server, connection, model, send, count)
                if number > 0:  # the first one warms up
                    slices[way].append(found)
    return [row(model, way, found) for way, found in slices.items()]


def run(report: Report, repository: Path, rounds: int) -> None:
    """Measure every model."""
    rows: list[Row] = []
    with live_server(repository) as server:
        for model, count in MODELS.items():
            rows += measure(server, repository, model, rounds, count)
    report.table("one client, medians, CPU microseconds per request", rows)
    cost_us = {(str(r["model"]), str(r["way"])): float(r["CPU us, serving"]) for r in rows}
    saved = cost_us["mobilenetv2", "shared memory"] / cost_us["mobilenetv2", "message"]
    report.target("602 KB image: CPU with shared memory, as a share of that with a message", saved, 1.0)


def main() -> int:
    """Run the benchmark; return 1 when a target is missed."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument("--rounds", type=int, default=15, help="slices of each case, taking turns")
    options = parser.parse_args()
    report = start_report("Transports: what a message, a stream and shared memory cost")
    run(report, ensure_zoo(options.repository, list(MODELS)), options.rounds)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
