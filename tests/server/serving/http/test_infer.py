"""Inference over HTTP: JSON and binary tensors in every mix, ids, compression, raw bodies, clients that leave."""

import gzip
import socket
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from gangway.executor.slots import SlotStatus

A = np.arange(16, dtype=np.int32)
B = np.ones(16, dtype=np.int32)
Ask = Callable[..., Any]


def json_input(name: str, values: np.ndarray, datatype: str = "INT32", nested: bool = False) -> dict[str, Any]:
    data = [values.tolist()] if nested else values.tolist()
    return {"name": name, "shape": [1, len(values)], "datatype": datatype, "data": data}


def binary_input(name: str, values: np.ndarray, datatype: str = "INT32") -> dict[str, Any]:
    parameters = {"binary_data_size": values.nbytes}
    return {"name": name, "shape": [1, len(values)], "datatype": datatype, "parameters": parameters}


def infer(http: Ask, content: dict[str, Any], *tensors: np.ndarray, model: str = "simple", **headers: str) -> Any:
    import json

    text = json.dumps(content).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    if tensors:
        named["Inference-Header-Content-Length"] = str(len(text))
    return http("POST", f"/v2/models/{model}/infer", text + b"".join(map(bytes, tensors)), named)


def binary_outputs(answer: Any) -> dict[str, bytes]:
    rest = answer.body[int(answer.headers["inference-header-content-length"]) :]
    found = {}
    for output in answer.content["outputs"]:
        if size := output.get("parameters", {}).get("binary_data_size"):
            found[output["name"]], rest = rest[:size], rest[size:]
    assert rest == b""
    return found


@pytest.mark.parametrize("nested", [False, True])
def test_json_in_json_out(http: Ask, nested: bool) -> None:
    answer = infer(http, {"inputs": [json_input("INPUT0", A, nested=nested), json_input("INPUT1", B, nested=nested)]})
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.content == {
        "model_name": "simple",
        "model_version": "1",
        "outputs": [
            {"name": "OUTPUT0", "datatype": "INT32", "shape": [1, 16], "data": (A + 1).tolist()},
            {"name": "OUTPUT1", "datatype": "INT32", "shape": [1, 16], "data": (A - 1).tolist()},
        ],
    }


def test_binary_in_binary_out(http: Ask) -> None:
    content = {"inputs": [binary_input("INPUT0", A), binary_input("INPUT1", B)]}
    content["parameters"] = {"binary_data_output": True}
    for _ in range(2):  # understood, then known
        answer = infer(http, content, A, B)
        assert answer.headers["content-type"] == "application/octet-stream"
        assert binary_outputs(answer) == {"OUTPUT0": (A + 1).tobytes(), "OUTPUT1": (A - 1).tobytes()}


def test_mixed_kinds(http: Ask) -> None:
    outputs = [{"name": "OUTPUT1", "parameters": {"binary_data": True}}, {"name": "OUTPUT0"}]
    answer = infer(http, {"inputs": [json_input("INPUT1", B), binary_input("INPUT0", A)], "outputs": outputs}, A)
    assert [output["name"] for output in answer.content["outputs"]] == ["OUTPUT1", "OUTPUT0"]
    assert answer.content["outputs"][1]["data"] == (A + 1).tolist()
    assert binary_outputs(answer) == {"OUTPUT1": (A - 1).tobytes()}


def test_one_output_that_is_not_to_be_binary(http: Ask) -> None:
    content: dict[str, Any] = {"inputs": [json_input("INPUT0", A), json_input("INPUT1", B)]}
    content["parameters"] = {"binary_data_output": True}
    content["outputs"] = [{"name": "OUTPUT0", "parameters": {"binary_data": False}}, {"name": "OUTPUT1"}]
    answer = infer(http, content)
    assert answer.content["outputs"][0]["data"] == (A + 1).tolist()
    assert binary_outputs(answer) == {"OUTPUT1": (A - 1).tobytes()}


@pytest.mark.parametrize("request_id", ["7", 'é"\\\n', ""])
def test_ids_come_back(http: Ask, request_id: str) -> None:
    answer = infer(http, {"id": request_id, "inputs": [json_input("INPUT0", A), json_input("INPUT1", B)]})
    assert answer.content.get("id", "") == request_id


def test_a_version_in_the_path(http: Ask) -> None:
    body = {"inputs": [json_input("INPUT0", A), json_input("INPUT1", B)]}
    assert http("POST", "/v2/models/simple/versions/1/infer", body).content["model_version"] == "1"
    answer = http("POST", "/v2/models/simple/versions/3/infer", body)
    assert (answer.status, "version 3 is not found" in answer.content["error"]) == (404, True)


def test_a_report_is_among_the_parameters(http: Ask) -> None:
    inputs = [json_input("INPUT0", A), json_input("INPUT1", B)]
    content = infer(http, {"inputs": inputs, "parameters": {"gangway_stats": True}}).content
    assert content["parameters"]["ranks"] == 0
    assert isinstance(content["parameters"]["compute_us"], int)


VALUES = {
    "BOOL": [True, False, True, True],
    "INT8": [-128, 127, 0, 1],
    "INT16": [-(2**15), 2**15 - 1, 0, 1],
    "INT64": [-(2**63), 2**63 - 1, 0, 1],
    "UINT8": [0, 255, 1, 2],
    "UINT16": [0, 65535, 1, 2],
    "UINT32": [0, 2**32 - 1, 1, 2],
    "UINT64": [0, 2**64 - 1, 1, 2],
    "FP32": [1.5, -0.1, 3, 1e-40],
    "FP64": [1e300, -0.1, 3, 5e-324],
}


@pytest.mark.parametrize("datatype", VALUES)
def test_datatypes_as_json(http: Ask, datatype: str) -> None:
    values = VALUES[datatype]
    tensor = {"name": "x", "shape": [1, 4], "datatype": datatype, "data": values}
    output = infer(http, {"inputs": [tensor]}, model=f"identity_{datatype.lower()}").content["outputs"][0]
    assert (output["datatype"], output["shape"]) == (datatype, [1, 4])
    if datatype == "FP32":
        assert np.array_equal(np.array(output["data"], np.float32), np.array(values, np.float32))
    else:
        assert output["data"] == values


@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
def test_what_is_no_number(http: Ask, datatype: str) -> None:
    values = [float("nan"), float("inf"), -float("inf"), 0.5]
    tensor = {"name": "x", "shape": [1, 4], "datatype": datatype, "data": values}
    answer = infer(http, {"inputs": [tensor]}, model=f"identity_{datatype.lower()}")
    assert b'"data":[NaN,Infinity,-Infinity,0.5]' in answer.body  # RapidJSON's words, and Python's
    np.testing.assert_array_equal(answer.content["outputs"][0]["data"], values)


def test_half_precision_is_binary_only(http: Ask) -> None:
    half = np.array([1, 2, 3, 4], np.float16)
    outputs = [{"name": "y", "parameters": {"binary_data": True}}]
    content = {"inputs": [binary_input("x", half, "FP16")], "outputs": outputs}
    assert binary_outputs(infer(http, content, half, model="identity_fp16")) == {"y": half.tobytes()}
    refused = infer(http, {"inputs": [binary_input("x", half, "FP16")]}, half, model="identity_fp16")
    assert (refused.status, "output 'y'" in refused.content["error"]) == (400, True)
    refused = infer(http, {"inputs": [json_input("x", half, "FP16")]}, model="identity_fp16")
    assert "FP16 data cannot be sent as JSON" in refused.content["error"]


def test_a_body_that_is_the_one_input(http: Ask) -> None:
    values = np.arange(4, dtype=np.float32)
    headers = {"Inference-Header-Content-Length": "0", "Content-Type": "application/octet-stream"}
    answer = http("POST", "/v2/models/identity_fp32/infer", values.tobytes(), headers)
    assert answer.content["outputs"][0]["shape"] == [1, 4]
    assert binary_outputs(answer) == {"y": values.tobytes()}
    refused = http("POST", "/v2/models/simple/infer", values.tobytes(), headers)
    assert (refused.status, "has 2 inputs" in refused.content["error"]) == (400, True)
    refused = http("POST", "/v2/models/identity_fp32/infer", values.tobytes()[:-1], headers)
    assert (refused.status, "do not make a tensor" in refused.content["error"]) == (400, True)


COMPRESSED: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("encoding", COMPRESSED)
def test_compressed_requests(http: Ask, encoding: str, members: int) -> None:
    import json

    text = json.dumps({"inputs": [binary_input("INPUT0", A), json_input("INPUT1", B)]}).encode()
    whole = text + A.tobytes()
    parts = [whole[len(whole) * part // members : len(whole) * (part + 1) // members] for part in range(members)]
    body = b"".join(map(COMPRESSED[encoding], parts))
    headers = {"Content-Encoding": encoding, "Inference-Header-Content-Length": str(len(text))}
    assert http("POST", "/v2/models/simple/infer", body, headers).content["outputs"][0]["data"] == (A + 1).tolist()


@pytest.mark.parametrize(
    ("accept", "encoding"),
    [("gzip", "gzip"), ("deflate", "deflate"), ("gzip;q=0.1, deflate;q=0.5", "deflate"), ("br", ""), ("gzip;q=0", "")],
)
def test_compressed_answers(http: Ask, accept: str, encoding: str) -> None:
    image = np.zeros((1, 3 * 224 * 224), np.float32)
    tensor = binary_input("x", image[0], "FP32") | {"shape": [1, 3, 224, 224]}
    tensor["parameters"] = {"binary_data_size": image.nbytes}
    content = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
    answer = infer(http, content, image, model="image", Accept_Encoding=accept)
    assert answer.headers.get("content-encoding", "") == encoding
    body = zlib.decompress(answer.body, wbits=47) if encoding else answer.body
    assert body.endswith(image.tobytes())
    small = infer(http, {"inputs": [json_input("INPUT0", A), json_input("INPUT1", B)]}, Accept_Encoding=accept)
    assert "content-encoding" not in small.headers


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (SlotStatus.UNAVAILABLE, 503),
        (SlotStatus.DEADLINE, 504),
        (SlotStatus.LATE, 503),
        (SlotStatus.QUEUE_FULL, 503),
        (SlotStatus.INTERNAL, 500),
        (SlotStatus.CANCELLED, 400),
    ],
)
def test_what_the_scheduler_says_reaches_the_client(server: Any, http: Ask, status: SlotStatus, expected: int) -> None:
    server.scheduler.status = status
    answer = infer(http, {"inputs": [json_input("INPUT0", A), json_input("INPUT1", B)]})
    assert answer.status == expected
    assert "simple" in answer.content["error"]


def test_too_many_requests_are_refused_at_once(server: Any, http: Ask) -> None:
    server.scheduler.holding = True
    slots = server.plane.slots.slots
    content = {"inputs": [json_input("INPUT0", A), json_input("INPUT1", B)]}
    with ThreadPoolExecutor(slots) as pool:
        running = [pool.submit(infer, http, content) for _ in range(slots)]
        held = [server.scheduler.held.get(timeout=10) for _ in range(slots)]
        refused = infer(http, content)
        assert refused.status == 503
        assert f"Exceeds maximum queue size: {slots} requests" in refused.content["error"]
        assert http("GET", "/v2/health/live").status == 200  # while every slot is taken
        for submitted in held:
            server.scheduler.answer(submitted)
        assert [answer.result(10).status for answer in running] == [200] * slots


def test_a_client_that_leaves_frees_its_request(server: Any) -> None:
    import json

    server.scheduler.holding = True
    body = json.dumps({"inputs": [json_input("INPUT0", A), json_input("INPUT1", B)]}).encode()
    host, _, port = server.http_address.partition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v2/models/simple/infer HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        submitted = server.scheduler.held.get(timeout=10)
    assert server.scheduler.cancelled.get(timeout=10).slot == submitted.slot
