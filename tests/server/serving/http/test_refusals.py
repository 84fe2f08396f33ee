"""Wrong requests over HTTP are refused with their status and a message that names what is wrong.

More of them, byte by byte, are in `tests/wire`.
"""

import gzip
import json
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from gangway.server.errors import RequestError
from gangway.server.serving.http.json_text import MAX_JSON_BYTES, parse

Ask = Callable[..., Any]
Change = Callable[[dict[str, Any]], object]


def good_request() -> dict[str, Any]:
    tensor = {"shape": [1, 16], "datatype": "INT32", "data": [1] * 16}
    return {"inputs": [{"name": name, **tensor} for name in ("INPUT0", "INPUT1")]}


def setting(*path: Any, to: Any) -> Change:
    def change(request: dict[str, Any]) -> None:
        for step in path[:-1]:
            request = request[step]
        request[path[-1]] = to

    return change


def first(**values: Any) -> Change:
    return lambda request: request["inputs"][0].update(values)


INPUT = "input 'INPUT0' for model 'simple'"
CASES: dict[str, tuple[Change, int, str]] = {
    "negative timeout": (setting("parameters", to={"timeout": -1}), 400, "parameter 'timeout' for model 'simple'"),
    "fractional priority": (setting("parameters", to={"priority": 0.5}), 400, "expected int64_param, got double_param"),
    # what only JSON can get wrong
    "inputs that are no array": (setting("inputs", to={}), 400, "expected an array as 'inputs', got an object"),
    "an input that is no object": (setting("inputs", 0, to=5), 400, "expected an object as input, got a number"),
    "half a character": (first(name="\ud800"), 400, "the string is not UTF-8"),
    "a shape of booleans": (
        first(shape=[True, 16]),
        400,
        f"{INPUT}: expected an array of numbers as 'shape', got [true, 16]",
    ),
    "no shape": (
        lambda request: request["inputs"][0].pop("shape"),
        400,
        f"{INPUT}: expected an array of numbers as 'shape', got nothing",
    ),
    "a negative size": (first(shape=[1, -1]), 400, f"{INPUT}: expected sizes of 0 or more in 'shape', got [1, -1]"),
    "a huge shape": (first(shape=[2**70, 16]), 400, f"{INPUT}: expected an array of numbers as 'shape'"),
    "a shape of which the product overflows": (first(shape=[2**62, 16]), 400, f"{INPUT}: expected {2**66} elements"),
    "no data": (lambda request: request["inputs"][0].pop("data"), 400, f"{INPUT}: expected 'data', 'binary_data_size'"),
    "data twice": (first(parameters={"binary_data_size": 64}), 400, "got 'data' and 'binary_data_size'"),
    "data that is no array": (first(data=1), 400, f"{INPUT}: expected an array as 'data', got a number"),
    "ragged data": (first(data=[[1] * 8, 1]), 400, f"{INPUT}: arrays and elements are mixed"),
    "deep data": (first(data=json.loads("[" * 40 + "]" * 40)), 400, f"{INPUT}: the arrays are nested deeper than"),
    "null": (first(data=[None] * 16), 400, f"{INPUT}: null (null) is no element of INT32"),
    "far out of range": (first(data=[10**30] * 16), 400, f"{INPUT}: "),
    "binary data that is not there": (
        lambda request: (request["inputs"][0].pop("data"), first(parameters={"binary_data_size": 64})(request)),
        400,
        "model 'simple': 0 bytes follow the JSON, but the inputs' binary_data_size make 64",
    ),
    "a binary size below 0": (
        lambda request: (request["inputs"][0].pop("data"), first(parameters={"binary_data_size": -1})(request)),
        400,
        f"{INPUT}: binary_data_size is -1",
    ),
    "parameters that are no object": (setting("parameters", to=[]), 400, "expected an object as 'parameters'"),
    "a parameter that is an array": (setting("parameters", to={"own": []}), 400, "parameter 'own': expected a string"),
    "a flag that is none": (setting("parameters", to={"binary_data_output": 1}), 400, "expected a boolean as"),
    "a long id": (setting("id", to="x" * 70_000), 400, "expected an id of at most 65536 bytes"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused(http: Ask, case: str) -> None:
    change, status, said = CASES[case]
    request = good_request()
    change(request)
    answer = http("POST", "/v2/models/simple/infer", request)
    assert said in answer.content["error"]
    assert (answer.status, answer.headers["content-type"]) == (status, "application/json")
    assert http("POST", "/v2/models/simple/infer", good_request()).status == 200


def test_floats_out_of_range(http: Ask) -> None:
    tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 1e39]}
    answer = http("POST", "/v2/models/identity_fp32/infer", {"inputs": [tensor]})
    assert answer.content["error"] == "input 'x' for model 'identity_fp32': an element is out of the range of FP32"
    tensor["data"] = [1, 2, 3, float("inf")]
    assert http("POST", "/v2/models/identity_fp32/infer", {"inputs": [tensor]}).status == 200


BODIES: dict[str, tuple[bytes, dict[str, str], int, str]] = {
    "nested deeply": (b"[" * 40_000, {}, 400, "nested too deeply"),
    "many digits": (b'{"inputs":' + b"9" * 100_000 + b"}", {}, 400, ""),
    "large": (b"{" + b" " * (5 << 20) + b"}", {}, 413, "the body has more than 4194304 bytes"),
    "a header length that is no number": (b"{}", {"Inference-Header-Content-Length": "x"}, 400, "got 'x'"),
    "a header length beyond the body": (b"{}", {"Inference-Header-Content-Length": "3"}, 400, "expected 0 to 2"),
    "a negative header length": (b"{}", {"Inference-Header-Content-Length": "-1"}, 400, "got '-1'"),
    "no gzip": (b"{}", {"Content-Encoding": "gzip"}, 400, "the body is no gzip"),
    "a member cut off": (gzip.compress(b"{}") * 2 + b"\x1f\x8b", {"Content-Encoding": "gzip"}, 400, "bytes follow the"),
    "many members": (gzip.compress(b"") * 1025, {"Content-Encoding": "gzip"}, 400, "has more than 1024 members"),
    "a bomb": (zlib.compress(bytes(64 << 20)), {"Content-Encoding": "deflate"}, 413, "when it is inflated"),
}


@pytest.mark.parametrize("case", BODIES)
def test_bodies(http: Ask, case: str) -> None:
    body, headers, status, said = BODIES[case]
    answer = http("POST", "/v2/models/simple/infer", body, headers)
    assert said in answer.content["error"]
    assert answer.status == status


@pytest.mark.parametrize(
    ("verb", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("GET", "/v2/", 404),
        ("GET", "/v2/models/", 404),
        ("GET", "/v2/models//ready", 404),
        ("GET", "/v2/models/simple/nothing", 404),
        ("GET", "/v2/models/simple/versions", 404),
        ("GET", "/v2/models/%ff/ready", 404),
        ("GET", "/v2/" + "x" * 10_000, 404),
        ("GET", "/v2/models/simple/versions/1/trace/setting", 404),
        ("GET", "/v2/models/simple/infer", 405),
        ("PUT", "/v2/models/simple/infer", 405),
        ("POST", "/v2/health/live", 405),
        ("HEAD", "/v2", 405),
        ("OPTIONS", "/v2", 405),
        ("POST", "/v2/models/simple", 405),
        ("GET", "/v2/repository/index", 405),
        ("DELETE", "/v2/systemsharedmemory/status", 405),
    ],
)
def test_paths_and_methods(http: Ask, verb: str, path: str, status: int) -> None:
    answer = http(verb, path)
    assert answer.status == status
    assert "allow" in answer.headers or status == 404
    assert not {name for name in answer.headers if name.startswith("access-control")}
    if verb != "HEAD":
        assert answer.content["error"]


def test_json_that_would_need_much_memory() -> None:
    with pytest.raises(RequestError, match="send large tensors as binary data"):
        parse(b"[" + b"[]," * (MAX_JSON_BYTES // 3) + b"[]]")
    file = b'{"parameters":{"file:1/model.onnx":"' + b"A" * MAX_JSON_BYTES + b'"}}'
    assert len(parse(file)["parameters"]["file:1/model.onnx"]) == MAX_JSON_BYTES


@pytest.mark.parametrize(("header", "admitted"), [({}, False), ({"Secret": "43"}, False), ({"Secret": "42"}, True)])
def test_restricted_routes(http: Ask, header: dict[str, str], admitted: bool) -> None:
    answer = http("POST", "/v2/repository/index", b"", header)
    assert answer.status == (200 if admitted else 403)
    assert admitted or answer.content == {"error": "This API is restricted, expecting header 'secret'"}
    assert http("GET", "/v2/health/live", b"", header).status == 200


UNKNOWN = (
    "/v2/models/nobody/infer",
    "/v2/models/simple/versions/7/infer",
    "/v2/models/nobody/generate",
    "/v1/models/nobody:predict",
)


@pytest.mark.parametrize("body", [b"{", b"{}", b"[1]", b'{"inputs": [{"name": "x"}]}'])
@pytest.mark.parametrize("path", UNKNOWN)
def test_a_wrong_name_counts_before_a_wrong_body(http: Ask, path: str, body: bytes) -> None:
    answer = http("POST", path, body)
    assert (answer.status, "unknown model" in answer.content["error"]) == (404, True)
