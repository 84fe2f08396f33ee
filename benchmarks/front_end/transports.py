"""Ways of a request to the server, one client: tensors in messages, in shared memory, in a stream."""

import queue
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import grpc
import onnx
from onnx import TensorProto, helper

from gangway.clients.command import server_times
from gangway.clients.connection import SERVICE, ServerConnection
from gangway.protos import grpc_service_pb2 as pb
from testing.live_server import LiveServer, live_server
from testing.load import raw_channel, raw_infer
from testing.processes import cpu_ns
from testing.reference import example_of
from testing.report import Report, Row, add_repository_option, option_parser, start_report
from testing.repository import ensure_zoo, onnx_file

SERVING = ("front end", "scheduler")
ROLES = (*SERVING, "worker")
TIMEOUT_S = 10
REGION = "tensors"
LARGE = "large_relu"  # a model of ours, beside the zoo's
LARGE_SHAPE = (1, 4, 1024, 1024)  # 16 MiB in and out
ALIGNED, UNALIGNED = 64, 66  # tensors that do not begin at a multiple of 4 bytes are copied

Send = Callable[[], object]  # one request, until its answer is there


@dataclass(frozen=True)
class Case:
    """A model, rows of a request, and requests of a slice. `outputs`: these go to the region, too."""

    model: str
    rows: int
    count: int
    outputs: bool = False

    @property
    def name(self) -> str:
        """The case, for people."""
        return f"{self.model} x{self.rows}" if self.rows > 1 else self.model


CASES = (
    Case("mlp", 1, 400),  # 1x16 floats
    Case("mobilenetv2", 1, 40),  # 1x3x224x224 floats
    Case("mobilenetv2", 8, 8, outputs=True),
    Case(LARGE, 1, 10, outputs=True),
)


@dataclass(frozen=True)
class Slice:
    """A few requests in a row: means. `cpu_us`: of the server's processes, and of this one."""

    round_trip_ms: float
    compute_ms: float
    cpu_us: Mapping[str, float]


def write_large(repository: Path) -> None:
    """Write a model whose tensors are large and whose kernel does next to nothing."""
    path = onnx_file(repository, LARGE)
    path.parent.mkdir(parents=True, exist_ok=True)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, LARGE_SHAPE) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], LARGE, [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, str(path))


@contextmanager
def region_with(channel: grpc.Channel, contents: bytes, size_bytes: int) -> Iterator[None]:
    """Have the server know a segment as REGION, with these contents at ALIGNED, then at UNALIGNED in a second half."""
    memory = SharedMemory(f"transports-{uuid.uuid4().hex[:12]}", create=True, size=2 * size_bytes)
    try:
        assert memory.buf is not None
        for at in (ALIGNED, size_bytes + UNALIGNED):
            memory.buf[at : at + len(contents)] = contents
        register = pb.SystemSharedMemoryRegisterRequest(name=REGION, key=f"/{memory.name}", byte_size=2 * size_bytes)
        channel.unary_unary(SERVICE + "SystemSharedMemoryRegister")(register.SerializeToString(), timeout=TIMEOUT_S)
        yield
        channel.unary_unary(SERVICE + "SystemSharedMemoryUnregister")(b"", timeout=TIMEOUT_S)
    finally:
        memory.close()
        memory.unlink()


def in_region(message: bytes, at: int, output_bytes: int) -> bytes:
    """Return the same request with its one input at a place of REGION, and its output behind, if it has any bytes."""
    request = pb.ModelInferRequest.FromString(message)
    (tensor,), (raw,) = request.inputs, request.raw_input_contents
    _place(tensor, at, len(raw))
    if output_bytes:
        del request.outputs[:]
        _place(request.outputs.add(name="y" if request.model_name == LARGE else "output"), at + len(raw), output_bytes)
    request.ClearField("raw_input_contents")
    return request.SerializeToString()


def _place(
    tensor: "pb.ModelInferRequest.InferInputTensor | pb.ModelInferRequest.InferRequestedOutputTensor",
    at: int,
    size_bytes: int,
) -> None:
    tensor.parameters["shared_memory_region"].string_param = REGION
    tensor.parameters["shared_memory_offset"].int64_param = at
    tensor.parameters["shared_memory_byte_size"].int64_param = size_bytes


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


def measure_slice(server: LiveServer, connection: ServerConnection, model: str, send: Send, count: int) -> Slice:
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
    return {role: sum(map(cpu_ns, pids[role])) for role in ROLES} | {"(client)": time.process_time_ns()}


def row(case: Case, way: str, slices: Sequence[Slice]) -> Row:
    """Return medians over the slices."""
    return {
        "model": case.name,
        "way": way,
        "round trip ms": statistics.median(part.round_trip_ms for part in slices),
        "beyond compute ms": statistics.median(part.round_trip_ms - part.compute_ms for part in slices),
        "CPU us, serving": statistics.median(sum(part.cpu_us[role] for role in SERVING) for part in slices),
        **{role: statistics.median(part.cpu_us[role] for part in slices) for role in (*ROLES, "(client)")},
    }


def measure(server: LiveServer, file: Path, case: Case, rounds: int) -> list[Row]:
    """Measure all ways of one case; they take turns, so that all of them see the same machine."""
    example = example_of(case.model, file, rows=case.rows)
    (raw,) = pb.ModelInferRequest.FromString(example.request).raw_input_contents
    output_bytes = sum(output.nbytes for output in example.outputs.values()) if case.outputs else 0
    size_bytes = len(raw) + output_bytes + 4096
    in_place, copied = (in_region(example.request, at, output_bytes) for at in (ALIGNED, size_bytes + UNALIGNED))
    with (
        ServerConnection(server.url, TIMEOUT_S) as connection,
        raw_channel(server.url) as channel,
        region_with(channel, raw, size_bytes),
        stream_of(channel, example.request) as streamed,
        stream_of(channel, in_place) as streamed_region,
    ):
        infer = raw_infer(channel)
        ways: dict[str, Send] = {
            "message": lambda: infer(example.request, timeout=TIMEOUT_S),
            "shared memory": lambda: infer(in_place, timeout=TIMEOUT_S),
            "shared memory, copied": lambda: infer(copied, timeout=TIMEOUT_S),
            "message, stream": streamed,
            "shared memory, stream": streamed_region,
        }
        slices: dict[str, list[Slice]] = {way: [] for way in ways}
        for number in range(rounds + 1):
            for way, send in ways.items():
                found = measure_slice(server, connection, case.model, send, case.count)
                if number > 0:  # the first one warms up, and the workers map the region
                    slices[way].append(found)
    return [row(case, way, found) for way, found in slices.items()]


def run(report: Report, repository: Path, rounds: int, cases: Sequence[Case]) -> None:
    """Measure every case."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        write_large(Path(folder))
        with live_server(repository, [f"--model-repository={folder}"]) as server:
            for case in cases:
                file = onnx_file(Path(folder) if case.model == LARGE else repository, case.model)
                rows += measure(server, file, case, rounds)
    report.table("one client, medians, CPU microseconds per request", rows)
    cost_us = {(str(r["model"]), str(r["way"])): float(r["CPU us, serving"]) for r in rows}
    for name, what in (("mobilenetv2", "602 KB image"), ("mobilenetv2 x8", "batch of 8"), (LARGE, "16 MiB in and out")):
        if (name, "message") not in cost_us:
            continue
        for other in ("message", "shared memory, copied"):
            share = cost_us[name, "shared memory"] / cost_us[name, other]
            report.target(f"{what}: CPU with shared memory in place, as a share of that with {other}", share, 1.0)


def main() -> int:
    """Run the benchmark; return 1 when a target is missed."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument("--rounds", type=int, default=15, help="slices of each case, taking turns")
    parser.add_argument("--cases", nargs="+", default=[case.name for case in CASES], help="as the table has them")
    options = parser.parse_args()
    report = start_report("Transports: what a message, a stream and shared memory cost")
    cases = [case for case in CASES if case.name in options.cases]
    repository = ensure_zoo(options.repository, sorted({case.model for case in cases} - {LARGE}))
    run(report, repository, options.rounds, cases)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
