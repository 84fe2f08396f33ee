"""Hostile bytes against a live server: each is answered or refused, no process dies, no slot or buffer stays taken."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.utils import InferenceServerException

from gangway.protos import grpc_service_pb2 as pb
from gangway.server.requests.regions import RESERVED_PREFIXES
from testing.waiting import until
from tests.helpers.raw_stream import RawStream

ROW = np.arange(16, dtype=np.int32).tobytes()
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAVAILABLE,  # the parameter `timeout` may be drawn very small
    grpc.StatusCode.RESOURCE_EXHAUSTED,  # and the size of a region very large
}
NO_ROOM = "should be at least"  # an output's region is too small
FUZZ = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

SHORT_FUZZ = settings(FUZZ, max_examples=150)

SIZES = st.one_of(st.integers(-2, 20), st.integers(-(2**63), 2**63 - 1))
NAMES = st.sampled_from(["INPUT0", "INPUT1", "OUTPUT0", "", "x", "\x00", "é" * 50])
REGION = "fuzz"  # is registered, and has 4096 bytes
PLACES = st.dictionaries(
    st.sampled_from(["shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"]),
    st.one_of(
        st.builds(pb.InferParameter, string_param=st.sampled_from([REGION, REGION, "nobody", ""])),
        st.builds(pb.InferParameter, int64_param=st.one_of(st.sampled_from([0, 64, 4032, 4096]), SIZES)),
        st.builds(pb.InferParameter),
    ),
    max_size=3,
)
CONTENTS = st.builds(pb.InferTensorContents, int_contents=st.lists(st.integers(-5, 5), max_size=17))
INPUTS = st.builds(
    pb.ModelInferRequest.InferInputTensor,
    name=NAMES,
    datatype=st.sampled_from(["INT32", "FP32", "BYTES", "", "int32"]),
    shape=st.one_of(st.just([1, 16]), st.lists(SIZES, max_size=4)),
    contents=st.one_of(st.none(), CONTENTS),
    parameters=st.one_of(st.just({}), PLACES),
)
OUTPUTS = st.builds(
    pb.ModelInferRequest.InferRequestedOutputTensor, name=NAMES, parameters=st.one_of(st.just({}), PLACES)
)
PARAMETERS = st.builds(pb.InferParameter, int64_param=st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)))
REQUESTS = st.builds(
    pb.ModelInferRequest,
    model_name=st.sampled_from(["simple", "simple", "simple", "mlp", "nobody"]),
    model_version=st.sampled_from(["", "1", "2", "-1", "x", "9" * 30]),
    id=st.text(max_size=20),
    parameters=st.dictionaries(st.sampled_from(["timeout", "priority", "sequence_id", "own"]), PARAMETERS, max_size=2),
    inputs=st.lists(INPUTS, max_size=3),
    outputs=st.lists(OUTPUTS, max_size=2),
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
    until(lambda: not gangway_server.busy_slots())  # a handler returns its slot, and buffers, just after its answer


def good_request() -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="simple", id="7", raw_input_contents=[ROW, ROW])
    for name in ("INPUT0", "INPUT1"):
        request.inputs.add(name=name, datatype="INT32", shape=[1, 16])
    return request


def answered_or_refused(infer: Any, message: bytes) -> None:
    try:
        response = pb.ModelInferResponse.FromString(infer(message, timeout=10))
    except grpc.RpcError as error:
        no_room = error.code() is grpc.StatusCode.INTERNAL and NO_ROOM in error.details()  # as in Triton
        assert no_room or error.code() in REFUSALS, error.details()
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


@pytest.fixture(scope="module")
def region(gangway_server: Any) -> Iterator[Path]:
    """A segment that is registered as REGION. Whatever is asked for, it stays as large as it is."""
    path = Path("/dev/shm") / f"fuzz-{os.getpid()}"
    path.write_bytes(bytes(4096))
    with triton.InferenceServerClient(gangway_server.url) as client:
        client.register_system_shared_memory(REGION, f"/{path.name}", 4096)
        yield path
        assert path.stat().st_size == 4096
        client.unregister_system_shared_memory(REGION)
    path.unlink()


@SHORT_FUZZ
@given(sources=st.lists(PLACES, min_size=2, max_size=2), sink=PLACES)
def test_any_place_in_shared_memory(
    infer: Any, region: Path, sources: list[dict[str, Any]], sink: dict[str, Any]
) -> None:
    request = good_request()
    output = request.outputs.add(name="OUTPUT0")
    tensors: list[Any] = [*request.inputs, output]
    for tensor, place in zip(tensors, (*sources, sink), strict=True):
        for name, value in place.items():
            tensor.parameters[name].CopyFrom(value)
    for number, place in reversed(list(enumerate(sources))):
        if place.get("shared_memory_region"):
            del request.raw_input_contents[number]
    answered_or_refused(infer, request.SerializeToString())


@SHORT_FUZZ
@given(key=st.one_of(st.text(max_size=20), st.sampled_from([".", "/..", "//", "/./x", "../x", "/x/../y"])))
def test_any_key_of_a_region(gangway_server: Any, client: Any, key: str) -> None:
    with pytest.raises(InferenceServerException) as caught:
        client.register_system_shared_memory("any", key, 1)
    component = key.lstrip("/")
    is_reserved = component.startswith(RESERVED_PREFIXES) and not {"/", "\0"} & set(component)
    assert caught.value.status() == ("StatusCode.INVALID_ARGUMENT" if is_reserved else "StatusCode.INTERNAL")


@pytest.fixture(scope="module")
def client(gangway_server: Any) -> Iterator[Any]:
    with triton.InferenceServerClient(gangway_server.url) as opened:
        yield opened


@pytest.fixture(scope="module")
def stream(gangway_server: Any) -> Iterator[RawStream]:
    with RawStream(gangway_server.url, timeout_s=100) as opened:
        yield opened


@SHORT_FUZZ
@given(message=st.one_of(st.binary(max_size=200), st.builds(lambda request: request.SerializeToString(), REQUESTS)))
def test_anything_in_a_stream(infer: Any, stream: RawStream, message: bytes) -> None:
    stream.send(message)
    response = stream.receive()
    assert bool(response.error_message) != bool(response.infer_response.outputs)
