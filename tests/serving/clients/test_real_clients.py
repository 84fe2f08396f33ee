"""The clients that people use already, unchanged, against a real server: tritonclient and perf_analyzer."""

import asyncio
import queue
from typing import Any

import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
import tritonclient.http.aio as http_aio
from tritonclient import http

from testing.fetch.perf_analyzer import BINARY
from testing.live_server import LiveServer
from testing.load import TOLERANCE, relative_error
from testing.perf_analyzer import MODES, closed_loop, run_one
from testing.reference import Example, example_of
from tests.helpers.sampled import sampled
from tests.helpers.served import inputs_of

INTERVAL_MS = 100
REQUESTS = 32
PARTS = ("stream", "shared memory")  # there is a mode that is both
SHORT = ("simple", "sync")
MEASURES = pytest.mark.alone  # perf_analyzer fails by a window of 0.1 s in which nothing is answered
LIBRARIES = {"gRPC": (triton, triton_aio), "HTTP": (http, http_aio)}


@pytest.fixture(params=LIBRARIES)
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def mlp(compiled_zoo: Any) -> Example:
    return example_of("mlp", compiled_zoo.onnx_file("mlp"))


def address(server: LiveServer, protocol: str) -> str:
    return {"gRPC": server.url, "HTTP": server.http_url}[protocol]


def assert_right(result: Any, example: Example) -> None:
    for name, wanted in example.outputs.items():
        got = result.as_numpy(name)
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        assert relative_error(got, wanted) <= TOLERANCE


@pytest.mark.parametrize("model", ["resnet50", "mobilenetv2", "mlp", "simple"])
def test_tritonclient_gets_right_answers(
    gangway_server: LiveServer, compiled_zoo: Any, model: str, protocol: str
) -> None:
    example, module = example_of(model, compiled_zoo.onnx_file(model), seed=1), LIBRARIES[protocol][0]
    with module.InferenceServerClient(address(gangway_server, protocol)) as client:
        assert client.is_server_ready()
        assert client.is_model_ready(model)
        assert_right(client.infer(model, inputs_of(example.inputs, module)), example)


@pytest.mark.parametrize("options", [{"algorithm": "gzip"}, {"algorithm": "deflate"}, {"binary": False}], ids=str)
def test_forms_of_a_request_over_http(gangway_server: LiveServer, compiled_zoo: Any, options: dict[str, Any]) -> None:
    example, binary = example_of("mobilenetv2", compiled_zoo.onnx_file("mobilenetv2")), options.get("binary", True)
    ((name, values),) = example.inputs.items()
    tensor = http.InferInput(name, values.shape, "FP32").set_data_from_numpy(values, binary_data=binary)
    outputs = [http.InferRequestedOutput(output, binary_data=binary) for output in example.outputs]
    compression = dict.fromkeys(
        ("request_compression_algorithm", "response_compression_algorithm"), options.get("algorithm")
    )
    with http.InferenceServerClient(gangway_server.http_url) as client:
        assert_right(client.infer("mobilenetv2", [tensor], outputs=outputs, **compression), example)


def test_many_at_once(gangway_server: LiveServer, mlp: Example) -> None:
    answers: queue.Queue[tuple[Any, Exception | None]] = queue.Queue()
    with triton.InferenceServerClient(gangway_server.url) as client:
        for _ in range(REQUESTS):
            client.async_infer("mlp", inputs_of(mlp.inputs), lambda result, error: answers.put((result, error)))
        for _ in range(REQUESTS):
            result, error = answers.get(timeout=30)
            assert error is None
            assert_right(result, mlp)
    with http.InferenceServerClient(gangway_server.http_url, concurrency=REQUESTS) as client:
        calls = [client.async_infer("mlp", inputs_of(mlp.inputs, http), request_id=str(n)) for n in range(REQUESTS)]
        for number, call in enumerate(calls):
            result = call.get_result(timeout=30)
            assert result.get_response()["id"] == str(number)
            assert_right(result, mlp)


def test_tritonclient_with_asyncio(gangway_server: LiveServer, mlp: Example, protocol: str) -> None:
    library, module = LIBRARIES[protocol]

    async def ask() -> list[Any]:
        async with module.InferenceServerClient(address(gangway_server, protocol)) as client:
            requests = [client.infer("mlp", inputs_of(mlp.inputs, library)) for _ in range(REQUESTS)]
            return await asyncio.gather(*requests)

    for result in asyncio.run(ask()):
        assert_right(result, mlp)


@MEASURES
@pytest.mark.parametrize("model", sampled(["simple", "mlp"], ["simple"]))
def test_perf_analyzer_over_http(gangway_server: LiveServer, model: str) -> None:
    result = run_one(gangway_server.http_url, model, "http", closed_loop(2), INTERVAL_MS, protocol="http")
    assert result.problem == ""


@MEASURES
@pytest.mark.parametrize(
    ("model", "mode"), sampled([*(("mlp", mode) for mode in MODES if mode not in PARTS), SHORT], [SHORT])
)
def test_perf_analyzer_measures_without_special_flags(gangway_server: LiveServer, model: str, mode: str) -> None:
    assert BINARY.exists(), "run `make tools` first"
    result = run_one(gangway_server.url, model, mode, MODES[mode], INTERVAL_MS, gangway_server.metrics_url)
    assert result.problem == ""
    assert len(result.requests_per_s) == MODES[mode].levels


@MEASURES
@pytest.mark.long
def test_perf_analyzer_sends_pictures(gangway_server: LiveServer) -> None:
    result = run_one(gangway_server.url, "mobilenetv2", "async", MODES["async"], INTERVAL_MS)
    assert result.problem == ""
