"""ModelInfer through Triton's public client."""

import queue
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from gangway.executor.slots import SlotCounts, SlotRequest, SlotStatus
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.options.endpoints import GrpcOptions
from testing.raw_connection import RawConnection
from tests.helpers.raw_stream import simple_request

Inputs = Callable[..., list[triton.InferInput]]
EXPECTED_SUM = np.arange(16, dtype=np.int32) + 1


def test_sum_and_difference(server: Any, simple_inputs: Inputs) -> None:
    result = server.client.infer("simple", simple_inputs(), request_id="first-é")
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), [EXPECTED_SUM])
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), [EXPECTED_SUM - 2])
    response = result.get_response()
    assert (response.id, response.model_name, response.model_version) == ("first-é", "simple", "1")


def test_only_requested_outputs_in_the_requested_order(server: Any, simple_inputs: Inputs) -> None:
    def names(*wanted: str) -> list[str]:
        outputs = [triton.InferRequestedOutput(name) for name in wanted]
        response = server.client.infer("simple", simple_inputs(), outputs=outputs).get_response()
        assert len(response.raw_output_contents) == len(response.outputs)
        return [output.name for output in response.outputs]

    assert names("OUTPUT1") == ["OUTPUT1"]
    assert names("OUTPUT1", "OUTPUT0") == ["OUTPUT1", "OUTPUT0"]
    assert names() == ["OUTPUT0", "OUTPUT1"]


def test_inputs_in_any_order(server: Any, simple_inputs: Inputs) -> None:
    result = server.client.infer("simple", simple_inputs()[::-1])
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), [EXPECTED_SUM - 2])


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_rows(server: Any, simple_inputs: Inputs, rows: int) -> None:
    result = server.client.infer("simple", simple_inputs(rows))
    np.testing.assert_array_equal(
        result.as_numpy("OUTPUT0"), np.arange(16 * rows, dtype=np.int32).reshape(rows, 16) + 1
    )


def test_large_tensors_pass(server: Any) -> None:
    image = np.random.default_rng(0).standard_normal((1, 3, 224, 224), dtype=np.float32)
    tensor = triton.InferInput("x", image.shape, "FP32")
    tensor.set_data_from_numpy(image)
    np.testing.assert_array_equal(server.client.infer("image", [tensor]).as_numpy("y"), image)


def test_callbacks(server: Any, simple_inputs: Inputs) -> None:
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    for _ in range(5):
        server.client.async_infer(
            "simple", simple_inputs(), callback=lambda result, error: answers.put((result, error))
        )
    for _ in range(5):
        result, error = answers.get(timeout=10)
        assert error is None
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), [EXPECTED_SUM])


def test_many_clients(server: Any, simple_inputs: Inputs) -> None:
    def ask(client: int) -> None:
        with triton.InferenceServerClient(server.address) as own:
            for number in range(20):
                result = own.infer("simple", simple_inputs(1 + client), request_id=f"{client}-{number}")
                assert result.get_response().id == f"{client}-{number}"
                assert result.as_numpy("OUTPUT0").shape == (1 + client, 16)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(ask, range(6)))


TYPED = {
    "bool": ("bool_contents", np.bool_, [True, False, True, True]),
    "int8": ("int_contents", np.int8, [-128, 127, 0, 1]),
    "int16": ("int_contents", np.int16, [-(2**15), 2**15 - 1, 0, 1]),
    "int64": ("int64_contents", np.int64, [-(2**63), 2**63 - 1, 0, 1]),
    "uint8": ("uint_contents", np.uint8, [0, 255, 1, 2]),
    "uint16": ("uint_contents", np.uint16, [0, 65535, 1, 2]),
    "uint32": ("uint_contents", np.uint32, [0, 2**32 - 1, 1, 2]),
    "uint64": ("uint64_contents", np.uint64, [0, 2**64 - 1, 1, 2]),
    "fp32": ("fp32_contents", np.float32, [1.5, -0.25, np.inf, np.nan]),
    "fp64": ("fp64_contents", np.float64, [1e300, -0.25, np.inf, np.nan]),
}


@pytest.fixture
def raw_infer(server: Any) -> Any:
    """ModelInfer on bytes or messages, without a client library in between."""
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")

        def infer(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
            return pb.ModelInferResponse.FromString(call(request.SerializeToString(), timeout=10))

        yield infer


@pytest.mark.parametrize("datatype", TYPED)
def test_typed_contents(raw_infer: Any, datatype: str) -> None:
    field, dtype, values = TYPED[datatype]
    request = pb.ModelInferRequest(model_name=f"identity_{datatype}")
    tensor = request.inputs.add(name="x", datatype=datatype.upper(), shape=[1, 4])
    getattr(tensor.contents, field).extend(values)
    response = raw_infer(request)
    assert response.outputs[0].datatype == datatype.upper()
    assert response.raw_output_contents[0] == np.array(values, dtype=dtype).tobytes()


def test_raw_half_precision(raw_infer: Any) -> None:
    request = pb.ModelInferRequest(model_name="identity_fp16", raw_input_contents=[b"12345678"])
    request.inputs.add(name="x", datatype="FP16", shape=[1, 4])
    assert raw_infer(request).raw_output_contents[0] == b"12345678"


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


def test_timeout_and_priority_reach_the_scheduler(server: Any, simple_inputs: Inputs) -> None:
    request = seen_by_the_scheduler(server, simple_inputs(2), timeout=5_000_000, priority=3)
    assert (request.model_id, request.rows, request.priority) == (0, 2, 1)
    assert request.deadline_ns - request.arrival_ns == 5e9
    assert (request.limit_ns, request.rejects_late, request.max_queue) == (0, False, 0)


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


def test_an_answer_says_how_it_was_made_if_asked(server: Any, simple_inputs: Inputs) -> None:
    server.scheduler.holding = True
    parameters = {"gangway_stats": True}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(
            server.client.infer, "simple", simple_inputs(), request_id="7", timeout=9_000_000, parameters=parameters
        )
        submitted = server.scheduler.held.get(timeout=10)
        counts = SlotCounts(blocks=3, conflicts=1, preemptions=2, versions=0b101)
        server.scheduler.slots.count(submitted.slot, counts)
        server.scheduler.answer(submitted)
        result = answer.result(10)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), [EXPECTED_SUM])
    response = result.get_response()
    assert response.id == "7"
    report = {name: parameter.int64_param for name, parameter in response.parameters.items() if name != "versions"}
    times = {"queue_us", "compute_us", "target_us"}
    assert report.keys() == times | {"ranks", "blocks", "conflicts", "preemptions", "in_place", "batch_rows"}
    assert (report["target_us"], report["blocks"], report["conflicts"], report["preemptions"]) == (9_000_000, 3, 1, 2)
    assert response.parameters["versions"].string_param == "0,2"
    server.scheduler.holding = False
    assert not server.client.infer("simple", simple_inputs()).get_response().parameters


def test_a_request_whose_deadline_passes_is_free(server: Any) -> None:
    server.scheduler.holding = True
    with RawConnection(server.address) as connection:
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


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (SlotStatus.UNAVAILABLE, "UNAVAILABLE"),
        (SlotStatus.DEADLINE, "DEADLINE_EXCEEDED"),
        (SlotStatus.LATE, "UNAVAILABLE"),
        (SlotStatus.QUEUE_FULL, "UNAVAILABLE"),
        (SlotStatus.INTERNAL, "INTERNAL"),
        (SlotStatus.CANCELLED, "CANCELLED"),
    ],
)
def test_what_the_scheduler_says_reaches_the_client(
    server: Any, simple_inputs: Inputs, status: SlotStatus, code: str
) -> None:
    server.scheduler.status = status
    with pytest.raises(InferenceServerException, match="simple") as caught:
        server.client.infer("simple", simple_inputs())
    assert caught.value.status() == f"StatusCode.{code}"


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
    until_s = time.monotonic() + 10
    while server.plane.admission.is_overloaded and time.monotonic() < until_s:
        with suppress(InferenceServerException):
            server.client.infer("simple", simple_inputs())
    server.client.infer("simple", simple_inputs())


def test_too_many_requests_are_refused_at_once(server: Any, simple_inputs: Inputs) -> None:
    server.scheduler.holding = True
    slots = server.plane.slots.slots
    with ThreadPoolExecutor(slots) as pool:
        running = [pool.submit(server.client.infer, "simple", simple_inputs(), client_timeout=30) for _ in range(slots)]
        held = [server.scheduler.held.get(timeout=10) for _ in range(slots)]
        with pytest.raises(InferenceServerException, match=f"Exceeds maximum queue size: {slots} requests") as caught:
            server.client.infer("simple", simple_inputs())
        assert caught.value.status() == "StatusCode.UNAVAILABLE"
        assert server.client.is_server_live()  # while every slot is taken
        for submitted in held:
            server.scheduler.answer(submitted)
        for answer in running:
            np.testing.assert_array_equal(answer.result(10).as_numpy("OUTPUT0"), [EXPECTED_SUM])
