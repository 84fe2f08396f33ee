"""What is sent and what comes back: messages of gRPC, bodies of HTTP, answers in a form that JSON can have."""

import http.client
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from tritonclient.utils import deserialize_bytes_tensor

from benchmarks.differential.asked import BINARY, DTYPES, TYPED, Request, Tensor, Value
from gangway.protos import grpc_service_pb2 as pb

HEADERS = ("content-type", "transfer-encoding", "allow", "retry-after")
HEADER_LENGTH = "inference-header-content-length"
CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
SHOWN_ELEMENTS = 64

Answer = Any  # what JSON has


def grpc_message(request: Request, way: str) -> pb.ModelInferRequest:
    """Return a request's message, with raw or with typed contents."""
    message = pb.ModelInferRequest(model_name=request.model, model_version=request.version, id=request.id)
    for name, value in request.parameters.items():
        _set(message.parameters[name], value)
    for tensor in request.inputs:
        told = message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if way == TYPED:
            getattr(told.contents, CONTENTS[tensor.datatype]).extend(tensor.elements)
        else:
            message.raw_input_contents.append(tensor.content)
    for name in request.outputs:
        output = message.outputs.add(name=name)
        for key, value in request.output_parameters.items():
            _set(output.parameters[key], value)
    return message


def _set(parameter: pb.InferParameter, value: Value) -> None:
    kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    setattr(parameter, kinds[type(value)], value)


def http_body(request: Request, way: str) -> tuple[bytes, Mapping[str, str]]:
    """Return body and headers of a request over HTTP."""
    head: dict[str, Any] = {"inputs": []}
    if request.id:
        head["id"] = request.id
    if request.parameters or way == BINARY:
        head["parameters"] = dict(request.parameters)
    contents = []
    for tensor in request.inputs:
        told: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        if way == BINARY:
            contents.append(tensor.content)
            told["parameters"] = {"binary_data_size": len(contents[-1])}
        else:
            told["data"] = _json_elements(tensor)
        head["inputs"].append(told)
    if request.outputs:
        more: dict[str, Any] = {**request.output_parameters, **({"binary_data": True} if way == BINARY else {})}
        head["outputs"] = [{"name": name, **({"parameters": more} if more else {})} for name in request.outputs]
    elif way == BINARY:
        head["parameters"]["binary_data_output"] = True
    text = json.dumps(head).encode()
    headers = {"content-type": "application/json", **request.headers}
    if way == BINARY:
        headers |= {"content-type": "application/octet-stream", HEADER_LENGTH: str(len(text))}
    return text + b"".join(contents), headers


def _json_elements(tensor: Tensor) -> list[Any]:
    return [each.decode() if isinstance(each, bytes) else each for each in tensor.elements]


def response_of(message: Message) -> Answer:
    """Return a message of gRPC as a dictionary, with the contents of its tensors as elements."""
    if not isinstance(message, pb.ModelInferResponse):
        return MessageToDict(message, preserving_proto_field_name=True)
    raw = list(message.raw_output_contents)
    outputs = [
        {
            "name": output.name,
            "datatype": output.datatype,
            "shape": list(output.shape),
            **({"parameters": _parameters(output.parameters)} if output.parameters else {}),
            **({"data": elements_of(output.datatype, raw[index])} if index < len(raw) else {}),
        }
        for index, output in enumerate(message.outputs)
    ]
    answer = {
        "model_name": message.model_name,
        "model_version": message.model_version,
        "id": message.id,
        "parameters": _parameters(message.parameters),
        "outputs": outputs,
    }
    return {key: value for key, value in answer.items() if value}


def _parameters(given: Mapping[str, pb.InferParameter]) -> dict[str, Any]:
    found = {}
    for name, parameter in sorted(given.items()):
        kind = parameter.WhichOneof("parameter_choice") or "nothing"
        found[name] = {kind: getattr(parameter, kind, None)}
    return found


def elements_of(datatype: str, content: bytes) -> list[Any] | str:
    """Return the elements of raw contents; those that fit no datatype as they are."""
    try:
        if datatype == "BYTES":
            elements = [each.decode("latin-1") for each in deserialize_bytes_tensor(content)]
        else:
            array = np.frombuffer(content, DTYPES[datatype])
            elements = [float(each) for each in array] if datatype in ("FP16", "BF16") else array.tolist()
    except Exception as error:  # of numpy, struct and others: the contents fit no datatype
        return f"{type(error).__name__}: {content[:SHOWN_ELEMENTS].hex()}"
    shown = [str(each) if isinstance(each, float) and not np.isfinite(each) else each for each in elements]
    return (
        [*shown[:SHOWN_ELEMENTS], f"and {len(shown) - SHOWN_ELEMENTS} more"] if len(shown) > SHOWN_ELEMENTS else shown
    )


def error_of(error: Any) -> Answer:
    """Return the error of a call."""
    return {"code": error.code().name, "message": error.details()}


def http_answer(found: http.client.HTTPResponse, content: bytes) -> Answer:
    """Return an answer over HTTP, with the contents of its binary tensors as elements."""
    answer: dict[str, Any] = {"status": found.status}
    answer |= {name: found.headers[name] for name in HEADERS if name in found.headers}
    length = found.headers.get(HEADER_LENGTH)
    if length is not None:
        answer["has_header_length"] = True
    if (found.headers.get("content-type") or "").startswith("text/event-stream"):
        events = [line.removeprefix("data: ") for line in content.decode().split("\n\n") if line]
        return {**answer, "events": [_json_of(event) for event in events]}
    head, tail = (content[: int(length)], content[int(length) :]) if length is not None else (content, b"")
    if not head:
        return answer
    body = _json_of(head.decode("latin-1" if length is None and not _is_utf8(head) else "utf-8"))
    if isinstance(body, dict):
        for output in body.get("outputs", ()):
            size = output.get("parameters", {}).pop("binary_data_size", None)
            if size is not None:
                output["binary"] = elements_of(output["datatype"], tail[:size])
                tail = tail[size:]
            if not output.get("parameters", True):
                del output["parameters"]
    return {**answer, "body": body, **({"rest": tail.hex()} if tail else {})}


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _json_of(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=str)
    except json.JSONDecodeError:
        return {"no JSON": re.sub(r"\s+", " ", text)}
