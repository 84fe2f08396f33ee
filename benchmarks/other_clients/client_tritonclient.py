"""tritonclient over gRPC with Python models: `python client_tritonclient.py FOLDER ADDRESS [ROOT CERTIFICATE KEY]`.

A program as those in `programs`: straight and through proxies, without TLS and with it.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from benchmarks.other_clients.client_checks import expect, refused, run_checks

_, ADDRESS, *TLS = sys.argv[1:]
WAIT_S = 20
PICTURE = np.array([b"\xff\xd8\xff\xe0\x00\x10JFIF", b"", b"\x80"], dtype=object)
FIVE = [[b"%d" % number] for number in range(5)]


def client(module: Any = triton) -> Any:
    """Return a client. Through proxies the certificate is of localhost."""
    options = [("grpc.ssl_target_name_override", "localhost")]
    if not TLS:
        return module.InferenceServerClient(ADDRESS)
    root, certificate, key = TLS
    return module.InferenceServerClient(
        ADDRESS, ssl=True, root_certificates=root, certificate_chain=certificate, private_key=key, channel_args=options
    )


def tensor(name: str, values: Any) -> triton.InferInput:
    """Return an input."""
    given = triton.InferInput(name, list(values.shape), np_to_triton_dtype(values.dtype))
    given.set_data_from_numpy(values)
    return given


def texts(name: str, *elements: bytes) -> triton.InferInput:
    """Return an input of BYTES."""
    return tensor(name, np.array(elements, dtype=object))


def pictures() -> None:
    """Bytes that are no text, of a model and in an ensemble."""
    with client() as asking:
        for model in ("lengths", "chain_bytes"):
            found = asking.infer(model, [tensor("x", PICTURE)], client_timeout=WAIT_S)
            expect(found.as_numpy("y").tolist() == PICTURE.tolist(), model)
            expect(found.as_numpy("sizes").tolist() == [10, 0, 1], model)


def told() -> None:
    """Id, parameters, timeout and a header reach the model."""
    with client() as asking:
        found = asking.infer(
            "sees",
            [tensor("a", np.ones(1, np.float32))],
            request_id="seven",
            parameters={"p": 7},
            timeout=9_000_000,
            headers={"x-user": "me"},
            client_timeout=WAIT_S,
        ).as_numpy("y")[0]
    for part in (b'"id": "seven"', b'"p": 7', b'"timeout": 9000000', b'"x-user": "me"'):
        expect(part in found, (part, found))


def errors() -> None:
    """An exception of a model, of a step, and the next request."""
    with client() as asking:
        for model, name in (("raises", "do"), ("chain_raises", "x")):
            with refused(InferenceServerException) as caught:
                asking.infer(model, [texts(name, b"value error")], client_timeout=WAIT_S)
            expect("INTERNAL" in str(caught[0]) and "ValueError: no value" in str(caught[0]), caught[0])
        expect(asking.infer("raises", [texts("do", b"right")]).as_numpy("y").tolist() == [b"fine"], "then right")


def batches() -> None:
    """Rows, of a model and in an ensemble."""
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    with client() as asking:
        for model, added in (("adds_rows", 1), ("chain_rows", 2)):
            expect(np.array_equal(asking.infer(model, [tensor("x", rows)]).as_numpy("y"), rows + added), model)


def answers(asking: Any, model: str, asked: Sequence[triton.InferInput], final: bool = False) -> list[Any]:
    """Return what comes on a stream: values, errors, None for the empty final response."""
    came: SimpleQueue[Any] = SimpleQueue()
    asking.start_stream(lambda result, error: came.put((result, error)))
    asking.async_stream_infer(model, asked, enable_empty_final_response=final)
    found: list[Any] = []
    while True:
        result, error = came.get(timeout=WAIT_S)
        if error is not None:
            found.append(error.message())
        else:
            response = result.get_response()
            if not response.outputs:
                break
            found.append(result.as_numpy("y").tolist())
        if not final and len(found) == 5:
            break
    asking.stop_stream()
    return found


def streams() -> None:
    """Responses of a decoupled model, and of one in an ensemble, with an error in the middle."""
    with client() as asking:
        for model, name in (("streams", "do"), ("chain_streams", "x")):
            expect(answers(asking, model, [texts(name, b"five")]) == FIVE, model)
            expect(answers(asking, model, [texts(name, b"five")], final=True) == FIVE, f"{model}, final")
        found = answers(asking, "streams", [texts("do", b"an error in the middle")], final=True)
        expect(found == [[b"0"], "in the middle", [b"2"]], found)


def coroutines() -> None:
    """Many requests and a stream at a time, by asyncio."""

    async def ask() -> None:
        async with client(triton_aio) as asking:
            row = np.ones((1, 2), np.float32)
            found = await asyncio.gather(*(asking.infer("adds_rows", [tensor("x", row)]) for _ in range(32)))
            expect(all(np.array_equal(each.as_numpy("y"), row + 1) for each in found), "rows")

            async def requests() -> Any:
                yield {"model_name": "streams", "inputs": [texts("do", b"five")]}

            values = []
            async for result, error in asking.stream_infer(requests()):
                expect(error is None, error)
                values.append(result.as_numpy("y").tolist())
            expect(values == FIVE, values)

    asyncio.run(ask())


def deadline() -> None:
    """The client's deadline ends its request, and the next one is answered."""
    with client() as asking:
        begin = time.monotonic()
        wait = tensor("x", np.zeros(1, np.uint8))
        with refused(InferenceServerException) as caught:
            asking.infer("echo", [wait], parameters={"milliseconds": 5000}, client_timeout=0.3)
        expect("DEADLINE_EXCEEDED" in str(caught[0]) and time.monotonic() - begin < 3, caught[0])
        expect(asking.infer("echo", [wait]).as_numpy("y").tolist() == [0], "then right")


CHECKS: Sequence[tuple[str, Callable[[], Any]]] = [
    (check.__name__, check) for check in (pictures, told, errors, batches, streams, coroutines, deadline)
]

if __name__ == "__main__":
    sys.exit(run_checks(CHECKS))
