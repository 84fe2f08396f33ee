"""Triton's generate extension over a front end: what members become, refusals, and what clients may leave unread."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Any

import pytest

from gangway.server.errors import RequestError
from gangway.server.models.tensors import Tensor
from gangway.server.serving.http.generate import WORTH_BYTES, EventStreams
from gangway.server.serving.http.infer import deduced_shape
from gangway.server.serving.loop import ServingLoop

Ask = Callable[..., Any]


def test_generate(http: Ask) -> None:
    answer = http("POST", "/v2/models/identity_fp32/generate", {"x": [1, 2.5, 3, 4], "id": "a", "own": 3})
    assert answer.content == {"id": "a", "model_name": "identity_fp32", "model_version": "1", "y": [1, 2.5, 3, 4]}
    nested = http("POST", "/v2/models/identity_int8/generate", {"parameters": {"x": [[1, 2, 3, 4]]}})
    assert nested.content["y"] == [1, 2, 3, 4]


def test_generate_stream_is_one_event(http: Ask) -> None:
    answer = http("POST", "/v2/models/identity_int8/versions/1/generate_stream", {"x": [1, 2, 3, 4]})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.body == b'data: {"model_name":"identity_int8","model_version":"1","y":[1,2,3,4]}\n\n'


@pytest.mark.parametrize(
    ("model", "body", "status", "said"),
    [
        (
            "identity_int8",
            {"x": [1, 2, 3]},
            400,
            "input 'x' for model 'identity_int8': 3 elements do not make a tensor",
        ),
        ("identity_int8", {"x": [1, 2, 3, "4"]}, 400, "a string (4) is no element of INT8"),
        ("identity_int8", {"x": [1, 2, 3, 4], "own": [1]}, 400, "parameter 'own': expected a string, a number or"),
        ("identity_int8", {"y": 1}, 400, "expected 1 inputs but got 0 inputs for model 'identity_int8'"),
        ("identity_int8", [1], 400, "expected a JSON object, got an array"),
        ("identity_int8", {"x": [1, 2, 3, 4], "timeout": -1}, 400, "parameter 'timeout'"),
        ("nobody", {"x": 1}, 404, "Request for unknown model: 'nobody' is not found"),
    ],
)
@pytest.mark.parametrize("kind", ["generate", "generate_stream"])
def test_generate_refusals(http: Ask, kind: str, model: str, body: Any, status: int, said: str) -> None:
    answer = http("POST", f"/v2/models/{model}/{kind}", body)
    assert said in answer.content["error"]
    assert (answer.status, answer.headers["content-type"]) == (status, "application/json")


# As Triton 2.51 has it: of how many elements, and for a model with which tensor. None: refused.
SHAPES: list[tuple[list[int], int, list[int] | None]] = [
    ([1], 1, [1]),
    ([1], 2, None),
    ([1], 0, None),
    ([-1], 1, [1]),
    ([-1], 3, [3]),
    ([-1], 0, [0]),
    ([-1, 2], 1, None),
    ([-1, 2], 4, [2, 2]),
    ([-1, -1], 3, [1, 3]),
    ([2, -1, 3], 12, [2, 2, 3]),
    ([2, -1, 3], 2, None),
    ([], 1, []),
]


@pytest.mark.parametrize(("shape", "elements", "wanted"), SHAPES)
def test_the_last_open_size_takes_the_elements(shape: list[int], elements: int, wanted: list[int] | None) -> None:
    tensor = Tensor("x", "INT32", tuple(shape), 0)
    if wanted is None:
        with pytest.raises(RequestError, match=f"{elements} elements do not make a tensor"):
            deduced_shape(tensor, elements, "input 'x'")
    else:
        assert deduced_shape(tensor, elements, "input 'x'") == wanted


def test_a_batch_takes_the_elements_if_no_other_size_is_open(http: Ask) -> None:
    assert http("POST", "/v2/models/identity_int8/generate", {"x": [*range(8)]}).content["y"] == [*range(8)]
    answer = http("POST", "/v2/models/identity_int8/generate", {"x": [*range(20)]})
    assert (answer.status, "batch-size must be <= 4" in answer.content["error"]) == (400, True)


@pytest.mark.parametrize(
    ("unread", "ended"),
    [
        ([0.5, 2, 4, 1.5], [False, False, True, False]),
        ([0.5, 0.5, 1.5], [False, False, False]),  # not too much
        ([0.9] * 8, [False] * 8),  # none is worth it
        ([4, 0.5], [False, False]),  # what has come last went to one that is read
    ],
)
def test_the_stream_with_most_unread_is_ended(serving: ServingLoop, unread: list[float], ended: list[bool]) -> None:
    assert serving.run(ended_of(EventStreams(3 * WORTH_BYTES), [int(share * WORTH_BYTES) for share in unread])) == ended


async def ended_of(streams: EventStreams, sizes_bytes: Sequence[int]) -> list[bool]:
    """Which of the streams are ended, of which nobody reads as many bytes beyond what the kernel holds."""
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:
        transports = []
        for size_bytes in sizes_bytes:
            own, other = socket.socketpair()
            stack.enter_context(closing(other))
            transport, _ = await loop.create_connection(asyncio.Protocol, sock=own)
            stack.callback(transport.abort)
            stack.enter_context(streams.opened(transport))
            while transport.get_write_buffer_size() == 0:
                transport.write(bytes(4096))
                await asyncio.sleep(0)
            transport.write(bytes(size_bytes))
            transports.append(transport)
        streams.bound(transports[-1])
        return [transport.is_closing() for transport in transports]
