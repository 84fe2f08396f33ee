"""KServe's own clients: `python client_kserve.py HTTP_HOST:PORT GRPC_HOST:PORT`, in an environment that has kserve."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import httpx  # pyright: ignore[reportMissingImports]
import numpy as np
from client_checks import addresses, expect, refused, run_checks
from kserve.inference_client import (  # pyright: ignore[reportMissingImports]
    InferenceGRPCClient,
    InferenceRESTClient,
    RESTConfig,
)
from kserve.protocol.infer_type import (  # pyright: ignore[reportMissingImports]
    InferInput,
    InferRequest,
    InferResponse,
    RequestedOutput,
)

A, B = np.arange(16, dtype=np.int32).reshape(1, 16), np.ones((1, 16), np.int32)
HTTP, GRPC = addresses()
BASE = f"http://{HTTP}"


def request(model: str = "simple", binary: bool = True, wanted: bool | None = None) -> InferRequest:
    """Return a request; `binary`: how tensors go, `wanted`: how they come back."""
    inputs = [InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
    for tensor, values in zip(inputs, (A, B), strict=True):
        tensor.set_data_from_numpy(values, binary_data=binary)
    parameters = {} if wanted is None else {"binary_data": wanted}
    outputs = None if wanted is None else [RequestedOutput(name, parameters) for name in ("OUTPUT0", "OUTPUT1")]
    return InferRequest(model, inputs, request_id="7", request_outputs=outputs)


def check(response: InferResponse) -> None:
    """Raise AssertionError unless it is the right answer."""
    expect((response.model_name, response.id) == ("simple", "7"), response)
    found = {output.name: output.as_numpy() for output in response.outputs}
    expect(np.array_equal(found["OUTPUT0"], A + B) and np.array_equal(found["OUTPUT1"], A - B), found)


def rest(ask: Callable[[InferenceRESTClient], Awaitable[Any]], protocol: str = "v2") -> Callable[[], Any]:
    """Return a check that asks over HTTP."""

    async def asking() -> Any:
        async with InferenceRESTClient(RESTConfig(protocol=protocol, timeout=20)) as client:
            return await ask(client)

    return lambda: asyncio.run(asking())


def remote(ask: Callable[[InferenceGRPCClient], Awaitable[Any]]) -> Callable[[], Any]:
    """Return a check that asks over gRPC."""

    async def asking() -> Any:
        async with InferenceGRPCClient(GRPC, timeout=20) as client:
            return await ask(client)

    return lambda: asyncio.run(asking())


async def rest_health(client: InferenceRESTClient) -> None:
    """Its bodies are read."""
    expect(await client.is_server_live(BASE) is True, "live")
    expect(await client.is_server_ready(BASE) is True, "ready")
    expect(await client.is_model_ready(BASE, "simple") is True, "model ready")
    expect(await client.is_model_ready(BASE, "nobody") is False, "another model is not")


async def rest_json(client: InferenceRESTClient) -> None:
    """Tensors are arrays."""
    check(await client.infer(BASE, request(binary=False), model_name="simple"))


async def rest_binary(client: InferenceRESTClient) -> None:
    """Tensors are bytes, one way and both."""
    check(await client.infer(BASE, request(), model_name="simple"))
    check(await client.infer(BASE, request(wanted=True), model_name="simple"))


async def rest_refused(client: InferenceRESTClient) -> None:
    """The status and the words arrive."""
    with refused(httpx.HTTPStatusError) as caught:
        await client.infer(BASE, request("nobody"), model_name="nobody")
    expect("unknown model: 'nobody' is not found, '404" in str(caught[0]), caught[0])


async def first_protocol(client: InferenceRESTClient) -> None:
    """Rows of two inputs, and what is refused."""
    expect(await client.is_model_ready(BASE, "simple") is True, "model ready")
    rows = {"instances": [{"INPUT0": A[0].tolist(), "INPUT1": B[0].tolist()}]}
    answer = await client.infer(BASE, rows, model_name="simple")
    expect(answer == {"predictions": [{"OUTPUT0": (A + B)[0].tolist(), "OUTPUT1": (A - B)[0].tolist()}]}, answer)
    with refused(httpx.HTTPStatusError) as caught:
        await client.infer(BASE, rows, model_name="nobody")
    expect("'nobody' is not found, '404" in str(caught[0]), caught[0])


async def grpc_health(client: InferenceGRPCClient) -> None:
    """All are ready."""
    expect(await client.is_server_live() and await client.is_server_ready(), "live and ready")
    expect(await client.is_model_ready("simple"), "model ready")


async def grpc_infer(client: InferenceGRPCClient) -> None:
    """Contents are raw, and typed."""
    check(await client.infer(request()))
    check(await client.infer(request(binary=False)))


async def grpc_refused(client: InferenceGRPCClient) -> None:
    """The code arrives."""
    with refused(grpc.RpcError) as caught:
        await client.infer(request("nobody"))
    expect(caught[0].code() is grpc.StatusCode.NOT_FOUND, caught[0])


CHECKS = (
    ("REST: live, ready", rest(rest_health)),
    ("REST: infer, JSON", rest(rest_json)),
    ("REST: infer, binary", rest(rest_binary)),
    ("REST: refused", rest(rest_refused)),
    ("REST: the first protocol", rest(first_protocol, "v1")),
    ("gRPC: live, ready", remote(grpc_health)),
    ("gRPC: infer, raw and typed", remote(grpc_infer)),
    ("gRPC: refused", remote(grpc_refused)),
)

if __name__ == "__main__":
    sys.exit(run_checks(CHECKS))
