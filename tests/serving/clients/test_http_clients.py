"""Triton's own HTTP clients against `gangway serve`, and the same answers as over gRPC."""

import asyncio
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException, np_to_triton_dtype, shared_memory

from testing.live_server import LiveServer
from testing.load import TOLERANCE, relative_error
from testing.perf_analyzer import closed_loop, run_one
from testing.reference import Example, example_of

Ask = Callable[..., Any]
REQUESTS = 16
INTERVAL_MS = 100


@pytest.fixture(scope="module")
def client(gangway_server: LiveServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(gangway_server.http_url, concurrency=REQUESTS) as client:
        yield client


@pytest.fixture(scope="module")
def grpc_client(gangway_server: LiveServer) -> Iterator[triton_grpc.InferenceServerClient]:
    with triton_grpc.InferenceServerClient(gangway_server.url) as client:
        yield client


@pytest.fixture(scope="module")
def image(compiled_zoo: Any) -> Example:
    return example_of("mobilenetv2", compiled_zoo.onnx_file("mobilenetv2"))


def inputs_of(example: Example, binary: bool = True) -> list[triton.InferInput]:
    found = []
    for name, values in example.inputs.items():
        found.append(triton.InferInput(name, values.shape, np_to_triton_dtype(values.dtype)))
        found[-1].set_data_from_numpy(values, binary_data=binary)
    return found


def outputs_of(example: Example, binary: bool = True) -> list[triton.InferRequestedOutput]:
    return [triton.InferRequestedOutput(name, binary_data=binary) for name in example.outputs]


def assert_right(result: triton.InferResult, example: Example) -> None:
    for name, wanted in example.outputs.items():
        got = result.as_numpy(name)
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        assert relative_error(got, wanted) <= TOLERANCE


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_images(client: triton.InferenceServerClient, image: Example, binary: bool) -> None:
    outputs = outputs_of(image, binary)
    assert_right(client.infer("mobilenetv2", inputs_of(image, binary), outputs=outputs, request_id="7"), image)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compression(client: triton.InferenceServerClient, image: Example, algorithm: str) -> None:
    result = client.infer(
        "mobilenetv2",
        inputs_of(image),
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    assert_right(result, image)


def test_the_numbers_are_those_of_grpc(
    client: triton.InferenceServerClient, grpc_client: triton_grpc.InferenceServerClient, image: Example
) -> None:
    (name,) = image.inputs
    tensor = triton_grpc.InferInput(name, image.inputs[name].shape, "FP32")
    tensor.set_data_from_numpy(image.inputs[name])
    wanted = grpc_client.infer("mobilenetv2", [tensor]).as_numpy("output")
    for binary in (True, False):
        result = client.infer("mobilenetv2", inputs_of(image, binary), outputs=outputs_of(image, binary))
        assert relative_error(result.as_numpy("output"), wanted) < 1e-6


def test_async_infer(client: triton.InferenceServerClient, image: Example) -> None:
    calls = [client.async_infer("mobilenetv2", inputs_of(image), request_id=str(n)) for n in range(REQUESTS)]
    for number, call in enumerate(calls):
        result = call.get_result(timeout=20)
        assert result.get_response()["id"] == str(number)
        assert_right(result, image)


def test_aio(gangway_server: LiveServer, image: Example) -> None:
    async def ask() -> list[triton.InferResult]:
        async with triton_aio.InferenceServerClient(gangway_server.http_url) as client:
            assert await client.is_server_live() and await client.is_server_ready()
            assert await client.is_model_ready("mobilenetv2", "1")
            assert (await client.get_model_metadata("mobilenetv2"))["name"] == "mobilenetv2"
            config = await client.get_model_config("mobilenetv2")
            assert config["input"][0]["dims"] == [3, 224, 224]
            calls = [client.infer("mobilenetv2", inputs_of(image)) for _ in range(REQUESTS)]
            return list(await asyncio.gather(*calls))

    for result in asyncio.run(ask()):
        assert_right(result, image)


def test_what_clients_ask_besides(
    client: triton.InferenceServerClient, grpc_client: triton_grpc.InferenceServerClient
) -> None:
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("simple")
    assert not client.is_model_ready("simple", "9") and not client.is_model_ready("nobody")
    metadata = client.get_server_metadata()
    assert metadata["name"] == "gangway" and "binary_tensor_data" in metadata["extensions"]
    assert client.get_model_metadata("simple") == grpc_json(grpc_client.get_model_metadata("simple", as_json=True))
    config = client.get_model_config("simple")
    assert (config["name"], config["max_batch_size"], config["input"][0]["dims"]) == ("simple", 8, [16])
    index = {entry["name"]: entry for entry in client.get_model_repository_index()}
    assert index["mlp"] == {"name": "mlp", "version": "1", "state": "READY"}
    (statistics,) = client.get_inference_statistics("mobilenetv2")["model_stats"]
    assert statistics["inference_count"] >= 0 and isinstance(statistics["inference_stats"]["success"]["ns"], int)
    assert len(client.get_inference_statistics()["model_stats"]) == len(index)


def grpc_json(content: Any, name: str = "") -> Any:
    """protobuf's JSON, with numbers where it has strings of digits."""
    match content:
        case dict():
            return {key: grpc_json(value, key) for key, value in content.items()}
        case list():
            return [grpc_json(value, name) for value in content]
        case str() if name == "shape":
            return int(content)
    return content


def test_errors_reach_the_client(client: triton.InferenceServerClient, image: Example) -> None:
    with pytest.raises(InferenceServerException, match="unknown model: 'nobody' is not found") as caught:
        client.infer("nobody", inputs_of(image))
    assert caught.value.status() == "404"
    with pytest.raises(InferenceServerException, match="data-type is 'FP64'") as caught:
        wrong = triton.InferInput("input", [1, 3, 224, 224], "FP64")
        wrong.set_data_from_numpy(np.zeros((1, 3, 224, 224)))
        client.infer("mobilenetv2", [wrong])
    assert caught.value.status() == "400"
    with pytest.raises(InferenceServerException, match="unknown model: 'nobody'"):
        client.get_model_config("nobody")


def test_shared_memory(client: triton.InferenceServerClient) -> None:
    a, b = np.arange(16, dtype=np.int32)[None], np.ones((1, 16), np.int32)
    keys = [f"/gangway-test-http-{os.getpid()}-{which}" for which in ("in", "out")]
    source = shared_memory.create_shared_memory_region("in", keys[0], 128)
    target = shared_memory.create_shared_memory_region("out", keys[1], 64)
    try:
        shared_memory.set_shared_memory_region(source, [a, b])
        client.register_system_shared_memory("http-in", keys[0], 128)
        client.register_system_shared_memory("http-out", keys[1], 64)
        region = {"name": "http-out", "key": keys[1], "offset": 0, "byte_size": 64}
        assert client.get_system_shared_memory_status("http-out") == [region]
        inputs = [triton.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
        outputs = [triton.InferRequestedOutput(name) for name in ("OUTPUT0", "OUTPUT1")]
        inputs[0].set_shared_memory("http-in", 64)
        inputs[1].set_shared_memory("http-in", 64, offset=64)
        outputs[0].set_shared_memory("http-out", 64)
        for _ in range(2):
            result = client.infer("simple", inputs, outputs=outputs)
            output = result.get_output("OUTPUT0")
            assert output == {"name": "OUTPUT0", "datatype": "INT32", "shape": [1, 16]}  # C++ clients want no more
            np.testing.assert_array_equal(shared_memory.get_contents_as_numpy(target, np.int32, [1, 16]), a + 1)
            np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), a - 1)
            inputs[1] = triton.InferInput("INPUT1", [1, 16], "INT32")  # then one of them in the body
            inputs[1].set_data_from_numpy(b)
    finally:
        client.unregister_system_shared_memory("http-in")
        client.unregister_system_shared_memory("http-out")
        shared_memory.destroy_shared_memory_region(source)
        shared_memory.destroy_shared_memory_region(target)


def test_settings_and_control(client: triton.InferenceServerClient, image: Example) -> None:
    assert client.get_trace_settings("simple")["trace_level"] == ["OFF"]
    assert client.update_trace_settings(settings={"trace_rate": "7"})["trace_rate"] == "7"
    assert client.update_trace_settings(settings={"trace_rate": None})["trace_rate"] == "1000"
    assert client.update_log_settings({"log_info": True})["log_info"] is True
    assert client.get_log_settings()["log_verbose_level"] == 0
    assert client.get_cuda_shared_memory_status() == []
    client.unregister_cuda_shared_memory()
    with pytest.raises(InferenceServerException) as caught:
        client.load_model("simple")  # this server loads what the repository has
    assert caught.value.status() in ("400", "503")
    outputs = [triton.InferRequestedOutput("output", class_count=3, binary_data=False)]
    result = client.infer("mobilenetv2", inputs_of(image), outputs=outputs)
    best = [int(text.split(":")[1]) for text in result.get_output("output")["data"]]
    assert best == np.argsort(image.outputs["output"][0])[::-1][:3].tolist()


@pytest.mark.parametrize("model", ["simple", "mlp"])
def test_perf_analyzer(gangway_server: LiveServer, model: str) -> None:
    result = run_one(gangway_server.http_url, model, "http", closed_loop(2), INTERVAL_MS, protocol="http")
    assert result.problem == ""
