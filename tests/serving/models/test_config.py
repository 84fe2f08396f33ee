"""`gangway serve` with configurations that ask for something: labels, a cache, instances, optional inputs, types."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import urlopen

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto
from tritonclient.utils import InferenceServerException

from gangway.artifact.cache import Cache
from gangway.clients.inputs import outputs_of
from gangway.compiler.arguments import CompileOptions
from gangway.compiler.pipeline import compile_model
from gangway.compiler.target import detect
from gangway.executor.frames import join_strings
from gangway.protos import grpc_service_pb2 as pb
from gangway.zoo import write_model
from testing.live_server import LiveServer, stop
from testing.repository import GANGWAY
from testing.waiting import until
from tests.conftest import CompiledZoo
from tests.helpers import onnx_text
from tests.helpers.onnx_networks import FOREIGN
from tests.helpers.served import Served
from tests.helpers.stopped_workers import stopped_workers
from tests.helpers.ways import WAYS, RefusedError, by_grpc, request_of

TIMEOUT_SECONDS = 30
START_SECONDS = 90
LABELS = [f"class {index}" for index in range(9)]  # the model has ten
FLOATS = TensorProto.FLOAT


# y = a x + b, where a and b have values of their own.
PRODUCT = "(float[4] x, float[4] a, float[4] b) => (float[4] y) { ax = Mul(x, a) y = Add(ax, b) }"
VALUES = {"a": np.full(4, 2, np.float32), "b": np.full(4, 0.5, np.float32)}
OPTIONAL = {"x": "false", "b": "true", "a": "true"}
# y = 2 x.
BFLOAT16 = """(bfloat16[N, 3] x) => (bfloat16[N, 3] y) {
    wide = Cast<to=1>(x)
    twice = Add(wide, wide)
    y = Cast<to=16>(twice)
}"""


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
    inputs = "".join(f'input {{ name: "{name}" optional: {optional} }} ' for name, optional in OPTIONAL.items())
    onnx_text.save(folder, "optional", PRODUCT, inputs, **VALUES)
    onnx_text.save(folder, "bfloat16", BFLOAT16)
    cache, target = Cache(model_cache), detect()
    for name in ("loop", "simple_identity", "bfloat16"):
        compile_model(folder / name / "1" / "model.onnx", name, cache, target, lambda *_: None)
    path = folder / "optional" / "1" / "model.onnx"
    compile_model(path, "optional", cache, target, lambda *_: None, CompileOptions(optional=("a", "b")))
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
        until(lambda: process.poll() is not None or "ready: gRPC on" in log.read_text(), log.read_text)
        found = dict(re.findall(r"ready: (\w+) on (\S+)", log.read_text()))
        with triton.InferenceServerClient(found["gRPC"]) as client:
            server = LiveServer(found["gRPC"], process, log, 0.0, http_url=found["HTTP"])
            yield Served(server, client, repository)
    finally:
        status = stop(process)
    assert status == 0


def test_classes_with_labels(served: Served) -> None:
    x = np.random.default_rng(0).standard_normal((3, 16), np.float32)
    scores = served.infer("mlp", input=x)["output"]
    outputs = [triton.InferRequestedOutput("output", class_count=10)]
    classes = served.ask("mlp", {"input": x}, outputs=outputs)["output"]
    assert classes.shape == (3, 10)
    for row, texts in zip(scores, classes, strict=True):
        parts = [text.decode().split(":") for text in texts]
        assert [int(part[1]) for part in parts] == np.argsort(-row).tolist()
        assert [float(part[0]) for part in parts] == pytest.approx(np.sort(row)[::-1], abs=1e-6)
        assert all(part[2:] == LABELS[int(part[1]) : int(part[1]) + 1] for part in parts)
    assert "classification" in served.client.get_server_metadata().extensions


@pytest.mark.parametrize("way", WAYS)
def test_classes_in_each_way(served: Served, way: str) -> None:
    x = np.random.default_rng(0).standard_normal((2, 16), np.float32)
    outputs = [triton.InferRequestedOutput("output", class_count=3)]
    request = request_of("mlp", {"input": x}, ["output"])
    request.outputs[0].parameters["classification"].int64_param = 3
    answer = outputs_of(WAYS[way](served.server, request))["output"]
    assert answer.tolist() == served.ask("mlp", {"input": x}, outputs=outputs)["output"].tolist()


def test_equal_requests_are_answered_from_the_cache(served: Served) -> None:
    x = np.random.default_rng(1).standard_normal((2, 16), np.float32)
    first = by_grpc(served.server, request_of("mlp", {"input": x}, identity="a"))
    again = by_grpc(served.server, request_of("mlp", {"input": x}, identity="b"))
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
            calls = [pool.submit(served.ask, "loop", request) for _ in range(3)]
            until(lambda: (server.busy_slots(running=True), server.waiting_slots()) == (1, 2))
            for _ in range(20):
                assert (server.busy_slots(running=True), server.waiting_slots()) == (1, 2)
        for call in calls:
            np.testing.assert_array_equal(call.result(TIMEOUT_SECONDS)["y"], np.eye(32))


def test_inputs_that_may_be_left_out(served: Served) -> None:
    x, a, b = (np.arange(4, dtype=np.float32) + shift for shift in (0, 1, 2))
    for feeds, expected in (
        ({"x": x}, 2 * x + 0.5),
        ({"x": x, "b": b}, 2 * x + b),
        ({"a": a, "x": x}, a * x + 0.5),
        ({"b": b, "x": x, "a": a}, a * x + b),
    ):
        np.testing.assert_array_equal(served.ask("optional", feeds)["y"], expected)
    with pytest.raises(InferenceServerException, match="expected between 1 and 3 inputs but got 1 inputs"):
        served.infer("optional", a=a)
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


@pytest.mark.parametrize("way", WAYS)
def test_strings_of_all_kinds(served: Served, way: str) -> None:
    texts = [b"", b"he\0llo", b"\0", "ü€𝄞".encode(), b"x" * 100_000, bytes(range(128))]
    request = request_of("simple_identity", {"INPUT0": np.array(texts, object).reshape(2, 3)})
    assert WAYS[way](served.server, request).raw_output_contents[0] == join_strings(texts)


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
    with pytest.raises(RefusedError) as caught:
        by_grpc(served.server, request)
    assert caught.value.status == "INVALID_ARGUMENT"
    assert reason in caught.value.message


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


def test_the_summary_names_the_page(served: Served) -> None:
    page = re.search(r"^page +(http://\S+/)$", served.server.log.read_text(), re.MULTILINE)
    assert page
    with urlopen(page[1], timeout=20) as answer:
        assert answer.headers["content-type"].startswith("text/html")


@pytest.mark.parametrize("name", [name for name, (_, reason) in HOSTILE.items() if reason])
def test_a_hostile_configuration_keeps_its_model_from_being_ready(served: Served, name: str) -> None:
    states = {model.name: model for model in served.client.get_model_repository_index().models}
    assert states[name].state == "UNAVAILABLE"
    assert HOSTILE[name][1] in states[name].reason
    assert not served.client.is_model_ready(name)
    assert served.client.is_model_ready("mlp")
