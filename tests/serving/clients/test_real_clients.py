"""The clients that people use already, unchanged, against a real server: tritonclient and perf_analyzer."""

import asyncio
import queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import np_to_triton_dtype

from testing.fetch.perf_analyzer import BINARY
from testing.live_server import LiveServer
from testing.load import TOLERANCE, relative_error
from testing.perf_analyzer import MODES, run_one
from testing.reference import Example, example_of

INTERVAL_MS = 100
REQUESTS = 32
TIMEOUT_S = 30
PARTS = ("stream", "shared memory")  # there is a mode that is both


@pytest.fixture(scope="module")
def mlp(compiled_zoo: Any) -> Example:
    return example_of("mlp", compiled_zoo.onnx_file("mlp"))


def inputs_of(example: Example) -> list[triton.InferInput]:
    found = []
    for name, values in example.inputs.items():
        found.append(triton.InferInput(name, values.shape, np_to_triton_dtype(values.dtype)))
        found[-1].set_data_from_numpy(values)
    return found


def assert_right(result: triton.InferResult, example: Example) -> None:
    for name, wanted in example.outputs.items():
        got = result.as_numpy(name)
        assert got.shape == wanted.shape
        if wanted.dtype.kind == "f":
            assert relative_error(got, wanted) <= TOLERANCE
        else:
            assert np.array_equal(got, wanted)


@pytest.mark.parametrize("model", ["resnet50", "mobilenetv2", "mlp", "simple"])
def test_tritonclient_gets_right_answers(gangway_server: LiveServer, compiled_zoo: Any, model: str) -> None:
    example = example_of(model, compiled_zoo.onnx_file(model), seed=1)
    with triton.InferenceServerClient(gangway_server.url) as client:
        assert client.is_server_ready()
        assert client.is_model_ready(model)
        assert_right(client.infer(model, inputs_of(example), client_timeout=TIMEOUT_S), example)


def test_tritonclient_with_callbacks(gangway_server: LiveServer, mlp: Example) -> None:
    answers: queue.Queue[tuple[triton.InferResult, Exception | None]] = queue.Queue()
    with triton.InferenceServerClient(gangway_server.url) as client:
        for _ in range(REQUESTS):
            client.async_infer("mlp", inputs_of(mlp), lambda result, error: answers.put((result, error)))
        for _ in range(REQUESTS):
            result, error = answers.get(timeout=TIMEOUT_S)
            assert error is None
            assert_right(result, mlp)


def test_tritonclient_with_asyncio(gangway_server: LiveServer, mlp: Example) -> None:
    async def ask() -> list[triton.InferResult]:
        async with triton_aio.InferenceServerClient(gangway_server.url) as client:
            requests = [client.infer("mlp", inputs_of(mlp), client_timeout=TIMEOUT_S) for _ in range(REQUESTS)]
            return await asyncio.gather(*requests)

    for result in asyncio.run(ask()):
        assert_right(result, mlp)


@pytest.mark.parametrize(
    ("model", "mode"), [*(("mlp", mode) for mode in MODES if mode not in PARTS), ("simple", "sync")]
)
def test_perf_analyzer_measures_without_special_flags(gangway_server: LiveServer, model: str, mode: str) -> None:
    assert BINARY.exists(), "run `make tools` first"
    result = run_one(gangway_server.url, model, mode, MODES[mode], INTERVAL_MS, gangway_server.metrics_url)
    assert result.problem == ""
    assert len(result.requests_per_s) == MODES[mode].levels


def test_perf_analyzer_sends_pictures(gangway_server: LiveServer) -> None:
    result = run_one(gangway_server.url, "mobilenetv2", "async", MODES["async"], INTERVAL_MS)
    assert result.problem == ""
