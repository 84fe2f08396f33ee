"""Requests that are right but for a few things, drawn by hypothesis: they get further than what is drawn at random."""

from collections.abc import Sequence
from typing import Any

import grpc
from hypothesis import strategies as st

from gangway.clients.connection import SERVICE
from gangway.protos import grpc_service_pb2 as pb
from tests.helpers.raw_stream import RawStream

TIMEOUT_S = 20
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAVAILABLE,  # a `timeout` may be drawn very small
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
SIZES = st.one_of(st.integers(-1, 17), st.sampled_from([2**31, 2**62, -(2**63)]))
VALUES = st.one_of(
    st.builds(pb.InferParameter, int64_param=st.one_of(st.integers(-2, 9), st.integers(-(2**63), 2**63 - 1))),
    st.builds(pb.InferParameter, uint64_param=st.integers(0, 2**64 - 1)),
    st.builds(pb.InferParameter, bool_param=st.booleans()),
    st.builds(pb.InferParameter, string_param=st.sampled_from(["", "5", "é", "x" * 2000])),
    st.builds(pb.InferParameter, double_param=st.floats()),
    st.builds(pb.InferParameter),
)
PARAMETERS = ("timeout", "priority", "sequence_id", "sequence_start", "sequence_end", "gangway_stats", "triton_x", "x")


def sent(channel: grpc.Channel, request: pb.ModelInferRequest) -> pb.ModelInferResponse | grpc.RpcError:
    """The answer to a request, or the error that it gets."""
    call = channel.unary_unary(SERVICE + "ModelInfer", response_deserializer=pb.ModelInferResponse.FromString)
    try:
        response: pb.ModelInferResponse = call(request.SerializeToString(), timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        return error
    return response


def streamed(stream: RawStream, request: pb.ModelInferRequest) -> pb.ModelInferResponse | str:
    """The answer to the only request that a stream has under way, or what is wrong."""
    stream.send(request)
    response = stream.receive()
    return response.error_message or response.infer_response


@st.composite
def mutated(draw: Any, requests: Sequence[pb.ModelInferRequest], names: Sequence[str]) -> pb.ModelInferRequest:
    """One of these requests, with up to three changes. `names`: of tensors, right and wrong ones."""
    request = pb.ModelInferRequest()
    request.CopyFrom(draw(st.sampled_from(requests)))
    for change in draw(st.lists(st.sampled_from(CHANGES), max_size=3)):
        change(draw, request, names)
    return request


def _place(draw: Any, items: Sequence[Any]) -> int:
    return int(draw(st.integers(0, max(0, len(items) - 1))))


def _another_name(draw: Any, request: pb.ModelInferRequest, names: Sequence[str]) -> None:
    for tensor in request.inputs[_place(draw, request.inputs) :]:
        tensor.name = draw(st.sampled_from(names))


def _another_type(draw: Any, request: pb.ModelInferRequest, names: Sequence[str]) -> None:
    for tensor in request.inputs[_place(draw, request.inputs) :]:
        tensor.datatype = draw(st.sampled_from(["INT32", "BYTES", "FP32", "INT64", "", "int32"]))


def _another_shape(draw: Any, request: pb.ModelInferRequest, names: Sequence[str]) -> None:
    for tensor in request.inputs[_place(draw, request.inputs) :]:
        tensor.shape[:] = draw(st.lists(SIZES, max_size=4))


def _other_rows(draw: Any, request: pb.ModelInferRequest, names: Sequence[str]) -> None:
    """Contents and shape of the first input agree with each other, and maybe with nothing else."""
    if request.inputs and request.inputs[0].shape and request.raw_input_contents:
        rows = draw(st.integers(0, 10))
        request.inputs[0].shape[0] = rows
        request.raw_input_contents[0] *= rows


def _one_input_less(draw: Any, request: pb.ModelInferRequest, names: Sequence[str]) -> None:
    place = _place(draw, request.inputs)
    del request.inputs[place : place + 1]
    del request.raw_input_contents[place : place + 1]


def _one_input_twice(draw: Any, request: pb.ModelInferRequest, names: Sequence[str]) -> None:
    request.inputs.extend(list(request.inputs[:1]))
    request.raw_input_contents.extend(list(request.raw_input_contents[:1]))


def _other_contents(draw: Any, request: pb.ModelInferRequest, names: Sequence[str]) -> None:
    place = _place(draw, request.raw_input_contents)
    del request.raw_input_contents[place : place + 1]
    request.raw_input_contents.insert(place, draw(st.binary(max_size=70)))


def _no_contents(draw: Any, request: pb.ModelInferRequest, names: Sequence[str]) -> None:
    request.ClearField("raw_input_contents")


def _one_output(draw: Any, request: pb.ModelInferRequest, names: Sequence[str]) -> None:
    output = request.outputs.add(name=draw(st.sampled_from(names)))
    parameter = draw(st.sampled_from(["", "", "classification", "shared_memory_region"]))
    if parameter:
        output.parameters[parameter].CopyFrom(draw(VALUES))


def _one_parameter(draw: Any, request: pb.ModelInferRequest, names: Sequence[str]) -> None:
    request.parameters[draw(st.sampled_from(PARAMETERS))].CopyFrom(draw(VALUES))


def _another_version(draw: Any, request: pb.ModelInferRequest, names: Sequence[str]) -> None:
    request.model_version = draw(st.sampled_from(["1", "2", "-1", "x"]))


CHANGES = (
    _another_name,
    _another_type,
    _another_shape,
    _other_rows,
    _one_input_less,
    _one_input_twice,
    _other_contents,
    _no_contents,
    _one_output,
    _one_parameter,
    _another_version,
)
