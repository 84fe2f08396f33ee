"""Wrong requests are refused with the right status and a message that names model, tensor, expected and got.

More of them, byte by byte, are in `tests/wire`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from gangway.protos import grpc_service_pb2 as pb

ROW = np.ones(16, dtype=np.int32).tobytes()
Change = Callable[[pb.ModelInferRequest], object]


@pytest.fixture
def refusal(server: Any) -> Iterator[Callable[[bytes], grpc.RpcError]]:
    """Sends bytes to ModelInfer and returns how they were refused; the server works as before afterwards."""
    with grpc.insecure_channel(server.url) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")

        def send(message: bytes) -> grpc.RpcError:
            with pytest.raises(grpc.RpcError) as caught:
                infer(message, timeout=10)
            return caught.value

        yield send
        assert infer(good_request().SerializeToString(), timeout=10)


def good_request(rows: int = 1) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="simple", raw_input_contents=[ROW * rows, ROW * rows])
    for name in ("INPUT0", "INPUT1"):
        request.inputs.add(name=name, datatype="INT32", shape=[rows, 16])
    return request


def typed_request() -> pb.ModelInferRequest:
    request = good_request()
    request.ClearField("raw_input_contents")
    for tensor in request.inputs:
        tensor.contents.int_contents.extend(range(16))
    return request


def changed(change: Change, request: pb.ModelInferRequest | None = None) -> bytes:
    request = request or good_request()
    change(request)
    return request.SerializeToString()


def setting(target: Callable[[pb.ModelInferRequest], Any], **values: Any) -> Change:
    def change(request: pb.ModelInferRequest) -> None:
        for name, value in values.items():
            setattr(target(request), name, value)

    return change


def shape(*sizes: int, index: int = 0) -> Change:
    def change(request: pb.ModelInferRequest) -> None:
        request.inputs[index].shape[:] = sizes

    return change


def first(request: pb.ModelInferRequest) -> Any:
    return request.inputs[0]


def itself(request: pb.ModelInferRequest) -> Any:
    return request


CASES: dict[str, tuple[bytes, str, str]] = {
    "no model": (b"", "NOT_FOUND", "Request for unknown model: '' is not found"),
    "no shape": (changed(shape()), "INVALID_ARGUMENT", "Expected [-1, 16], got []"),
    "too many dimensions": (changed(shape(1, 16, 1)), "INVALID_ARGUMENT", "Expected [-1, 16], got [1, 16, 1]"),
    "negative dimension": (changed(shape(-1, 16)), "INVALID_ARGUMENT", "Expected [-1, 16], got [-1, 16]"),
    "no rows": (changed(shape(0, 16)), "INVALID_ARGUMENT", "Expected [-1, 16], got [0, 16]"),
    "smallest dimension": (changed(shape(-(2**63), 16)), "INVALID_ARGUMENT", f"got [{-(2**63)}, 16]"),
    "product that overflows": (
        changed(shape(2**62, 16)),
        "INVALID_ARGUMENT",
        f"inference request batch-size must be <= 8 for 'simple', got {2**62}",
    ),
    "output twice": (
        changed(lambda request: [request.outputs.add(name="OUTPUT0") for _ in range(2)]),
        "INVALID_ARGUMENT",
        "output 'OUTPUT0' for model 'simple' is requested twice",
    ),
    "too few raw contents": (
        changed(lambda request: request.raw_input_contents.pop()),
        "INVALID_ARGUMENT",
        "expected 2 raw_input_contents but got 1 for model 'simple'",
    ),
    "too many raw contents": (
        changed(lambda request: request.raw_input_contents.append(b"")),
        "INVALID_ARGUMENT",
        "expected 2 raw_input_contents but got 3 for model 'simple'",
    ),
    "no contents at all": (
        changed(lambda request: request.ClearField("raw_input_contents")),
        "INVALID_ARGUMENT",
        "input 'INPUT0' for model 'simple': expected 16 elements in int_contents, got 0",
    ),
    "typed contents too short": (
        changed(lambda request: request.inputs[1].contents.int_contents.pop(), typed_request()),
        "INVALID_ARGUMENT",
        "input 'INPUT1' for model 'simple': expected 16 elements in int_contents, got 15",
    ),
    "typed contents of another type": (
        changed(lambda request: request.inputs[1].contents.fp32_contents.append(1), typed_request()),
        "INVALID_ARGUMENT",
        "input 'INPUT1' for model 'simple': expected int_contents for INT32, got fp32_contents",
    ),
    "sequence id that is none": (
        changed(lambda request: setattr(request.parameters["sequence_id"], "bool_param", True)),
        "INVALID_ARGUMENT",
        "invalid value type for 'sequence_id' parameter, expected int64_param or string_param.",
    ),
    "parameter without a value": (
        changed(lambda request: request.parameters["priority"].SetInParent()),
        "INVALID_ARGUMENT",
        "parameter 'priority' for model 'simple': expected int64_param, got None",
    ),
    "negative timeout": (
        changed(lambda request: setattr(request.parameters["timeout"], "int64_param", -1)),
        "INVALID_ARGUMENT",
        "parameter 'timeout' for model 'simple': expected 0 to",
    ),
    "huge priority": (
        changed(lambda request: setattr(request.parameters["priority"], "uint64_param", 2**64 - 1)),
        "INVALID_ARGUMENT",
        "parameter 'priority' for model 'simple': expected 0 to",
    ),
    "a report that is neither wanted nor not": (
        changed(lambda request: setattr(request.parameters["gangway_stats"], "string_param", "yes")),
        "INVALID_ARGUMENT",
        "parameter 'gangway_stats' for model 'simple': expected bool_param, got string_param",
    ),
    "shared memory without a size": (
        changed(
            lambda request: setattr(request.inputs[0].parameters["shared_memory_region"], "string_param", "region")
        ),
        "INVALID_ARGUMENT",
        "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter for tensor 'INPUT0'",
    ),
    "classification of a negative number of classes": (
        changed(
            lambda request: setattr(request.outputs.add(name="OUTPUT1").parameters["classification"], "int64_param", -1)
        ),
        "INVALID_ARGUMENT",
        "output 'OUTPUT1' for model 'simple': parameter 'classification': expected 0 to 2147483647, got -1",
    ),
    "classification by a word": (
        changed(
            lambda request: setattr(
                request.outputs.add(name="OUTPUT1").parameters["classification"], "string_param", "3"
            )
        ),
        "INVALID_ARGUMENT",
        "output 'OUTPUT1' for model 'simple': parameter 'classification': expected int64_param, got string_param",
    ),
    "classification of an input": (
        changed(lambda request: setattr(request.inputs[0].parameters["classification"], "int64_param", 1)),
        "INVALID_ARGUMENT",
        "input 'INPUT0' for model 'simple': parameter 'classification' is for outputs",
    ),
    "not a message": (b"\x3a\x05abc", "INVALID_ARGUMENT", "field 7 has 5 bytes, but only 3 follow"),
    "broken inside": (b"\x2a\x02\x0a\x05", "INVALID_ARGUMENT", "the request is not a ModelInferRequest"),
    "name that is not UTF-8": (b"\x0a\x02\xc3\x28", "INVALID_ARGUMENT", "the request is not a ModelInferRequest"),
    "long name": (changed(setting(itself, model_name="x" * 100_000)), "NOT_FOUND", "Request for unknown model: 'xxx"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused(refusal: Callable[[bytes], Any], case: str) -> None:
    message, code, details = CASES[case]
    error = refusal(message)
    assert details in error.details()
    assert error.code().name == code


def test_typed_elements_out_of_range(refusal: Callable[[bytes], Any]) -> None:
    request = pb.ModelInferRequest(model_name="identity_int8")
    request.inputs.add(name="x", datatype="INT8", shape=[1, 4]).contents.int_contents.extend([0, 1, 2, 128])
    error = refusal(request.SerializeToString())
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "input 'x' for model 'identity_int8': an element does not fit into INT8" in error.details()


def test_half_precision_must_be_raw(refusal: Callable[[bytes], Any]) -> None:
    request = pb.ModelInferRequest(model_name="identity_fp16")
    request.inputs.add(name="x", datatype="FP16", shape=[1, 4])
    error = refusal(request.SerializeToString())
    assert "input 'x' for model 'identity_fp16': FP16 is only possible in raw_input_contents" in error.details()


def test_a_fixed_shape_must_match(refusal: Callable[[bytes], Any]) -> None:
    request = pb.ModelInferRequest(model_name="image", raw_input_contents=[bytes(2 * 602112)])
    request.inputs.add(name="x", datatype="FP32", shape=[2, 3, 224, 224])
    error = refusal(request.SerializeToString())
    assert "for model 'image'. Expected [1, 3, 224, 224], got [2, 3, 224, 224]" in error.details()


def test_messages_beyond_the_limit(refusal: Callable[[bytes], Any], server: Any) -> None:
    message = bytes([0x3A, 0x80, 0x80, 0x80, 0x80, 0x01]) + bytes(server.max_message_bytes)
    assert refusal(message).code() == grpc.StatusCode.RESOURCE_EXHAUSTED
