"""Every public method of Triton's four client classes, called against `gangway serve` and answered as it should be."""

import asyncio
import inspect
import json
import os
import queue
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_sync
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http as http_sync
import tritonclient.http.aio as http_aio
from tritonclient.grpc.auth import BasicAuth
from tritonclient.utils import InferenceServerException

from testing.live_server import LiveServer, live_server
from tests.conftest import CompiledZoo
from tests.helpers.http_requests import ask_http

TIMEOUT_S = 20
A, B = np.arange(16, dtype=np.int32)[None], np.ones((1, 16), np.int32)
POLICY = json.dumps({"max_batch_size": 4})
REGION_BYTES = 128


@dataclass
class Client:
    """One of the four, inside the event loop; remembers which of its methods were called."""

    library: Any
    real: Any
    address: str  # of HTTP
    called: set[str] = field(default_factory=set)

    @property
    def is_grpc(self) -> bool:
        return ".grpc" in self.library.__name__

    async def ask(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method; wait for its answer if the client is one of asyncio."""
        self.called.add(method)
        answer = getattr(self.real, method)(*arguments, **named)
        return await answer if inspect.isawaitable(answer) else answer

    async def read(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method that answers with data, as JSON over both protocols."""
        return await self.ask(method, *arguments, **named, **({"as_json": True} if self.is_grpc else {}))

    def inputs(self) -> list[Any]:
        tensors = [self.library.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
        for tensor, values in zip(tensors, (A, B), strict=True):
            tensor.set_data_from_numpy(values)
        return tensors

    def public_methods(self) -> set[str]:
        kind = self.library.InferenceServerClient
        return {name for name, member in inspect.getmembers(kind, callable) if not name.startswith("_")}


LIBRARIES: dict[str, Any] = {"grpc": grpc_sync, "grpc.aio": grpc_aio, "http": http_sync, "http.aio": http_aio}


@pytest.fixture(scope="module")
def controlled(compiled_zoo: CompiledZoo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server whose models clients may load; it has `simple`."""
    repository = tmp_path_factory.mktemp("models")
    (repository / "simple").symlink_to(compiled_zoo.repository / "simple")
    explicit = ["--model-control-mode=explicit", "--load-model=simple", f"--cache-dir={compiled_zoo.cache_dir}"]
    with live_server(repository, explicit) as server:
        yield server
    assert server.process.returncode == 0


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_public_method(controlled: LiveServer, compiled_zoo: CompiledZoo, library: str) -> None:
    module = LIBRARIES[library]

    async def call_all() -> Client:
        url = controlled.url if ".grpc" in module.__name__ else controlled.http_url
        client = Client(module, module.InferenceServerClient(url), controlled.http_url)
        await ask_what_there_is(client)
        await change_settings(client)
        await share_memory(client, f"client-methods-{library}-{os.getpid()}")
        await load_and_unload(client, compiled_zoo.onnx_file("simple").read_bytes())
        await OWN[library](client)
        await client.ask("close")
        return client

    client = asyncio.run(call_all())
    assert client.called == client.public_methods()


async def ask_what_there_is(client: Client) -> None:
    plugin = BasicAuth("somebody", "password")
    await client.ask("register_plugin", plugin)
    assert await client.ask("plugin") is plugin
    assert await client.ask("is_server_live") and await client.ask("is_server_ready")
    assert await client.ask("is_model_ready", "simple", "1") and not await client.ask("is_model_ready", "simple", "7")
    assert (await client.read("get_server_metadata"))["name"] == "gangway"
    metadata = await client.read("get_model_metadata", "simple")
    assert [tensor["name"] for tensor in metadata["inputs"]] == ["INPUT0", "INPUT1"]
    config = await client.read("get_model_config", "simple", "1")
    assert config.get("config", config)["max_batch_size"] == 8
    await client.ask("unregister_plugin")
    before, answered = await count(client), (await client.ask("infer", "simple", client.inputs(), request_id="7"))
    assert_right(answered)
    assert await count(client) == before + 1


async def count(client: Client) -> int:
    (statistics,) = (await client.read("get_inference_statistics", "simple"))["model_stats"]
    return int(statistics["inference_stats"]["success"].get("count", 0))


def assert_right(result: Any) -> None:
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), A + B)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), A - B)


async def change_settings(client: Client) -> None:
    own = await client.read("update_trace_settings", "simple", {"trace_rate": "7"})
    assert (value_of(own, "trace_rate"), value_of(own, "trace_level")) == ("7", "OFF")
    back = await client.read("update_trace_settings", model_name="simple", settings={"trace_rate": None})
    assert value_of(back, "trace_rate") == value_of(await client.read("get_trace_settings"), "trace_rate") == "1000"
    assert value_of(await client.read("update_log_settings", {"log_verbose_level": 1}), "log_verbose_level") == 1
    assert value_of(await client.read("update_log_settings", {"log_verbose_level": 0}), "log_info") is True
    assert value_of(await client.read("get_log_settings"), "log_verbose_level") == 0


def value_of(answer: Any, name: str) -> Any:
    """The first value of a setting; gRPC wraps it in messages."""
    found = answer.get("settings", answer)[name]
    while isinstance(found, dict | list):
        found = next(iter(found.values() if isinstance(found, dict) else found))
    return found


async def share_memory(client: Client, segment: str) -> None:
    path = Path("/dev/shm") / segment
    path.write_bytes(bytes(REGION_BYTES))
    try:
        await client.ask("register_system_shared_memory", segment, f"/{segment}", REGION_BYTES)
        (region,) = entries(await client.read("get_system_shared_memory_status", segment), "regions")
        assert (region["key"], int(region["byte_size"])) == (f"/{segment}", REGION_BYTES)
        await client.ask("unregister_system_shared_memory", segment)
    finally:
        path.unlink()
    assert entries(await client.read("get_system_shared_memory_status"), "regions") == []
    assert entries(await client.read("get_cuda_shared_memory_status"), "regions") == []
    with pytest.raises(InferenceServerException, match="GPUs not supported"):
        await client.ask("register_cuda_shared_memory", segment, b"aGFuZGxl", 0, REGION_BYTES)
    await client.ask("unregister_cuda_shared_memory")


def entries(answer: Any, name: str) -> list[Any]:
    """What HTTP has as a list, and gRPC in a message."""
    if isinstance(answer, list):
        return answer
    found = answer.get(name, [])
    return list(found.values()) if isinstance(found, dict) else list(found)


async def load_and_unload(client: Client, onnx: bytes) -> None:
    files = {"file:1/model.onnx": onnx}
    await client.ask("load_model", "copy", config=POLICY, files=files)
    config = await client.read("get_model_config", "copy")
    assert config.get("config", config)["max_batch_size"] == 4
    assert_right(await client.ask("infer", "copy", client.inputs()))
    await client.ask("unload_model", "copy")
    deadline = time.monotonic() + TIMEOUT_S
    while "copy" in [entry["name"] for entry in entries(await client.read("get_model_repository_index"), "models")]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    with pytest.raises(InferenceServerException, match="failed to load 'nobody'"):
        await client.ask("load_model", "nobody")


async def call_back_and_stream(client: Client) -> None:
    answers: queue.Queue[tuple[Any, Exception | None]] = queue.Queue()
    await client.ask("async_infer", "simple", client.inputs(), lambda result, error: answers.put((result, error)))
    await client.ask("start_stream", lambda result, error: answers.put((result, error)), stream_timeout=TIMEOUT_S)
    await client.ask("async_stream_infer", "simple", client.inputs(), request_id="7")
    await client.ask("stop_stream")
    for _ in range(2):
        result, error = answers.get(timeout=TIMEOUT_S)
        assert error is None
        assert_right(result)


async def stream(client: Client) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number in range(3):
            yield {"model_name": "simple", "inputs": client.inputs(), "request_id": str(number)}

    seen = set()
    async for result, error in await client.ask("stream_infer", requests(), stream_timeout=TIMEOUT_S):
        assert error is None
        assert_right(result)
        seen.add(result.get_response().id)
    assert seen == {"0", "1", "2"}


async def wait_later_and_use_own_connection(client: Client) -> None:
    assert_right((await client.ask("async_infer", "simple", client.inputs())).get_result(timeout=TIMEOUT_S))
    await use_own_connection(client)


async def use_own_connection(client: Client) -> None:
    """The library makes the body and reads the answer; somebody else sends them."""
    outputs = [client.library.InferRequestedOutput(name, binary_data=True) for name in ("OUTPUT0", "OUTPUT1")]
    body, json_bytes = await client.ask("generate_request_body", client.inputs(), outputs=outputs)
    headers = {"Inference-Header-Content-Length": str(json_bytes)}
    answer = ask_http(client.address, "POST", "/v2/models/simple/infer", bytes(body), headers)
    header_length = int(answer.headers["inference-header-content-length"])
    assert_right(await client.ask("parse_response_body", answer.body, header_length=header_length))


OWN: dict[str, Callable[[Client], Any]] = {
    "grpc": call_back_and_stream,
    "grpc.aio": stream,
    "http": wait_later_and_use_own_connection,
    "http.aio": use_own_connection,
}
