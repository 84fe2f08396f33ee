"""PyTriton's clients of Python models: `python client_pytriton.py HTTP_HOST:PORT GRPC_HOST:PORT`, where pytriton is.

The models are those of `benchmarks.differential` (`messages.PYTHON_MODELS`).
"""

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from client_checks import addresses, expect, refused, run_checks
from pytriton.client import (  # pyright: ignore[reportMissingImports]
    AsyncioDecoupledModelClient,
    AsyncioModelClient,
    DecoupledModelClient,
    FuturesModelClient,
    ModelClient,
)
from pytriton.client.exceptions import (  # pyright: ignore[reportMissingImports]
    PyTritonClientInferenceServerError,
    PyTritonClientTimeoutError,
)

HTTP, GRPC = addresses()
URLS = {"HTTP": f"http://{HTTP}", "gRPC": f"grpc://{GRPC}"}
ROW = np.array([[1, 2]], np.float32)
WAIT_S = 20


def texts(*values: bytes) -> Any:
    """Return elements of BYTES."""
    return np.array(values, dtype=object)


def sample(url: str) -> None:
    """One sample, without a batch dimension, of a model with one and of a model without."""
    with ModelClient(url, "adds_rows", inference_timeout_s=WAIT_S) as client:
        expect(client.infer_sample(ROW[0])["y"].tolist() == [2, 3], "a sample")
    with ModelClient(url, "adds", inference_timeout_s=WAIT_S) as client:
        expect(client.infer_sample(x=ROW[0])["y"].tolist() == [2, 3], "by name")


def batch(url: str) -> None:
    """A batch, of a model and of an ensemble."""
    for model, added in (("adds_rows", 1), ("chain_rows", 2)):
        with ModelClient(url, model, inference_timeout_s=WAIT_S) as client:
            found = client.infer_batch(np.repeat(ROW, 3, 0))["y"]
            expect(found.tolist() == [[1 + added, 2 + added]] * 3, (model, found))


def contents(url: str) -> None:
    """Bytes that are no text reach the model, alone and in an ensemble, and come back."""
    for model in ("lengths", "chain_bytes"):
        with ModelClient(url, model, inference_timeout_s=WAIT_S) as client:
            given = texts(b"\xff\xd8\xff\xe0\x00\x10JFIF", b"\x80")
            found = client.infer_sample(given)
            expect(found["y"].tolist() == given.tolist(), found)
            expect(found["sizes"].tolist() == [10, 1], found)


def parameters(url: str) -> None:
    """Parameters and headers reach the model."""
    with ModelClient(url, "sees", inference_timeout_s=WAIT_S) as client:
        told = client.infer_sample(a=ROW[0], parameters={"p": 7, "q": "x"}, headers={"x-user": "me"})["y"][0]
        expect(b'"p": 7' in told and b'"q": "x"' in told and b'"x-user": "me"' in told, told)


def errors(url: str) -> None:
    """A model's error arrives, and the next request is answered."""
    with ModelClient(url, "raises", inference_timeout_s=WAIT_S) as client:
        with refused(PyTritonClientInferenceServerError) as caught:
            client.infer_sample(texts(b"value error"))
        expect("no value" in str(caught[0]), caught[0])
        expect(client.infer_sample(texts(b"right"))["y"].tolist() == [b"fine"], "then right")


def no_such_model(url: str) -> None:
    """A model that is not there is waited for, so long."""
    with (
        refused(PyTritonClientTimeoutError),
        ModelClient(url, "nobody", init_timeout_s=1, inference_timeout_s=1) as client,
    ):
        client.infer_sample(ROW)


def load(url: str) -> None:
    """Load, unload, configuration."""
    with ModelClient(url, "adds", inference_timeout_s=WAIT_S) as client:
        expect(client.model_config.model_name == "adds", client.model_config)
        client.unload_model()
        client.load_model()
        expect(client.infer_sample(ROW[0])["y"].tolist() == [2, 3], "loaded again")


def futures(url: str) -> None:
    """Many at a time, by threads: by one over gRPC, since further ones speak HTTP there, whatever the server."""
    workers = 8 if url == URLS["HTTP"] else 1
    with FuturesModelClient(url, "adds_rows", max_workers=workers, inference_timeout_s=WAIT_S) as client:
        asked = [client.infer_sample(ROW[0] + number) for number in range(32)]
        found = [each.result(WAIT_S)["y"].tolist() for each in asked]
    expect(found == [[2 + number, 3 + number] for number in range(32)], found)


def coroutines(url: str) -> None:
    """Many at a time, by coroutines."""

    async def ask() -> list[Any]:
        async with AsyncioModelClient(url, "adds_rows", inference_timeout_s=WAIT_S) as client:
            return list(await asyncio.gather(*(client.infer_sample(ROW[0] + number) for number in range(16))))

    found = [each["y"].tolist() for each in asyncio.run(ask())]
    expect(found == [[2 + number, 3 + number] for number in range(16)], found)


def stream() -> None:
    """Several responses of a decoupled model, of one in an ensemble, and an error."""
    for model, name in (("streams", "do"), ("chain_streams", "x")):
        with DecoupledModelClient(URLS["gRPC"], model, inference_timeout_s=WAIT_S) as client:
            found = [each["y"].tolist() for each in client.infer_sample(**{name: texts(b"five")})]
            expect(found == [[b"%d" % number] for number in range(5)], (model, found))
    with DecoupledModelClient(URLS["gRPC"], "streams", inference_timeout_s=WAIT_S) as client:
        with refused(PyTritonClientInferenceServerError) as caught:
            list(client.infer_sample(texts(b"raises")))
        expect("before any response" in str(caught[0]), caught[0])


def stream_in_coroutines() -> None:
    """The same by asyncio."""

    async def ask() -> list[Any]:
        async with AsyncioDecoupledModelClient(URLS["gRPC"], "streams", inference_timeout_s=WAIT_S) as client:
            return [each["y"].tolist() async for each in client.infer_sample(texts(b"five"))]

    found = asyncio.run(ask())
    expect(found == [[b"%d" % number] for number in range(5)], found)


CHECKS: list[tuple[str, Callable[[], Any]]] = [
    (f"{kind}: {check.__name__.replace('_', ' ')}", lambda check=check, url=url: check(url))  # type: ignore[misc]
    for kind, url in URLS.items()
    for check in (sample, batch, contents, parameters, errors, no_such_model, load, futures, coroutines)
]
CHECKS += [("gRPC: stream", stream), ("gRPC: stream in coroutines", stream_in_coroutines)]

if __name__ == "__main__":
    sys.exit(run_checks(CHECKS))
