"""KServe's first protocol over a front end: rows and columns in and out, bytes, refusals."""

import base64
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gangway.artifact.format import TensorSpec
from gangway.protos import grpc_service_pb2 as pb
from gangway.python_backend.elements import join_elements
from gangway.server.errors import RequestError
from gangway.server.models.served import ServedModel
from gangway.server.serving.http.json_text import NumberText
from gangway.server.serving.http.predict import COLUMNS, ROWS, predicted, read_predict, shape_of
from tests.server.conftest import TEXTS, announce

Ask = Callable[..., Any]
LONG = 3 * 224 * 224


def predict(http: Ask, model: str, body: Any, version: str = "") -> Any:
    answer = http("POST", f"/v1/models/{model}{version}:predict", body)
    assert answer.headers["content-type"] == "application/json"
    return answer.content if answer.status == 200 else (answer.status, answer.content["error"])


def test_rows_of_one_input(http: Ask) -> None:
    rows = [[1, 2.5, 3, -4], [5, 6, 7, 8]]
    assert predict(http, "identity_fp32", {"instances": rows}) == {"predictions": rows}
    assert predict(http, "identity_fp32", {"instances": rows}, "/versions/1") == {"predictions": rows}
    assert predict(http, "identity_fp32", {"instances": [{"x": row} for row in rows]}) == {"predictions": rows}
    assert predict(http, "identity_bool", {"instances": [[True, False] * 2]}) == {"predictions": [[True, False] * 2]}
    exact = [[2**63 - 1, -(2**63), 0, 1]]
    assert predict(http, "identity_int64", {"instances": exact, "signature_name": "a"}) == {"predictions": exact}


def test_rows_of_several_inputs(http: Ask) -> None:
    rows = [{"INPUT0": [place] * 16, "INPUT1": [1] * 16} for place in (5, 7)]
    wanted = [{"OUTPUT0": [place + 1] * 16, "OUTPUT1": [place - 1] * 16} for place in (5, 7)]
    assert predict(http, "simple", {"instances": rows}) == {"predictions": wanted}


def test_columns(http: Ask) -> None:
    columns = {"INPUT0": [[5] * 16, [7] * 16], "INPUT1": [[1] * 16] * 2}
    wanted = {"OUTPUT0": [[6] * 16, [8] * 16], "OUTPUT1": [[4] * 16, [6] * 16]}
    assert predict(http, "simple", {"inputs": columns}) == {"outputs": wanted}
    assert predict(http, "identity_int8", {"inputs": [[1, 2, 3, 4]]}) == {"outputs": [[1, 2, 3, 4]]}


def test_numbers_that_json_has_no_word_for(http: Ask) -> None:
    body = b'{"instances": [[NaN, Infinity, -Infinity, 1]]}'
    found = predict(http, "identity_fp64", body)["predictions"][0]
    assert str(found) == "[nan, inf, -inf, 1.0]"


@pytest.mark.parametrize("form", ["rows", "named rows", "columns"])
def test_large_tensors(http: Ask, form: str) -> None:
    values = np.arange(LONG).reshape(1, 3, 224, 224)
    bodies = {
        "rows": {"instances": values.tolist()},
        "named rows": {"instances": [{"x": values[0].tolist()}]},
        "columns": {"inputs": {"x": values.tolist()}},
    }
    (found,) = predict(http, "image", bodies[form]).values()
    assert np.array_equal(np.array(found), values)


@pytest.mark.parametrize(
    ("model", "body", "status", "said"),
    [
        ("nobody", {"instances": [1]}, 404, "unknown model: 'nobody'"),
        ("simple", {}, 400, "expected either 'instances' or 'inputs', got neither"),
        ("simple", {"instances": [], "inputs": []}, 400, "got both"),
        ("simple", {"instances": []}, 400, "expected an array of instances, got an empty one"),
        ("simple", {"instances": 5}, 400, "expected an array of instances, got a number"),
        ("simple", {"instances": [[1] * 16]}, 400, "2 inputs: expected objects with INPUT0, INPUT1"),
        ("simple", {"instances": [{"INPUT0": [1] * 16}, {"INPUT1": [1] * 16}]}, 400, "do not all have the same inputs"),
        ("simple", {"instances": [{"INPUT0": [1] * 16}, 3]}, 400, "do not all have the same inputs"),
        ("simple", {"instances": [{"INPUT0": [1] * 16}]}, 400, "expected 2 inputs but got 1 inputs"),
        ("simple", {"instances": [{"OTHER": 1}]}, 400, "it has no input 'OTHER'; its inputs are INPUT0, INPUT1"),
        ("identity_int8", {"instances": [[1, 2, 3]]}, 400, "unexpected shape for input 'x'"),
        ("identity_int8", {"instances": [[1, 2], [1, 2, 3]]}, 400, "not nested evenly"),
        ("identity_int8", {"instances": [[1, 2, 3, [4]]]}, 400, "an array ([4]) is no element of INT8"),
        ("identity_int8", {"instances": [[1, 2, 3, 400]]}, 400, "out of the range of INT8"),
        ("identity_int8", {"instances": [[1, 2, 3, 4]] * 5}, 400, "batch-size must be <= 4"),
        ("identity_fp16", {"instances": [[1, 2, 3, 4]]}, 400, "FP16"),
        (
            "image",
            {"instances": [{"x": [[0.25] * 30_000]}, {"x": [[0.25] * 29_999]}]},
            400,
            "rows have different shapes",
        ),
        ("image", {"instances": [[0.25] * 30_000, [0.25] * 29_999]}, 400, "not nested evenly"),
        ("identity_int8", [1], 400, "expected a JSON object, got an array"),
    ],
)
def test_refusals(http: Ask, model: str, body: Any, status: int, said: str) -> None:
    found = predict(http, model, body)
    assert found[0] == status
    assert said in found[1]


def test_models_and_whether_they_are_ready(http: Ask) -> None:
    assert http("GET", "/v1/models").content.items() >= http("GET", "/v2/models").content.items()
    assert http("GET", "/v1/models/simple").content.items() >= {"name": "simple", "ready": True}.items()
    unknown = http("GET", "/v1/models/nobody")
    assert (unknown.status, "'nobody' is not found" in unknown.content["error"]) == (404, True)
    assert http("GET", "/v1/models/simple:predict").status == 405
    for path in ("/v1", "/v1/models/", "/v1/models/:predict", "/v1/models/a/b:predict"):
        assert http("POST", path, {"instances": [1]}).status == 404, path
    for path in ("/v1/models/simple:explain", "/v1/models/simple:classify", "/v1/models/simple/versions/1:regress"):
        answer = http("POST", path, {"instances": [1]})
        assert (answer.status, "only ':predict'" in answer.content["error"]) == (501, True), path


def outputs_of(form: str, **outputs: tuple[str, list[int], bytes]) -> Any:
    message = pb.ModelInferResponse(model_name="m")
    for name, (datatype, shape, raw) in outputs.items():
        message.outputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_output_contents.append(raw)
    return json.loads(predicted(message.SerializeToString(), form))


def test_bytes_that_are_no_text() -> None:
    texts = join_elements([b"a\xc3\xa4", b"\xff\x00"])
    in_base64 = [{"b64": base64.b64encode(each).decode()} for each in (b"a\xc3\xa4", b"\xff\x00")]
    assert outputs_of(ROWS, y=("BYTES", [2], texts)) == {"predictions": ["aä", in_base64[1]]}
    assert outputs_of(ROWS, y_bytes=("BYTES", [2, 1], texts)) == {"predictions": [[each] for each in in_base64]}
    two = {"y": ("BYTES", [2], texts), "n": ("INT8", [2], b"\x01\x02")}
    assert outputs_of(ROWS, **two) == {"predictions": [{"y": "aä", "n": 1}, {"y": in_base64[1], "n": 2}]}
    with pytest.raises(RequestError, match="do not have the same first dimension: send 'inputs'"):
        outputs_of(ROWS, y=("INT8", [2], b"ab"), n=("INT8", [1], b"a"))
    with pytest.raises(RequestError, match="send 'inputs'"):  # a number is no array of predictions
        outputs_of(ROWS, n=("INT8", [], b"\x03"))
    assert outputs_of(COLUMNS, y=("INT8", [2], b"\x01\x02"), n=("INT8", [], b"\x03")) == {
        "outputs": {"y": [1, 2], "n": 3}
    }


def test_halves_are_numbers() -> None:
    halves = np.array([1.5, -2], np.float16).tobytes()
    brain = (np.array([1.5, -2], np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    assert (
        outputs_of(ROWS, y=("FP16", [2], halves))
        == outputs_of(ROWS, y=("BF16", [2], brain))
        == {"predictions": [1.5, -2]}
    )


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("[1, 2, 3]", (3,)),
        ("[[1.5e3, 2], [3, 4], [ 5,6]]", (3, 2)),
        ("[[[[1],[2]],[[3],[4]],[[5],[6]]]]", (1, 3, 2, 1)),
        ("[[1, 2], [3]]", None),
        ("[[1], [2, 3]]", None),
        ("[[1, 2], [3, 4], [[5, 6]]]", None),
        ("[[[1, 2], [3, 4]], [[5, 6]]]", None),
        ("[[[1, 2]], [[3, 4], [5, 6]]]", None),
    ],
)
def test_shapes_of_arrays(text: str, shape: tuple[int, ...] | None) -> None:
    raw = text.encode()
    for value in (json.loads(text), NumberText.at(raw, 0, len(raw))):
        if shape is None:
            with pytest.raises(RequestError, match="not nested evenly"):
                shape_of(value, "x")
        else:
            assert shape_of(value, "x") == shape


def test_texts_and_bytes_become_elements() -> None:
    model = ServedModel.of(TEXTS)
    for body in ({"instances": [["a", {"b64": "/wA="}]]}, {"inputs": {"x": [["a", {"b64": "/wA="}]]}}):
        asked = read_predict(model, "", json.dumps(body).encode())
        assert asked.request.contents == (join_elements([b"a", b"\xff\x00"]),)
        (tensor,) = pb.ModelInferRequest.FromString(asked.request.header).inputs
        assert (tensor.name, list(tensor.shape)) == ("x", [1, 2])
    for wrong, said in (({"b64": "?"}, "not base64"), ({"b64": 1}, "expected a string"), (3, "expected a string")):
        with pytest.raises(RequestError, match=said):
            read_predict(model, "", json.dumps({"instances": [["a", wrong]]}).encode())


@pytest.mark.parametrize(("instances", "shape"), [(["a", {"b64": "/wA="}], (2, 1)), ([["a"]], (1, 1)), ("a", ())])
def test_a_row_of_one_may_be_the_value_alone(instances: Any, shape: tuple[int, ...]) -> None:
    batched = announce(0, "m", [TensorSpec("x", "BYTES", (-1, 1), 0)], [TensorSpec("y", "BYTES", (-1, 1), 0)], 4)
    asked = read_predict(ServedModel.of(batched), "", json.dumps({"inputs": instances}).encode())
    (tensor,) = pb.ModelInferRequest.FromString(asked.request.header).inputs
    assert tuple(tensor.shape) == shape
