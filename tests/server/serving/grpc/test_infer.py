"""ModelInfer over gRPC: deadlines of calls, clients that cancel, and overload, through Triton's public client."""

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import grpc
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from gangway.executor.slots import SlotRequest, SlotStatus
from gangway.server.options.endpoints import GrpcOptions
from testing.raw_connection import RawConnection
from testing.waiting import until
from tests.helpers.raw_stream import simple_request

Inputs = Callable[..., list[triton.InferInput]]


def seen_by_the_scheduler(server: Any, inputs: list[triton.InferInput], **parameters: Any) -> SlotRequest:
    """What is in the slot of a request with these parameters."""
    server.scheduler.holding = True
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.client.infer, "simple", inputs, **parameters)
        submitted = server.scheduler.held.get(timeout=10)
        request: SlotRequest = server.scheduler.slots.request(submitted.slot)
        server.scheduler.answer(submitted)
        answer.result(10)
    return request


def test_a_call_s_deadline_is_a_limit_and_no_target(server: Any, simple_inputs: Inputs) -> None:
    request = seen_by_the_scheduler(server, simple_inputs(), client_timeout=30)
    assert 29e9 < request.limit_ns - request.arrival_ns < 30.1e9
    assert request.deadline_ns == 0


def test_a_call_s_deadline_bounds_the_target(server: Any, simple_inputs: Inputs) -> None:
    request = seen_by_the_scheduler(server, simple_inputs(), timeout=60_000_000, client_timeout=30)
    assert request.deadline_ns == request.limit_ns


def test_no_deadline(server: Any, simple_inputs: Inputs) -> None:
    request = seen_by_the_scheduler(server, simple_inputs())
    assert (request.deadline_ns, request.limit_ns, request.priority) == (0, 0, 0)


def test_a_request_whose_deadline_passes_is_free(server: Any) -> None:
    server.scheduler.holding = True
    with RawConnection(server.url) as connection:
        stream = connection.call("ModelInfer", simple_request().SerializeToString(), timeout_s=0.1)
        submitted = server.scheduler.held.get(timeout=10)
        assert server.scheduler.cancelled.get(timeout=10).slot == submitted.slot
        assert connection.answer(stream)[0]["grpc-status"] == str(grpc.StatusCode.DEADLINE_EXCEEDED.value[0])


def test_a_client_that_cancels_frees_its_request(server: Any, simple_inputs: Inputs) -> None:
    server.scheduler.holding = True
    errors: queue.SimpleQueue[Any] = queue.SimpleQueue()
    call = server.client.async_infer("simple", simple_inputs(), callback=lambda result, error: errors.put(error))
    submitted = server.scheduler.held.get(timeout=10)
    call.cancel()
    assert server.scheduler.cancelled.get(timeout=10).slot == submitted.slot
    assert errors.get(timeout=10).status() == "StatusCode.CANCELLED"


def test_an_overloaded_server_says_so_and_lets_all_in_again(
    start_front_end: Callable[[GrpcOptions], Any], simple_inputs: Inputs
) -> None:
    server = start_front_end(GrpcOptions())
    server.scheduler.status = SlotStatus.CROWDED
    with pytest.raises(InferenceServerException, match="queue size: the server is overloaded") as caught:
        server.client.infer("simple", simple_inputs())
    assert caught.value.status() == "StatusCode.UNAVAILABLE"
    assert server.plane.admission.is_overloaded
    server.scheduler.status = SlotStatus.OK

    def lets_all_in() -> bool:
        with suppress(InferenceServerException):
            server.client.infer("simple", simple_inputs())
        return not server.plane.admission.is_overloaded

    until(lets_all_in)
    server.client.infer("simple", simple_inputs())
