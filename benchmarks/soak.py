"""Everything at once for ten minutes: every way into the server, Python models, bad requests, idle connections, models
that come and go, processes that are killed.

What is held against bounds: every answer is right or refused, and memory, descriptors and threads stay flat.
"""

import os
import queue
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
import tritonclient.utils.shared_memory as shm
from geventhttpclient.response import HTTPParseError
from tritonclient.utils import InferenceServerException

from benchmarks.overload import Sample, sample, thirds
from testing.live_server import LiveServer, live_server
from testing.load import TOLERANCE, is_right, raw_channel, raw_infer
from testing.processes import command_of, descendants_of
from testing.reference import Example, example_of
from testing.report import Report, add_repository_option, option_parser, start_report
from testing.repository import ensure_zoo, onnx_file

MODELS = ("mlp", "mobilenetv2", "simple", "simple_diamond", "accumulator")
VISITOR = "mlp"  # loaded and unloaded as another model by its configuration's file
PYTHON = "python"
VICTIMS = ("worker", "scheduler", "front end", PYTHON)
PERIOD_S = 0.02  # between two requests of a client
KILL_EVERY_S, RELOAD_EVERY_S, SAMPLE_EVERY_S = 15.0, 5.0, 2.0
TIMEOUT_S = 30
STEPS = 5  # of a sequence
IDLE_CONNECTIONS, IDLE_S = 100, 3.0  # to each port
BAD_REQUESTS = {  # what HTTP answers to each of them
    b"no HTTP at all\r\n\r\n": 400,
    b"GET /v2/models/nobody HTTP/1.1\r\n\r\n": 404,
    b"GET /nowhere HTTP/1.1\r\n\r\n": 404,
    b"GET /v2 HTTP/1.1\r\n" + b"".join(b"x-%d: y\r\n" % number for number in range(300)) + b"\r\n": 431,
    b'POST /v2/models/mlp/infer HTTP/1.1\r\ncontent-length: 9\r\n\r\n{"inputs"': 400,
    b'POST /v2/models/mlp/infer HTTP/1.1\r\ncontent-length: 13\r\n\r\n{"inputs":[]}': 400,
}
GROWTH_AT_MOST = 0.02  # from the second third of the time to its last

PYTHON_MODEL = """import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        values = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", value + value.dtype.type(1))]) for value in values]
"""

Tensors = Mapping[str, "np.ndarray[tuple[int, ...], np.dtype[np.generic]]"]


class RefusedError(Exception):
    """The server has refused or lost a request, which clients are told to expect while processes are killed."""


class Traffic:
    """Counts how the requests of each kind of client end."""

    def __init__(self, server: LiveServer, examples: dict[str, Example]) -> None:
        self.server = server
        self.examples = examples
        self.counts: Counter[tuple[str, str]] = Counter()
        self.over = threading.Event()
        self._lock = threading.Lock()

    def note(self, kind: str, end: str) -> None:
        """Count a request."""
        with self._lock:
            self.counts[kind, end] += 1

    def loop(self, kind: str, begin: Callable[["Traffic"], "Iterator[bool]"], period_s: float) -> None:
        """Let a client ask again and again. It begins anew, with a new connection, when a request was refused."""
        while not self.over.is_set():
            try:
                for right in begin(self):
                    self.note(kind, "right" if right else "WRONG")
                    if self.over.wait(period_s):
                        return
            except RefusedError:
                self.note(kind, "refused")
            except InferenceServerException as error:
                status = error.status() or error.message()
                refused = any(word in str(status) for word in ("UNAVAILABLE", "503", "CANCELLED"))
                self.note(kind, "refused" if refused else f"{status}: {error.message()}"[:90])
            except (OSError, HTTPParseError):  # HTTP: the connection is gone with its front end
                self.note(kind, "refused")
            self.over.wait(0.1)


def calls(traffic: Traffic) -> Iterator[bool]:
    """ModelInfer, of a small model and an image by turns."""
    with raw_channel(traffic.server.url) as channel:
        infer = raw_infer(channel)
        while True:
            for name in ("mlp", "mobilenetv2"):
                example = traffic.examples[name]
                done = infer.future(example.request, timeout=TIMEOUT_S)
                error = done.exception()
                if error is not None:
                    code = done.code().name
                    if code != "UNAVAILABLE":
                        raise InferenceServerException(str(error.details()), status=code)  # type: ignore[attr-defined]
                    raise RefusedError
                yield is_right(done.result(), example.outputs)


def posts(traffic: Traffic) -> Iterator[bool]:
    """HTTP with binary tensors and with JSON, compressed every second time."""
    client = http_client.InferenceServerClient(traffic.server.http_url, network_timeout=TIMEOUT_S)
    example = traffic.examples["mlp"]
    with closing(client):
        while True:
            for binary in (True, False):
                asked = http_client.InferRequestedOutput(*example.outputs, binary_data=binary)
                inputs = _inputs(http_client, example.inputs, binary_data=binary)
                algorithm = None if binary else "gzip"
                answer = client.infer("mlp", inputs, outputs=[asked], request_compression_algorithm=algorithm)
                yield _same(answer, example.outputs)


def streams(traffic: Traffic) -> Iterator[bool]:
    """A stream of twenty requests, then another one."""
    example = traffic.examples["simple"]
    while True:
        answers: queue.Queue[tuple[object, object]] = queue.Queue()
        with closing(grpc_client.InferenceServerClient(traffic.server.url)) as client:
            client.start_stream(callback=lambda result, error, answers=answers: answers.put((result, error)))
            for _ in range(20):
                with suppress(InferenceServerException):  # a broken stream tells its reason to the callback
                    client.async_stream_infer("simple", _inputs(grpc_client, example.inputs))
                yield _same(_taken(answers), example.outputs)


def sequences(traffic: Traffic) -> Iterator[bool]:
    """A sequence with state: each answer is the sum so far. A lost one begins anew."""
    number = 1 + threading.get_native_id() * 1_000_000
    with closing(grpc_client.InferenceServerClient(traffic.server.url)) as client:
        while True:
            number += 1
            for step in range(STEPS):
                inputs = _inputs(grpc_client, {"INPUT": np.full((1, 1), 3, np.int32)})
                answer = client.infer(
                    "accumulator",
                    inputs,
                    sequence_id=number,
                    sequence_start=step == 0,
                    sequence_end=step == STEPS - 1,
                    client_timeout=TIMEOUT_S,
                )
                yield _same(answer, {"OUTPUT": np.full((1, 1), 3 * (step + 1), np.int32)})


def ensembles(traffic: Traffic) -> Iterator[bool]:
    """An ensemble of four steps: twice the inputs come out as sum and difference."""
    example = traffic.examples["simple"]
    a, b = (example.inputs[name].astype(np.int32) for name in ("INPUT0", "INPUT1"))
    expected = {"OUTPUT0": 2 * a + 2 * b, "OUTPUT1": 2 * a - 2 * b}
    with closing(grpc_client.InferenceServerClient(traffic.server.url)) as client:
        while True:
            answer = client.infer("simple_diamond", _inputs(grpc_client, example.inputs), client_timeout=TIMEOUT_S)
            yield _same(answer, expected)


def regions(traffic: Traffic) -> Iterator[bool]:
    """An image in the client's shared memory, ten times; then the region is unregistered."""
    example = traffic.examples["mobilenetv2"]
    ((name, image),) = example.inputs.items()
    region = f"soak-{os.getpid()}-{threading.get_native_id()}"
    while True:
        with ExitStack() as stack:
            handle = shm.create_shared_memory_region(region, f"/{region}", image.nbytes)
            stack.callback(shm.destroy_shared_memory_region, handle)
            shm.set_shared_memory_region(handle, [image])
            client = stack.enter_context(closing(grpc_client.InferenceServerClient(traffic.server.url)))
            client.register_system_shared_memory(region, f"/{region}", image.nbytes)
            stack.callback(_quietly, client.unregister_system_shared_memory, region)
            tensor = grpc_client.InferInput(name, image.shape, "FP32")
            tensor.set_shared_memory(region, image.nbytes)
            for _ in range(10):
                yield _same(client.infer("mobilenetv2", [tensor], client_timeout=TIMEOUT_S), example.outputs)


def loads(traffic: Traffic) -> Iterator[bool]:
    """A model is unloaded and loaded again; nobody else asks it."""
    example = traffic.examples["mlp"]
    with closing(grpc_client.InferenceServerClient(traffic.server.url)) as client:
        while True:
            client.load_model("visitor", client_timeout=TIMEOUT_S)
            answer = client.infer("visitor", _inputs(grpc_client, example.inputs), client_timeout=TIMEOUT_S)
            yield _same(answer, example.outputs)
            client.unload_model("visitor", client_timeout=TIMEOUT_S)


def pythons(traffic: Traffic) -> Iterator[bool]:
    """A Python model that adds one."""
    values = np.arange(4, dtype=np.float32)
    with closing(grpc_client.InferenceServerClient(traffic.server.url)) as client:
        while True:
            answer = client.infer(PYTHON, _inputs(grpc_client, {"x": values}), client_timeout=TIMEOUT_S)
            yield _same(answer, {"y": values + 1})


def mistakes(traffic: Traffic) -> Iterator[bool]:
    """Requests that are refused, each over a connection of its own."""
    host, _, port = traffic.server.http_url.rpartition(":")
    while True:
        for text, status in BAD_REQUESTS.items():
            with socket.create_connection((host, int(port)), TIMEOUT_S) as connection:
                connection.sendall(text)
                head = connection.recv(4096).split()
            if not head:
                raise RefusedError  # the front end has been killed
            yield int(head[1]) == status


def idlers(traffic: Traffic) -> Iterator[bool]:
    """Connections that say nothing; liveness is answered meanwhile."""
    while True:
        with ExitStack() as stack:
            for url in (traffic.server.url, traffic.server.http_url):
                host, _, port = url.rpartition(":")
                for _ in range(IDLE_CONNECTIONS):
                    stack.enter_context(socket.create_connection((host, int(port)), TIMEOUT_S))
            traffic.over.wait(IDLE_S)
            client = stack.enter_context(closing(http_client.InferenceServerClient(traffic.server.http_url)))
            yield client.is_server_live()


KINDS = (calls, posts, streams, sequences, ensembles, regions, pythons, mistakes, idlers)


def _inputs(client: object, tensors: Tensors, **options: bool) -> list[object]:
    made = []
    names = {"float32": "FP32", "int32": "INT32"}
    for name, values in tensors.items():
        tensor = client.InferInput(name, list(values.shape), names[str(values.dtype)])  # type: ignore[attr-defined]
        tensor.set_data_from_numpy(values, **options)
        made.append(tensor)
    return made


def _same(answer: object, expected: Tensors) -> bool:
    got = {name: answer.as_numpy(name) for name in expected}  # type: ignore[attr-defined]
    return all(
        got[name] is not None
        and np.allclose(got[name], values, rtol=0, atol=TOLERANCE * float(np.abs(values).max() or 1))
        for name, values in expected.items()
    )


def _taken(answers: "queue.Queue[tuple[object, object]]") -> object:
    try:
        result, error = answers.get(timeout=TIMEOUT_S)
    except queue.Empty:
        raise InferenceServerException(f"a stream said nothing for {TIMEOUT_S} s", status="hang") from None
    if error is not None:
        assert isinstance(error, InferenceServerException)
        raise error
    return result


def _quietly(action: Callable[..., object], *arguments: object) -> None:
    with suppress(InferenceServerException):
        action(*arguments)


def kill_one(server: LiveServer, number: int) -> None:
    """Kill a process of each role in turn."""
    role = VICTIMS[number % len(VICTIMS)]
    instances = [pid for pid in descendants_of(server.process.pid) if "python_backend" in command_of(pid)]
    victims = instances if role == PYTHON else server.pids()[role]
    if victims:
        with suppress(ProcessLookupError):
            os.kill(victims[number % len(victims)], signal.SIGKILL)


def write_python_model(folder: Path) -> None:
    """Write a model that adds one to four numbers."""
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(PYTHON_MODEL)
    tensors = (("input", "x"), ("output", "y"))
    lines = [f'{kind} {{ name: "{name}" data_type: TYPE_FP32 dims: [4] }}' for kind, name in tensors]
    (folder / "config.pbtxt").write_text("\n".join(['backend: "python"', *lines]))


def run(server: LiveServer, traffic: Traffic, seconds: float, kill_every_s: float) -> list[Sample]:
    """Let all clients ask for so long, kill processes meanwhile; return samples of what the server holds."""
    threads = [threading.Thread(target=traffic.loop, args=(kind.__name__, kind, PERIOD_S)) for kind in KINDS]
    threads.append(threading.Thread(target=traffic.loop, args=("loads", loads, RELOAD_EVERY_S)))
    for thread in threads:
        thread.start()
    samples, begin, kills = [], time.monotonic(), 0
    try:
        while (now := time.monotonic() - begin) < seconds:
            if kill_every_s and now > (kills + 1) * kill_every_s:
                kill_one(server, kills)
                kills += 1
            time.sleep(SAMPLE_EVERY_S)
            samples.append(sample(server))
    finally:
        traffic.over.set()
        for thread in threads:
            thread.join()
    return samples


def report_soak(report: Report, traffic: Traffic, samples: Sequence[Sample]) -> None:
    """Print ends by kind of client and what the server held, and hold both against the bounds."""
    kinds = sorted({kind for kind, _ in traffic.counts})
    others = {end for _, end in traffic.counts} - {"right", "refused"}
    rows = [
        {
            "client": kind,
            "right": traffic.counts[kind, "right"],
            "refused": traffic.counts[kind, "refused"],
            "else": "; ".join(f"{n} {end}" for (k, end), n in traffic.counts.items() if k == kind and end in others),
        }
        for kind in kinds
    ]
    report.table("requests", rows)
    names = ("memory_bytes", "descriptors", "threads", "processes")
    held = {name: thirds(samples, name) for name in names}
    held["memory_bytes"] = [size_bytes / 1e6 for size_bytes in held["memory_bytes"]]
    labels = ("memory MB", "descriptors", "threads", "processes")
    columns = ("first third", "second", "last")
    report.table(
        "what the server holds, median",
        [{"": label, **dict(zip(columns, held[name], strict=True))} for label, name in zip(labels, names, strict=True)],
    )
    report.target(
        "ends but right and refused", sum(traffic.counts[key] for key in traffic.counts if key[1] in others), 0
    )
    for label, name in zip(labels, names, strict=True):
        report.target(f"growth of {label}, second to last third", held[name][2] / held[name][1] - 1, GROWTH_AT_MOST)
    for kind in kinds:
        report.goal(f"{kind}: answered", traffic.counts[kind, "right"], 1)


def main() -> int:
    """Run the benchmark; return 1 when a bound is missed."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument("--seconds", type=float, default=600, help="how long")
    parser.add_argument("--kill-every", type=float, default=KILL_EVERY_S, metavar="S", help="0: nobody is killed")
    options = parser.parse_args()
    report = start_report("Soak: every way in, for a long time")
    zoo = ensure_zoo(options.repository, MODELS)
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder)
        for name in MODELS:
            (repository / name).symlink_to(zoo.resolve() / name)
        (repository / "visitor" / "1").mkdir(parents=True)
        (repository / "visitor" / "1" / "model.onnx").symlink_to(onnx_file(zoo.resolve(), VISITOR))
        write_python_model(repository / PYTHON)
        flags = ["--model-control-mode=explicit", *(f"--load-model={name}" for name in (*MODELS, PYTHON))]
        with live_server(repository, flags) as server:
            examples = {name: example_of(name, onnx_file(zoo, name)) for name in ("mlp", "mobilenetv2", "simple")}
            traffic = Traffic(server, examples)
            samples = run(server, traffic, options.seconds, options.kill_every)
            report_soak(report, traffic, samples)
            report.target("request slots not given back", server.busy_slots(), 0)
            report.target("server ended", server.process.poll() is not None, 0)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
