"""Inference over HTTP: what only JSON and binary tensors in it have, raw bodies, clients that leave."""

import json
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

A = np.arange(16, dtype=np.int32)
B = np.ones(16, dtype=np.int32)
Ask = Callable[..., Any]


def json_input(name: str, values: np.ndarray, datatype: str = "INT32") -> dict[str, Any]:
    return {"name": name, "shape": [1, len(values)], "datatype": datatype, "data": values.tolist()}


def binary_input(name: str, values: np.ndarray, datatype: str = "INT32") -> dict[str, Any]:
    parameters = {"binary_data_size": values.nbytes}
    return {"name": name, "shape": [1, len(values)], "datatype": datatype, "parameters": parameters}


def infer(http: Ask, content: dict[str, Any], *tensors: np.ndarray, model: str = "simple", **headers: str) -> Any:
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


def test_one_output_that_is_not_to_be_binary(http: Ask) -> None:
    content: dict[str, Any] = {"inputs": [json_input("INPUT0", A), json_input("INPUT1", B)]}
    content["parameters"] = {"binary_data_output": True}
    content["outputs"] = [{"name": "OUTPUT0", "parameters": {"binary_data": False}}, {"name": "OUTPUT1"}]
    answer = infer(http, content)
    assert answer.content["outputs"][0]["data"] == (A + 1).tolist()
    assert binary_outputs(answer) == {"OUTPUT1": (A - 1).tobytes()}


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


def test_a_client_that_leaves_frees_its_request(server: Any) -> None:
    server.scheduler.holding = True
    body = json.dumps({"inputs": [json_input("INPUT0", A), json_input("INPUT1", B)]}).encode()
    host, _, port = server.http_url.partition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /v2/models/simple/infer HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        submitted = server.scheduler.held.get(timeout=10)
    assert server.scheduler.cancelled.get(timeout=10).slot == submitted.slot
