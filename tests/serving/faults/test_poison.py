"""What one file, one request or one moment without resources does to the server: nothing that others notice."""

import asyncio
import io
import json
import os
import resource
import shutil
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from PIL import Image

from gangway.artifact.cache import Cache
from gangway.artifact.format import Engine
from gangway.compiler.key import model_key
from gangway.compiler.pipeline import compile_model
from gangway.compiler.target import detect
from gangway.server.control.repository.compile_jobs import Compiler, CompileRequest
from gangway.server.errors import CompileError
from testing.live_server import LiveServer, live_server
from testing.waiting import until

pytestmark = pytest.mark.long

DOUBLE = "(float[n, 4] x) => (float[n, 4] y) { y = Add(x, x) }"
# Onnxruntime divides without a look, and the least INT64 by -1 is SIGFPE. A string keeps the model with onnxruntime.
DIVIDE = """(int64[n, 1] a, int64[n, 1] b, string[n, 1] s) => (int64[n, 1] c, string[n, 1] t) {
    c = Div(a, b)  t = Identity(s) }"""
# The decoder of onnxruntime-extensions leaves bytes that are no picture to libjpeg, which calls exit().
DECODE = """<ir_version: 8, opset_import: ["" : 17, "com.microsoft.extensions" : 1]> g
    (uint8[n] file) => (uint8[h, w, 3] pixels) { pixels = com.microsoft.extensions.DecodeImage(file) }"""
TIMEOUT_S = 20
STANDARD_STREAMS = 3


def model_of(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {text}')


@dataclass(frozen=True)
class Served:
    server: LiveServer
    repository: Path
    cache_dir: Path

    def ask(self, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON of one HTTP request."""
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(f"http://{self.server.http_url}{path}", data, TIMEOUT_S) as answer:
                return answer.status, json.loads(answer.read() or "{}")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or "{}")

    def infer(self, name: str, **tensors: tuple[str, list[Any]]) -> tuple[int, Any]:
        """Status, and the first output or the error. Each tensor has two dimensions, (rows, all the others)."""
        inputs = [
            {"name": key, "datatype": datatype, "shape": [len(rows), len(rows[0])], "data": rows}
            for key, (datatype, rows) in tensors.items()
        ]
        status, answer = self.ask(f"/v2/models/{name}/infer", {"inputs": inputs})
        return status, answer["outputs"][0]["data"] if status == 200 else answer["error"]

    def double(self) -> tuple[int, Any]:
        return self.infer("double", x=("FP32", [[1, 2, 3, 4]]))

    def divide(self, a: int, b: int) -> tuple[int, Any]:
        return self.infer("divide", a=("INT64", [[a]]), b=("INT64", [[b]]), s=("BYTES", [["x"]]))

    def decode(self, content: bytes) -> tuple[int, Any]:
        inputs = [{"name": "file", "datatype": "UINT8", "shape": [len(content)], "data": list(content)}]
        status, answer = self.ask("/v2/models/decode/infer", {"inputs": inputs})
        return status, answer["outputs"][0]["data"] if status == 200 else answer["error"]

    def reason(self, name: str) -> str:
        (entry,) = [model for model in self.ask("/v2/repository/index", {})[1] if model["name"] == name]
        return str(entry.get("reason", ""))

    def killed(self, role: str) -> int:
        """Kill the first process of a role; return its number."""
        pid = self.server.pids()[role][0]
        os.kill(pid, signal.SIGKILL)
        return pid


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    models = {"double": model_of(DOUBLE), "divide": model_of(DIVIDE), "decode": onnx.parser.parse_model(DECODE)}
    for name, model in models.items():
        (folder / "models" / name / "1").mkdir(parents=True)
        path = folder / "models" / name / "1" / "model.onnx"
        onnx.save(model, path)
        compile_model(path, name, Cache(folder / "cache"), detect(), lambda phase, done, total: None)
    flags = [f"--cache-dir={folder / 'cache'}", "--model-control-mode=explicit", "--load-model=*"]
    with live_server(folder / "models", flags) as server:
        yield Served(server, folder / "models", folder / "cache")
    assert server.process.returncode == 0


def test_a_request_that_kills_workers_is_given_up_and_then_its_model(served: Served) -> None:
    before = set(served.server.pids()["worker"])
    status, error = served.divide(-(2**63), -1)
    assert status == 500 and "ended the worker processes" in error and "again" not in error
    until(lambda: len(served.server.pids()["worker"]) == len(before))
    assert len(before - set(served.server.pids()["worker"])) <= 2, "no more than it takes to know the reason"
    assert served.divide(7, 2) == (200, [3])
    for _ in range(2):
        assert served.divide(-(2**63), -1)[0] == 500
    until(lambda: "ended 6 worker processes" in served.reason("divide"))
    status, error = served.divide(7, 2)
    assert status == 500 and "not executed any more: its requests ended 6 worker processes" in error
    assert served.ask("/v2/models/divide/ready")[0] == 400 and served.ask("/v2/models/double/ready")[0] == 200
    assert served.double() == (200, [2, 4, 6, 8])
    assert served.ask("/v2/repository/models/divide/load", {})[0] == 200
    assert served.divide(7, 2) == (200, [3])


def test_a_request_that_makes_a_library_exit_is_given_up(served: Served) -> None:
    status, error = served.decode(b"no picture")
    assert status == 500 and "ended the worker processes" in error and "again" not in error
    assert served.double() == (200, [2, 4, 6, 8])
    assert served.decode(one_pixel(7, 8, 9)) == (200, [9, 8, 7]), "blue first, as the decoder has it"


def test_a_damaged_picture_is_the_clients_fault(served: Served) -> None:
    status, error = served.decode(one_pixel(7, 8, 9)[:40])
    assert status == 400 and "DecodeImage" in error


def one_pixel(*colour: int) -> bytes:
    with io.BytesIO() as file:
        Image.new("RGB", (1, 1), colour).save(file, "PNG")
        return file.getvalue()


def test_killed_from_outside_it_is_nobodys_fault(served: Served) -> None:
    for _ in range(4):
        served.killed("worker")
        assert served.divide(7, 2) == (200, [3])


@pytest.mark.parametrize("role", ["worker", "scheduler", "front end"])
def test_a_successor_that_cannot_be_started_is_tried_again(served: Served, role: str) -> None:
    pid = served.server.process.pid
    until(lambda: len(served.server.pids()["worker"]) == len(os.sched_getaffinity(pid)) and served_again(served))
    assert served.double() == (200, [2, 4, 6, 8])
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (STANDARD_STREAMS, hard))  # what is open stays, and nothing is opened
    log = served.server.log
    began = len(log.read_text())
    victim = served.killed(role)
    try:
        until(lambda: "cannot be started" in log.read_text()[began:])
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    until(lambda: (now := served.server.pids()[role]) and victim not in now and served_again(served))
    assert served.double() == (200, [2, 4, 6, 8])


def served_again(served: Served) -> bool:
    try:
        return served.ask("/v2/health/ready")[0] == 200
    except OSError:  # nobody listens yet
        return False


@pytest.mark.long
def test_a_core_is_taken_away_and_comes_back(served: Served) -> None:
    cores = sorted(os.sched_getaffinity(served.server.process.pid))
    if len(cores) < 2:
        pytest.skip("one core")
    workers = len(served.server.pids()["worker"])
    os.sched_setaffinity(served.server.process.pid, set(cores[1:]))
    try:
        until(lambda: len(served.server.pids()["worker"]) == workers - 1)
        assert served.double() == (200, [2, 4, 6, 8])
        assert served.ask("/v2/repository/models/double/unload", {})[0] == 200
        assert served.ask("/v2/repository/models/double/load", {})[0] == 200, "not waited for"
        assert served.double() == (200, [2, 4, 6, 8])
    finally:
        os.sched_setaffinity(served.server.process.pid, set(cores))
    until(lambda: len(served.server.pids()["worker"]) == workers)
    until(lambda: worker_on(served, cores[0]))


def worker_on(served: Served, core: int) -> bool:
    return any(os.sched_getaffinity(pid) == {core} for pid in served.server.pids()["worker"])


def a_pipe(folder: Path) -> str:
    os.mkfifo(folder / "pipe")
    return "pipe"


@pytest.mark.parametrize(
    ("location", "nested"),
    [(a_pipe, False), ("../../double/1/model.onnx", False), ("/dev/zero", True)],
    ids=["pipe", "outside", "device, in a node"],
)
def test_tensors_are_read_from_regular_files_of_the_folder_only(
    served: Served, location: str | Callable[[Path], str], nested: bool
) -> None:
    folder = served.repository / "odd" / "1"
    folder.mkdir(parents=True)
    try:
        name = location if isinstance(location, str) else location(folder)
        onnx.save(model_with_tensor_at(name, nested), folder / "model.onnx")
        status, answer = served.ask("/v2/repository/models/odd/load", {})
        assert status == 400 and "external data" in answer["error"], answer
    finally:
        shutil.rmtree(folder.parent)
    assert served.ask("/v2/repository/models/double/load", {})[0] == 200


def model_with_tensor_at(location: str, nested: bool) -> onnx.ModelProto:
    text = "(float[4] x) => (float[4] y) { %s y = Add(x, w) }"
    model = model_of(text % ("w = Constant <value = float[4] {0, 0, 0, 0}> ()" if nested else ""))
    if nested:
        tensor = model.graph.node[0].attribute[0].t
    else:
        tensor = model.graph.initializer.add()
        tensor.CopyFrom(onnx.numpy_helper.from_array(np.zeros(4, np.float32), "w"))
    for field in ("raw_data", "float_data"):
        tensor.ClearField(field)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    return model


def test_a_job_that_does_not_end_is_killed_and_the_model_left_to_onnxruntime(tmp_path: Path) -> None:
    """Here it waits for somebody else who holds the model's lock, and never gets it."""
    path = tmp_path / "model.onnx"
    onnx.save(model_of(DOUBLE), path)
    cache = Cache(tmp_path / "cache")
    timeouts = iter((1.0, 100.0))
    with cache.lock(model_key(path, detect())):
        compiler = Compiler(cache.root, timeout_seconds=lambda path: next(timeouts))
        manifest = asyncio.run(compiler.compile(CompileRequest("double", path)))
        assert manifest.engine is Engine.ONNXRUNTIME
        assert manifest.fallback_reason == "the compile job took more than 1 s and was ended"
    assert cache.lookup(model_key(path, detect())) is None, "the next server tries to compile it"


def test_what_is_wrong_with_the_cache_may_be_mended(tmp_path: Path) -> None:
    path, cache_dir = tmp_path / "model.onnx", tmp_path / "cache"
    onnx.save(model_of(DOUBLE), path)
    cache_dir.mkdir()
    (cache_dir / "locks").write_bytes(b"no folder")
    with pytest.raises(CompileError, match="File exists") as caught:
        asyncio.run(Compiler(cache_dir).compile(CompileRequest("double", path)))
    assert not caught.value.is_final


def test_a_file_that_is_no_file_holds_no_labels(served: Served) -> None:
    config = {"output": [{"name": "y", "dims": [4], "data_type": "TYPE_FP32", "label_filename": "labels.txt"}]}
    os.mkfifo(served.repository / "double" / "labels.txt")
    try:
        body = {"parameters": {"config": json.dumps(config)}}
        status, answer = served.ask("/v2/repository/models/double/load", body)
        assert status == 400 and "no regular file" in answer["error"]
    finally:
        (served.repository / "double" / "labels.txt").unlink()
    assert served.double() == (200, [2, 4, 6, 8])


@pytest.mark.parametrize("everybody", [False, True], ids=["one worker", "all workers"])
def test_a_model_whose_artifact_is_missed_for_a_while_comes_back(served: Served, everybody: bool) -> None:
    """Who has it serves on. Where nobody has it, it is loaded again."""
    workers = len(served.server.pids()["worker"])
    began = len(served.server.log.read_text())
    (artifact,) = [path.parent for path in served.cache_dir.glob("*/kernels.so")]
    hidden = artifact.rename(artifact.with_name("hidden"))
    for pid in served.server.pids()["worker"][: None if everybody else 1]:
        os.kill(pid, signal.SIGKILL)
    if everybody or workers == 1:
        until(lambda: "cannot load the compiled model" in served.reason("double"))
        assert served.double()[0] == 503
    else:
        until(lambda: "it is compiled again" in served.server.log.read_text()[began:])
        assert served.double() == (200, [2, 4, 6, 8])
    if not artifact.exists():  # a compile job may have been quick
        hidden.rename(artifact)
    until(lambda: sum(artifact.name in maps_of(pid) for pid in served.server.pids()["worker"]) == workers)
    until(lambda: served.double() == (200, [2, 4, 6, 8]))


def maps_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # it has ended
        return ""
