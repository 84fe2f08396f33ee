"""`gangway serve` with configurations that say something of dimensions which the ONNX files leave open."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from onnx import numpy_helper

from gangway.clients.command import main as client
from gangway.clients.connection import ServerConnection
from gangway.clients.errors import InputError
from gangway.clients.inputs import outputs_of
from gangway.clients.perf.prepare import prepare_requests
from gangway.protos import grpc_service_pb2 as pb
from testing.waiting import until
from tests.conftest import CompileKept
from tests.helpers.served import Served, serving
from tests.helpers.ways import by_grpc, parameters_of, request_of

pytestmark = pytest.mark.long

TIMEOUT_S = 30
WEIGHTS = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
GRAPHS = {
    "picture": "(float[n, 3, H, W] x) => (float[n, 3, H, W] y) { y = Relu(x) }",
    "windows": "(float[S, 4] x, float[1, 4] w) => (float[S, 4] y) { y = Add(x, w) }",
    "centre": "(float[N, S] x) => (float[N, S] y) { m = ReduceMean<axes = [0]>(x)  y = Sub(x, m) }",
    "text": "(float[N, S, 64] x) => (float[N, S, 64] y) { a = MatMul(x, w)  y = Relu(a) }",
    "copies": "(float[1] x, int64[1] n) => (float[T] y) { y = Expand(x, n) }",
    "quotient": "(int64[N, S] x) => (int64[N, S] y) { y = Div(c, x) }",
}
CONSTANTS: dict[str, dict[str, Any]] = {"text": {"w": WEIGHTS}, "quotient": {"c": np.array(720, np.int64)}}
CONFIGS = {
    "picture": 'max_batch_size: 4 input { name: "x" dims: [ 3, 8, -1 ] } %s',
    "windows": "%s",
    "centre": "max_batch_size: 4 %s",
    "text": "max_batch_size: 4 %s",
    "copies": "",
    "quotient": "max_batch_size: 4 ",
    "step": 'platform: "ensemble" max_batch_size: 4 input { name: "x" data_type: TYPE_INT64 dims: [ -1 ] }'
    ' output { name: "y" data_type: TYPE_INT64 dims: [ -1 ] } ensemble_scheduling { step { model_name: "quotient"'
    ' model_version: -1 input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } }',
}
BUCKETS = {"picture": "W=16,24", "windows": "S=2,5", "centre": "N=3; S=5", "text": "S=1,4096"}
COMPILED = {
    "picture": [{"H": 8, "W": 16}, {"H": 8, "W": 24}],
    "windows": [{"S": 2}, {"S": 5}],
    "centre": [{"N": 3, "S": 5}],
    "text": [{"S": 1}, {"S": 4096}],
}
QOS = 'parameters { key: "qos_ms" value: { string_value: "100x" } }'


class Told(Served):
    def infer(self, name: str, **arrays: Any) -> tuple[Any, dict[str, int]]:
        """Return an answer, and what it says of itself."""
        response = by_grpc(self.server, request_of(name, arrays, gangway_stats=True))
        return outputs_of(response)["y"], parameters_of(response)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, compile_kept: CompileKept) -> Iterator[Told]:
    repository, cache_dir = tmp_path_factory.mktemp("repository"), tmp_path_factory.mktemp("cache")
    for name, config in CONFIGS.items():
        folder = repository / name / "1"
        folder.mkdir(parents=True)
        buckets = f'parameters {{ key: "gangway_buckets" value: {{ string_value: "{BUCKETS.get(name, "")}" }} }}'
        (folder.parent / "config.pbtxt").write_text((config % buckets if "%s" in config else config) + QOS)
        if name in GRAPHS:
            save(folder / "model.onnx", name)
            for dimensions in ({}, *COMPILED.get(name, ())):
                compile_kept(folder / "model.onnx", name, cache_dir, dimensions=dimensions)
    with serving(repository, f"--cache-dir={cache_dir}", kind=Told) as served:
        yield served


def save(path: Path, name: str) -> None:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {GRAPHS[name]}')
    model.graph.initializer.extend(numpy_helper.from_array(a, key) for key, a in CONSTANTS.get(name, {}).items())
    onnx.save(model, path)


def floats(*shape: int) -> Any:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("name", BUCKETS)
def test_what_dims_and_buckets_say_is_compiled_before_the_model_is_ready(served: Told, name: str) -> None:
    log = served.server.log.read_text()
    for sizes in COMPILED[name]:
        title = f"{name}, version 1, {', '.join(f'{key}={size}' for key, size in sizes.items())}"
        assert f"{title}: ready, compiled for these sizes" in log.partition("ready: gRPC")[0]
    assert re.search(rf"model {name}, version 1: ready after .* s, compiled for \(", log)


def test_answers_of_declared_sizes_and_others(served: Told) -> None:
    for width in (16, 24, 9):
        x = floats(2, 3, 8, width)
        np.testing.assert_array_equal(served.infer("picture", x=x)[0], np.maximum(x, 0))
    for length in (2, 5, 1):
        x, w = floats(length, 4), floats(1, 4)
        np.testing.assert_array_equal(served.infer("windows", x=x, w=w)[0], x + w)
    for rows in (3, 1):
        x = floats(rows, 5)
        np.testing.assert_allclose(served.infer("centre", x=x)[0], x - x.mean(0), atol=1e-6)


def test_an_answer_that_outgrows_its_room_is_computed_again(served: Told) -> None:
    """Equal headers, so all but the first are answered without a thread of their own."""
    x = floats(1)
    for count in (10, 10, 5000, 3, 9000):
        n = np.array([count])
        inputs = [triton.InferInput("x", [1], "FP32"), triton.InferInput("n", [1], "INT64")]
        for given, array in zip(inputs, (x, n), strict=True):
            given.set_data_from_numpy(array)
        np.testing.assert_array_equal(served.client.infer("copies", inputs).as_numpy("y"), np.repeat(x, count))


def test_a_compiled_size_has_a_time_and_a_target_of_its_own(served: Told) -> None:
    targets_us = [served.infer("text", x=floats(1, length, 64))[1]["target_us"] for length in (1, 4096)]
    assert 0 < targets_us[0] < targets_us[1]
    assert re.fullmatch(r"[\d-]+T[\d:]+\+00:00", served.parameter("text", "gangway_target_since"))


def test_a_multiple_counts_from_the_first_answer_where_no_trial_succeeds(served: Told) -> None:
    assert served.parameter("quotient", "gangway_target_since") == "the first answer"
    x = np.array([[1, 2, 3]])
    answer, report = served.infer("step", x=x)
    np.testing.assert_array_equal(answer, 720 // x)
    assert report["target_us"] == 0, "best effort"
    until(lambda: all(served.infer(name, x=x)[1]["target_us"] for name in ("quotient", "step")))
    since = served.parameter("quotient", "gangway_target_since")
    assert re.fullmatch(r"[\d-]+T[\d:]+\+00:00", since)
    told = r"INFO .*quotient, version 1: its latency target is [\d.]+ ms from now on, "
    assert len(served.lines(told + r"\S+x: a row of a size that is not compiled computes for ")) == 1
    assert not served.lines(r"(?:WARNING|ERROR) .*(?:quotient|step).*"), "a trial that fails is no fault"
    (statistics,) = served.client.get_inference_statistics("step").model_stats
    assert statistics.inference_stats.success.count >= 2, "the ensemble has not been made again"


def test_clients_say_the_size_of_a_dimension_by_its_name(served: Told, capsys: pytest.CaptureFixture[str]) -> None:
    assert client(["text", "--url", served.server.url, "--shape", "S:5"]) == 0
    assert "1x5x64" in capsys.readouterr().out
    assert client(["quotient", "--url", served.server.url, "--shape", "T:5"]) == 2
    assert "no input 'T'" in capsys.readouterr().err
    with ServerConnection(served.server.url, TIMEOUT_S) as connection:
        requests = prepare_requests(connection, ["text", "picture"], "zero", 0, {"S": (7,)})
        sent = {name: pb.ModelInferRequest.FromString(request) for name, request in requests.items()}
        assert list(sent["text"].inputs[0].shape) == [1, 7, 64]
        with pytest.raises(InputError, match="no model has an input 'T'; they have H, S, W, x"):
            prepare_requests(connection, ["text", "picture"], "zero", 0, {"T": (7,)})
