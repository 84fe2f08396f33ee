"""Streams and shared memory with a real server: asyncio, a client that is killed, a segment that shrinks in use."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from testing.live_server import LiveServer
from testing.processes import open_descriptors
from testing.reference import Example, example_of
from testing.waiting import until

TIMEOUT_S = 30
MANY = 60  # requests of resnet50: seconds of computing
SHRINKS = 60
USERS = 1000  # with a stream each
CLIENT = """
import sys, numpy, tritonclient.grpc as triton
client = triton.InferenceServerClient(sys.argv[1])
client.start_stream(lambda result, error: print("answer", error, flush=True))
tensor = triton.InferInput("input", [1, 3, 224, 224], "FP32")
tensor.set_data_from_numpy(numpy.zeros((1, 3, 224, 224), numpy.float32))
for number in range(int(sys.argv[2])):
    client.async_stream_infer("resnet50", [tensor], request_id=str(number))
client.stop_stream()
"""


@pytest.fixture
def client(gangway_server: LiveServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(gangway_server.url) as opened:
        yield opened
        opened.unregister_system_shared_memory()


def answered(client: triton.InferenceServerClient, model: str) -> int:
    return int(client.get_inference_statistics(model).model_stats[0].inference_stats.success.count)


def await_no_requests(server: LiveServer) -> None:
    until(lambda: not server.busy_slots())


def test_asyncio(gangway_server: LiveServer, compiled_zoo: Any) -> None:
    example = example_of("mlp", compiled_zoo.onnx_file("mlp"))
    (name, values), (output, expected) = *example.inputs.items(), *example.outputs.items()
    tensor = triton_aio.InferInput(name, values.shape, "FP32")
    tensor.set_data_from_numpy(values)

    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number in range(200):
            yield {"model_name": "mlp", "inputs": [tensor], "request_id": str(number)}

    async def ask() -> set[str]:
        seen = set()
        async with triton_aio.InferenceServerClient(gangway_server.url) as client:
            async for result, error in client.stream_infer(requests(), stream_timeout=TIMEOUT_S):
                assert error is None
                np.testing.assert_allclose(result.as_numpy(output), expected, rtol=1e-4, atol=1e-5)
                seen.add(result.get_response().id)
        return seen

    assert asyncio.run(ask()) == {str(number) for number in range(200)}


@pytest.mark.parametrize("connections", [1, 50])
def test_a_thousand_streams_are_open_at_a_time(gangway_server: LiveServer, compiled_zoo: Any, connections: int) -> None:
    """perf_analyzer and GenAI-Perf open one for each thread, a program of chats one for each user."""
    ((name, values),) = example_of("mlp", compiled_zoo.onnx_file("mlp")).inputs.items()
    tensor = triton_aio.InferInput(name, values.shape, "FP32")
    tensor.set_data_from_numpy(values)

    async def ask() -> list[str]:
        everybody = asyncio.Barrier(USERS)

        async def requests(user: int) -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": "mlp", "inputs": [tensor], "request_id": str(user)}
            await everybody.wait()

        async def chat(client: Any, user: int) -> list[str]:
            seen = []
            async for result, error in client.stream_infer(requests(user), stream_timeout=TIMEOUT_S):
                seen.append(error.message() if error else result.get_response().id)
            return seen

        own = [("grpc.use_local_subchannel_pool", 1)]
        clients = [triton_aio.InferenceServerClient(gangway_server.url, channel_args=own) for _ in range(connections)]
        found = await asyncio.gather(*(chat(clients[user % connections], user) for user in range(USERS)))
        await asyncio.gather(*(client.close() for client in clients))
        return list(chain.from_iterable(found))

    assert asyncio.run(ask()) == list(map(str, range(USERS)))


def test_a_client_that_is_killed_frees_the_cores(
    gangway_server: LiveServer, client: triton.InferenceServerClient
) -> None:
    before = answered(client, "resnet50")
    command = [sys.executable, "-c", CLIENT, gangway_server.url, str(MANY)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "answer None\n"
        process.send_signal(signal.SIGKILL)
    await_no_requests(gangway_server)
    assert 1 <= answered(client, "resnet50") - before < MANY


@pytest.fixture
def image(client: triton.InferenceServerClient, compiled_zoo: Any) -> Iterator[tuple[Any, Path, Example]]:
    """A segment with an image in it, registered as `image`."""
    example = example_of("mobilenetv2", compiled_zoo.onnx_file("mobilenetv2"))
    key = f"/regions-test-{uuid.uuid4().hex[:12]}"
    (values,) = example.inputs.values()
    handle = shm.create_shared_memory_region("image", key, values.nbytes)
    shm.set_shared_memory_region(handle, [values])
    client.register_system_shared_memory("image", key, values.nbytes)
    yield handle, Path("/dev/shm") / key[1:], example
    shm.destroy_shared_memory_region(handle)


def test_a_segment_that_shrinks_and_grows_under_requests(
    gangway_server: LiveServer, client: triton.InferenceServerClient, image: tuple[Any, Path, Example]
) -> None:
    """A process that reads it through a mapping dies of SIGBUS."""
    _, path, example = image
    ((name, values),) = example.inputs.items()
    size_bytes = values.nbytes
    pids, (front_end,) = gangway_server.pids(), gangway_server.pids()["front end"]
    tensor = triton.InferInput(name, values.shape, "FP32")
    tensor.set_shared_memory("image", size_bytes)
    client.infer("mobilenetv2", [tensor])
    descriptors = open_descriptors(front_end)
    stopping = threading.Event()

    def shake() -> None:
        while not stopping.is_set():
            for size in (0, size_bytes // 2, size_bytes):
                os.truncate(path, size)
                time.sleep(0.0005)

    shaker = threading.Thread(target=shake)
    shaker.start()
    refused = 0
    try:
        for _ in range(SHRINKS):
            try:
                client.infer("mobilenetv2", [tensor], client_timeout=TIMEOUT_S)
            except InferenceServerException as error:
                assert error.status() == "StatusCode.INVALID_ARGUMENT"
                assert "has shrunk since it was registered" in error.message()
                refused += 1
    finally:
        stopping.set()
        shaker.join()
    assert refused > 0
    assert gangway_server.pids() == pids
    path.write_bytes(values.tobytes())
    ((output, expected),) = example.outputs.items()
    got = client.infer("mobilenetv2", [tensor]).as_numpy(output)
    assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()
    until(lambda: open_descriptors(front_end) <= descriptors + 1)  # of a connection of this test
