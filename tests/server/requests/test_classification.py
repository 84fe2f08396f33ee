"""The classification extension: which classes are told, in which order, and how they are written."""

from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from gangway.executor.frames import join_strings
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.requests.codecs import Classes, class_texts, classified


@pytest.mark.parametrize(
    ("values", "count", "expected"),
    [
        (np.array([[1, 5, 10, 4]], np.int32), 2, ["10:2", "5:1"]),
        (np.array([[0.5, 0.25, 0.125]], np.float32), 3, ["0.500000:0", "0.250000:1", "0.125000:2"]),
        (np.array([[7, 7, 7]], np.uint8), 2, ["7:0", "7:1"]),
        (np.array([[-(2**63), 2**63 - 1]], np.int64), 9, [f"{2**63 - 1}:1", f"{-(2**63)}:0"]),
        (np.array([[0, 2**64 - 1]], np.uint64), 1, [f"{2**64 - 1}:1"]),
        (np.array([[np.nan, -np.inf, 2, np.inf]], np.float64), 4, ["inf:3", "2.000000:2", "-inf:1", "nan:0"]),
        (np.array([[]], np.float32), 3, []),
    ],
)
def test_the_largest_come_first(values: Any, count: int, expected: list[str]) -> None:
    assert class_texts(values, count, ()) == [expected]


def test_labels_where_there_are_any() -> None:
    values = np.array([[3, 2, 1], [1, 2, 3]], np.int16)
    assert class_texts(values, 3, ("cat", "a:b")) == [["3:0:cat", "2:1:a:b", "1:2"], ["3:2", "2:1:a:b", "1:0:cat"]]


def test_other_outputs_stay_as_they_are() -> None:
    response = pb.ModelInferResponse(model_name="m", id="7", raw_output_contents=[b"12345678", b"\1\2\3\4\5\6"])
    response.outputs.add(name="a", datatype="FP32", shape=[1, 2])
    response.outputs.add(name="b", datatype="UINT8", shape=[2, 3, 1])
    answer = pb.ModelInferResponse.FromString(classified(response.SerializeToString(), {"b": Classes(2)}, True))
    assert answer.outputs[0] == response.outputs[0]
    assert (answer.id, answer.raw_output_contents[0]) == ("7", b"12345678")
    assert (answer.outputs[1].datatype, list(answer.outputs[1].shape)) == ("BYTES", [2, 2])
    assert answer.raw_output_contents[1] == join_strings([b"3:2", b"2:1", b"6:2", b"5:1"])


def wanted(server: Any, inputs: Any, output: str, classes: int, model: str = "simple") -> Any:
    outputs = [triton.InferRequestedOutput(output, class_count=classes)]
    return server.client.infer(model, inputs, outputs=outputs)


def test_over_grpc(server: Any, simple_inputs: Any) -> None:
    result = wanted(server, simple_inputs(2), "OUTPUT0", 3)
    assert result.as_numpy("OUTPUT0").tolist() == [[b"16:15", b"15:14", b"14:13"], [b"32:15", b"31:14", b"30:13"]]
    assert wanted(server, simple_inputs(), "OUTPUT1", 99).as_numpy("OUTPUT1").shape == (1, 16)
    assert wanted(server, simple_inputs(), "OUTPUT1", 0).as_numpy("OUTPUT1").dtype == np.int32


def test_without_a_batch_dimension(server: Any) -> None:
    image = np.zeros((1, 3, 224, 224), np.float32)
    image[0, 1, 2, 3] = 5
    tensor = triton.InferInput("x", image.shape, "FP32")
    tensor.set_data_from_numpy(image)
    result = wanted(server, [tensor], "y", 2, "image")
    assert result.as_numpy("y").tolist() == [f"5.000000:{224 * 224 + 2 * 224 + 3}".encode(), b"0.000000:0"]


@pytest.mark.parametrize("name", ["identity_fp16", "identity_bool"])
def test_types_without_an_order(server: Any, name: str) -> None:
    kind = name.removeprefix("identity_").upper()
    tensor = triton.InferInput("x", [1, 4], kind)
    tensor.set_data_from_numpy(np.zeros((1, 4), triton.triton_to_np_dtype(kind)))
    with pytest.raises(InferenceServerException, match=f"unsupported type '{kind}'") as caught:
        wanted(server, [tensor], "y", 1, name)
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
