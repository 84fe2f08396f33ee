"""Hostile bytes against a live server: each is answered or refused, no process dies, no slot or buffer stays taken."""

import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from gangway.protos import grpc_service_pb2 as pb
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ROW = np.arange(16, dtype=np.int32).tobytes()
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAVAILABLE,  # the parameter `timeout` may be drawn very small
}
FUZZ = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

SIZES = st.one_of(st.integers(-2, 20), st.integers(-(2**63), 2**63 - 1))
NAMES = st.sampled_from(["INPUT0", "INPUT1", "OUTPUT0", "", "x", "\x00", "é" * 50])
CONTENTS = st.builds(pb.InferTensorContents, int_contents=st.lists(st.integers(-5, 5), max_size=17))
INPUTS = st.builds(
    pb.ModelInferRequest.InferInputTensor,
    name=NAMES,
    datatype=st.sampled_from(["INT32", "FP32", "BYTES", "", "int32"]),
    shape=st.one_of(st.just([1, 16]), st.lists(SIZES, max_size=4)),
    contents=st.one_of(st.none(), CONTENTS),
)
PARAMETERS = st.builds(pb.InferParameter, int64_param=st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)))
REQUESTS = st.builds(
    pb.ModelInferRequest,
    model_name=st.sampled_from(["simple", "simple", "simple", "mlp", "nobody"]),
    model_version=st.sampled_from(["", "1", "2", "-1", "x", "9" * 30]),
    id=st.text(max_size=20),
    parameters=st.dictionaries(st.sampled_from(["timeout", "priority", "sequence_id", "own"]), PARAMETERS, max_size=2),
    inputs=st.lists(INPUTS, max_size=3),
    outputs=st.lists(st.builds(pb.ModelInferRequest.InferRequestedOutputTensor, name=NAMES), max_size=2),
    raw_input_contents=st.lists(st.one_of(st.just(ROW), st.binary(max_size=70)), max_size=3),
)


@pytest.fixture(scope="module")
def infer(gangway_server: Any) -> Iterator[Any]:
    """ModelInfer on bytes; after all that a test has sent the server must be as it was."""
    pids = gangway_server.pids()
    with grpc.insecure_channel(gangway_server.url) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        yield call
        assert_unharmed(call)
    assert gangway_server.pids() == pids
    deadline = time.monotonic() + 10  # a handler returns its slot just after its answer
    while gangway_server.busy_slots() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gangway_server.busy_slots() == 0  # and its buffers, which come and go with a slot


def good_request() -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="simple", id="7", raw_input_contents=[ROW, ROW])
    for name in ("INPUT0", "INPUT1"):
        request.inputs.add(name=name, datatype="INT32", shape=[1, 16])
    return request


def answered_or_refused(infer: Any, message: bytes) -> None:
    try:
        response = pb.ModelInferResponse.FromString(infer(message, timeout=10))
    except grpc.RpcError as error:
        assert error.code() in REFUSALS, error.details()
        assert error.details()
    else:
        assert len(response.outputs) == len(response.raw_output_contents) > 0


def assert_unharmed(infer: Any) -> None:
    response = pb.ModelInferResponse.FromString(infer(good_request().SerializeToString(), timeout=10))
    assert response.raw_output_contents[0] == (2 * np.arange(16, dtype=np.int32)).tobytes()
    assert response.id == "7"


@FUZZ
@given(message=st.binary(max_size=200))
def test_any_bytes(infer: Any, message: bytes) -> None:
    answered_or_refused(infer, message)


@FUZZ
@given(request=REQUESTS)
def test_any_request(infer: Any, request: pb.ModelInferRequest) -> None:
    answered_or_refused(infer, request.SerializeToString())


@FUZZ
@given(data=st.data())
def test_damaged_requests(infer: Any, data: st.DataObject) -> None:
    message = bytearray(good_request().SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    answered_or_refused(infer, bytes(message[: data.draw(st.integers(0, len(message)))]))
