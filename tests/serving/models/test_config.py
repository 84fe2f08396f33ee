"""`gangway serve` with configurations that ask for something: labels, a cache, instances, optional inputs, types."""

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from onnx import TensorProto, helper, numpy_helper
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from gangway.artifact.cache import Cache
from gangway.clients.connection import SERVICE
from gangway.compiler.pipeline import compile_model
from gangway.compiler.target import detect
from gangway.protos import grpc_service_pb2 as pb
from gangway.zoo import write_model
from testing.live_server import LiveServer, stop
from testing.repository import GANGWAY
from tests.conftest import CompiledZoo
from tests.helpers.onnx_networks import FOREIGN, Array
from tests.helpers.stopped_workers import stopped_workers
from tests.helpers.whole_server import until

TIMEOUT_SECONDS = 30
START_SECONDS = 90
LABELS = [f"class {index}" for index in range(9)]  # the model has ten
FLOATS = TensorProto.FLOAT


def save(repository: Path, name: str, nodes: list[Any], inputs: list[Any], outputs: list[Any], **more: Any) -> None:
    graph = helper.make_graph(nodes, name, inputs, outputs, **more)
    path = repository / name / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def save_optional(repository: Path) -> None:
    """y = a x + b, where a and b have values of their own."""
    node, info = helper.make_node, helper.make_tensor_value_info
    values = {"a": np.full(4, 2, np.float32), "b": np.full(4, 0.5, np.float32)}
    save(
        repository,
        "optional",
        [node("Mul", ["x", "a"], ["ax"]), node("Add", ["ax", "b"], ["y"])],
        [info(name, FLOATS, [4]) for name in ("x", "a", "b")],
        [info("y", FLOATS, [4])],
        initializer=[numpy_helper.from_array(value, name) for name, value in values.items()],
    )
    inputs = "".join(f'input {{ name: "{name}" optional: {optional} }} ' for name, optional in OPTIONAL.items())
    (repository / "optional" / "config.pbtxt").write_text(inputs)


OPTIONAL = {"x": "false", "b": "true", "a": "true"}


def save_bfloat16(repository: Path) -> None:
    """y = 2 x."""
    node, info, kind = helper.make_node, helper.make_tensor_value_info, TensorProto.BFLOAT16
    nodes = [
        node("Cast", ["x"], ["wide"], to=FLOATS),
        node("Add", ["wide", "wide"], ["twice"]),
        node("Cast", ["twice"], ["y"], to=kind),
    ]
    save(repository, "bfloat16", nodes, [info("x", kind, ["N", 3])], [info("y", kind, ["N", 3])])


HOSTILE = {
    "passive": ("instance_group { passive: true }", "passive is not supported"),
    "secret": ('output { name: "OUTPUT0" label_filename: "../simple/config.pbtxt" }', "leaves the model's folder"),
    "unlabelled": ('output { name: "OUTPUT0" label_filename: "none.txt" }', "none.txt' cannot be read"),
    "resources": (
        'instance_group { rate_limiter { resources { name: "r" count: 9 } } }',
        "9 of resource 'r' are needed, there are 2",
    ),
    "required": ('input { name: "INPUT0" } input { name: "INPUT1" optional: true }', "'INPUT1' cannot be optional"),
    "long": (f'default_model_filename: "{"x" * 5000}"', "is no name of a file"),
    "control": ('input { name: "' + "\\001" * 30_000 + '" }', "is not in the ONNX model"),
    "ensemble": ('platform: "ensemble" ensemble_scheduling { step { model_name: "simple" } }', "'ensemble'"),
    "growing": (
        "sequence_batching { state { use_growable_memory: true } }",
        "sequence_batching.state[0].use_growable_memory is not supported",
    ),
    "iterative": ("sequence_batching { iterative_sequence: true }", "iterative_sequence is not supported"),
}


@dataclass(frozen=True)
class Served:
    server: LiveServer
    client: triton.InferenceServerClient

    def infer(self, model: str, feeds: dict[str, Array], **options: Any) -> Any:
        inputs = []
        for name, value in feeds.items():
            inputs.append(triton.InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype)))
            inputs[-1].set_data_from_numpy(value)
        return self.client.infer(model, inputs, **options)


@pytest.fixture(scope="module")
def repository(compiled_zoo: CompiledZoo, model_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(compiled_zoo.repository / "mlp", folder / "mlp")
    config = folder / "mlp" / "config.pbtxt"
    text = config.read_text().replace("dims: [ 10 ]", 'dims: [ 10 ]\n label_filename: "labels.txt"')
    config.write_text(text + "response_cache { enable: true }\noptimization { graph { level: 1 } }\n")
    (folder / "mlp" / "labels.txt").write_text("\r\n".join(LABELS))
    FOREIGN["loop"]().save(folder / "loop" / "1" / "model.onnx")
    (folder / "loop" / "config.pbtxt").write_text("instance_group { count: 1 kind: KIND_CPU }")
    write_model(folder, "simple_identity")
    save_optional(folder)
    save_bfloat16(folder)
    cache, target = Cache(model_cache), detect()
    for name in ("loop", "simple_identity", "bfloat16"):
        compile_model(folder / name / "1" / "model.onnx", name, cache, target, lambda *_: None)
    path = folder / "optional" / "1" / "model.onnx"
    compile_model(path, "optional", cache, target, lambda *_: None, optional=("a", "b"))
    for name, (text, _) in HOSTILE.items():
        shutil.copytree(compiled_zoo.repository / "simple" / "1", folder / name / "1")
        (folder / name / "config.pbtxt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def served(repository: Path, model_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of all of them. It never says that it is ready, since some models cannot be."""
    log = tmp_path_factory.mktemp("log") / "server.log"
    command = [*GANGWAY, "serve", f"--model-repository={repository}", f"--cache-dir={model_cache}"]
    command += ["--grpc-address=127.0.0.1", "--grpc-port=0", "--no-profile", "--max-shapes=0"]
    command += ["--http-address=127.0.0.1", "--http-port=0", "--metrics-port=0"]
    command += ["--cache-config=local,size=100000", "--rate-limit=execution_count", "--rate-limit-resource=r:2"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_SECONDS
        while "ready: gRPC on" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        found = dict(re.findall(r"ready: (\w+) on (\S+)", log.read_text()))
        with triton.InferenceServerClient(found["gRPC"]) as client:
            yield Served(LiveServer(found["gRPC"], process, log, 0.0, http_url=found["HTTP"]), client)
    finally:
        status = stop(process)
    assert status == 0


def test_classes_with_labels(served: Served) -> None:
    x = np.random.default_rng(0).standard_normal((3, 16), np.float32)
    scores = served.infer("mlp", {"input": x}).as_numpy("output")
    outputs = [triton.InferRequestedOutput("output", class_count=10)]
    classes = served.infer("mlp", {"input": x}, outputs=outputs).as_numpy("output")
    assert classes.shape == (3, 10)
    for row, texts in zip(scores, classes, strict=True):
        parts = [text.decode().split(":") for text in texts]
        assert [int(part[1]) for part in parts] == np.argsort(-row).tolist()
        assert [float(part[0]) for part in parts] == pytest.approx(np.sort(row)[::-1], abs=1e-6)
        assert all(part[2:] == LABELS[int(part[1]) : int(part[1]) + 1] for part in parts)
    assert "classification" in served.client.get_server_metadata().extensions


def test_classes_over_http(served: Served) -> None:
    x = np.random.default_rng(0).standard_normal((2, 16), np.float32)
    tensor = triton_http.InferInput("input", [2, 16], "FP32")
    tensor.set_data_from_numpy(x)
    outputs = [triton.InferRequestedOutput("output", class_count=3)]
    expected = served.infer("mlp", {"input": x}, outputs=outputs).as_numpy("output")
    with triton_http.InferenceServerClient(served.server.http_url) as client:
        for binary in (True, False):
            output = triton_http.InferRequestedOutput("output", binary_data=binary, class_count=3)
            answer = client.infer("mlp", [tensor], outputs=[output]).as_numpy("output")
            assert texts_of(answer) == texts_of(expected)


def texts_of(array: Array) -> list[str]:
    return [value.decode() if isinstance(value, bytes) else str(value) for value in array.ravel()]


def test_equal_requests_are_answered_from_the_cache(served: Served) -> None:
    x = np.random.default_rng(1).standard_normal((2, 16), np.float32)
    first = served.infer("mlp", {"input": x}, request_id="a").get_response()
    again = served.infer("mlp", {"input": x}, request_id="b").get_response()
    assert (first.id, again.id) == ("a", "b")
    assert first.raw_output_contents == again.raw_output_contents
    stats = served.client.get_inference_statistics("mlp").model_stats[0].inference_stats
    assert stats.cache_hit.count >= 1 and stats.cache_miss.count >= 1 and stats.cache_miss.ns > 0
    assert stats.success.count == stats.cache_hit.count + stats.compute_infer.count


def test_as_many_queries_at_a_time_as_instances(served: Served) -> None:
    """Two wait, although there is a core for one of them."""
    server, request = served.server, {"count": np.array([3])}
    with ThreadPoolExecutor(3) as pool:
        with stopped_workers(server):
            calls = [pool.submit(served.infer, "loop", request, client_timeout=TIMEOUT_SECONDS) for _ in range(3)]
            until(lambda: (server.busy_slots(running=True), server.waiting_slots()) == (1, 2))
            for _ in range(20):
                assert (server.busy_slots(running=True), server.waiting_slots()) == (1, 2)
        for call in calls:
            np.testing.assert_array_equal(call.result(TIMEOUT_SECONDS).as_numpy("y"), np.eye(32))


def test_inputs_that_may_be_left_out(served: Served) -> None:
    x, a, b = (np.arange(4, dtype=np.float32) + shift for shift in (0, 1, 2))
    for feeds, expected in (
        ({"x": x}, 2 * x + 0.5),
        ({"x": x, "b": b}, 2 * x + b),
        ({"a": a, "x": x}, a * x + 0.5),
        ({"b": b, "x": x, "a": a}, a * x + b),
    ):
        np.testing.assert_array_equal(served.infer("optional", feeds).as_numpy("y"), expected)
    with pytest.raises(InferenceServerException, match="expected between 1 and 3 inputs but got 1 inputs"):
        served.infer("optional", {"a": a})
    config = served.client.get_model_config("optional").config
    assert {tensor.name: tensor.optional for tensor in config.input} == {"x": False, "a": True, "b": True}


def test_bfloat16(served: Served) -> None:
    values = np.array([[1.5, -2.25, 0], [np.inf, 1e30, -1]], np.float32)
    tensor = triton.InferInput("x", [2, 3], "BF16")
    tensor.set_data_from_numpy(values.astype(ml_dtypes.bfloat16))
    result = served.client.infer("bfloat16", [tensor])
    assert result.get_response().outputs[0].datatype == "BF16"
    answer = np.frombuffer(result.get_response().raw_output_contents[0], ml_dtypes.bfloat16).reshape(2, 3)
    np.testing.assert_array_equal(answer, 2 * values.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("typed", [False, True])
def test_strings_of_all_kinds(served: Served, typed: bool) -> None:
    texts = [b"", b"he\0llo", b"\0", "ü€𝄞".encode(), b"x" * 100_000, bytes(range(128))]
    request = pb.ModelInferRequest(model_name="simple_identity")
    tensor = request.inputs.add(name="INPUT0", datatype="BYTES", shape=[2, 3])
    raw = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    if typed:
        tensor.contents.bytes_contents.extend(texts)
    else:
        request.raw_input_contents.append(raw)
    assert ask(served, request).raw_output_contents[0] == raw


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\1\0\0\0\xff", "element 0 is not UTF-8"),
        (b"\3\0\0\0\xed\xa0\x80", "element 0 is not UTF-8"),  # half of a pair, as UTF-16 has them
        (b"\2\0\0\0a", "element 0 has 2 bytes, but only 1 follow"),
        (b"\0\0\0", "the contents end before element 0 of 1"),
        (b"", "the contents end before element 0 of 1"),
        (b"\0\0\0\0x", "1 bytes follow after element 0"),
        (b"\xff\xff\xff\xff", "element 0 has 4294967295 bytes, but only 0 follow"),
    ],
)
def test_strings_that_are_none(served: Served, content: bytes, reason: str) -> None:
    request = pb.ModelInferRequest(model_name="simple_identity", raw_input_contents=[content])
    request.inputs.add(name="INPUT0", datatype="BYTES", shape=[1, 1])
    with pytest.raises(grpc.RpcError) as caught:
        ask(served, request)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert reason in caught.value.details()


def ask(served: Served, request: pb.ModelInferRequest) -> pb.ModelInferResponse:
    with grpc.insecure_channel(served.server.url) as channel:
        call = channel.unary_unary(SERVICE + "ModelInfer", response_deserializer=pb.ModelInferResponse.FromString)
        return call(request.SerializeToString(), timeout=TIMEOUT_SECONDS)


def test_the_log_names_what_has_no_effect(served: Served) -> None:
    assert (
        "WARNING supervisor: model mlp: parts of config.pbtxt have no effect: optimization.graph ("
        in served.server.log.read_text()
    )


def test_the_summary_says_what_the_server_says_of_itself(served: Served) -> None:
    broken = sum(bool(reason) for _, reason in HOSTILE.values())
    text = served.server.log.read_text()
    assert re.search(rf"^{broken} of \d+ models are not ready, so the server says not ready$", text, re.MULTILINE), text
    assert not served.client.is_server_ready()


@pytest.mark.parametrize("name", [name for name, (_, reason) in HOSTILE.items() if reason])
def test_a_hostile_configuration_keeps_its_model_from_being_ready(served: Served, name: str) -> None:
    states = {model.name: model for model in served.client.get_model_repository_index().models}
    assert states[name].state == "UNAVAILABLE"
    assert HOSTILE[name][1] in states[name].reason
    assert not served.client.is_model_ready(name)
    assert served.client.is_model_ready("mlp")
