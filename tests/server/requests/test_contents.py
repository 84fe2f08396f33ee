"""Typed contents of large requests are what protobuf makes of them, and what is wrong with them is said."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import RequestError
from gangway.server.requests import contents as large_contents
from gangway.server.requests.contents import (
    FIELDS,
    MalformedRequestError,
    length_prefix,
    split_contents,
    split_request,
    to_bytes,
)

COUNT = 20_003


def values_of(datatype: str) -> list[Any]:
    random = np.random.default_rng(0)
    dtype = FIELDS[datatype][1]
    if datatype == "BYTES":
        return [bytes(size % 7) + b"x" for size in range(COUNT)]
    if datatype == "BOOL":
        return (random.random(COUNT) < 0.5).tolist()
    if datatype.startswith("FP"):
        return random.standard_normal(COUNT).astype(dtype).tolist()
    limits = np.iinfo(dtype)
    shifts = random.integers(0, 64, COUNT).tolist()
    numbers = random.integers(limits.min, limits.max, COUNT, dtype=dtype, endpoint=True).tolist()
    return [limits.min, limits.max, *(number >> shift for number, shift in zip(numbers[2:], shifts[2:], strict=True))]


def request_of(datatype: str, values: list[Any], names: str = "xy") -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="m", id="7")
    for name in names:
        tensor = request.inputs.add(name=name, datatype=datatype, shape=[len(values)])
        getattr(tensor.contents, FIELDS[datatype][0]).extend(values)
    return request


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_contents, "SLICE_BYTES", 1000)
    monkeypatch.setattr(large_contents, "LARGE_BYTES", 1000)
    monkeypatch.setattr(large_contents, "PAUSE_S", 0)


@pytest.mark.parametrize("datatype", FIELDS)
def test_values_are_those_that_protobuf_reads(datatype: str) -> None:
    values = values_of(datatype)
    request = request_of(datatype, values)
    header, request_id, raws = split_contents(split_request(request.SerializeToString()))
    assert len(header) < 100 and request_id == b"7" and callable(raws)
    expected = to_bytes(request.inputs[0].contents, "x", datatype, COUNT, "m")
    assert [bytes(raw) for raw in raws()] == [expected, expected]


def read(request: pb.ModelInferRequest) -> list[memoryview]:
    raws = split_contents(split_request(request.SerializeToString()))[2]
    assert callable(raws)
    return raws()


WRONG: dict[str, tuple[Callable[[pb.ModelInferRequest], object], str]] = {
    "too few": (lambda request: request.inputs[1].contents.int_contents.pop(), "expected 2000 elements in int_conten"),
    "none": (lambda request: request.inputs[1].ClearField("contents"), "expected 2000 elements in int_contents, got 0"),
    "of another type": (
        lambda request: request.inputs[0].contents.fp32_contents.append(1),
        "expected int_contents for INT8, got fp32_contents",
    ),
    "out of range": (
        lambda request: request.inputs[0].contents.int_contents.__setitem__(7, 128),
        "input 'x' for model 'm': an element does not fit into INT8",
    ),
    "raw only": (lambda request: setattr(request.inputs[0], "datatype", "FP16"), "only possible in raw_input_contents"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said(case: str) -> None:
    request = request_of("INT8", [1] * 2000)
    change, said = WRONG[case]
    change(request)
    with pytest.raises(RequestError, match=said):
        read(request)


def test_values_one_by_one_are_bounded() -> None:
    with pytest.raises(MalformedRequestError, match="more than 50000 values that are not packed"):
        split_contents(split_request(request_of("BYTES", [b""] * 50_001).SerializeToString()))


def test_numbers_that_are_not_packed_are_read() -> None:
    request = request_of("INT32", [1] * 100, "x")
    request.outputs.add(name="o" * 1000)
    (tensor,) = request.inputs
    contents = b"".join(bytes([2 << 3, value]) for value in range(100))
    tensor.ClearField("contents")
    whole = tensor.SerializeToString() + length_prefix(5, len(contents)) + contents
    request.ClearField("inputs")
    message = request.SerializeToString() + length_prefix(5, len(whole)) + whole
    raws = split_contents(split_request(message))[2]
    assert callable(raws) and bytes(raws()[0]) == np.arange(100, dtype=np.int32).tobytes()
