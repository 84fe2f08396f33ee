"""Sends the steps of a case to one server, and says what it answered in a form that JSON can have."""

import http.client
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from tritonclient.utils import deserialize_bytes_tensor

from benchmarks.differential.asked import (
    BINARY,
    DTYPES,
    GRPC,
    JSON,
    SEGMENT,
    STREAM,
    TYPED,
    Http,
    Infer,
    OnStream,
    Request,
    Rpc,
    Scrape,
    Shared,
    Step,
    Tensor,
    Together,
    Value,
    Wait,
)
from gangway.clients.connection import SERVICE
from gangway.protos import grpc_service_pb2 as pb

TIMEOUT_S = 20
WAIT_S, POLL_S = 5, 0.05
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
# What varies from run to run: times, process ids, the server's version.
VOLATILE_KEYS = frozenset({"ns", "last_inference", "lastInference"})
SHOWN_ELEMENTS = 64

Answer = Any  # what JSON has


@dataclass(frozen=True)
class Addresses:
    """Where a server answers, each as host:port; `renamed`: texts of its answers, and what stands for them."""

    grpc: str
    http: str
    metrics: str
    renamed: Mapping[str, str]


class Client:
    """Asks one server."""

    def __init__(self, addresses: Addresses) -> None:
        self._addresses = addresses
        self._channel = grpc.insecure_channel(addresses.grpc)
        self._segment = f"differential-{os.getpid()}"

    def close(self) -> None:
        """Let go of the connection."""
        self._channel.close()

    def ask(self, steps: Sequence[Step]) -> list[Answer]:
        """Return the answer to each step."""
        return [self._settled(self._step(step)) for step in steps]

    def _step(self, step: Step) -> Answer:
        match step:
            case Infer(request, way):
                return self._infer(request, way)
            case OnStream(requests, at_once):
                return self._on_stream(requests, at_once)
            case Together(requests, way):
                with ThreadPoolExecutor(len(requests)) as pool:
                    return list(pool.map(lambda request: self._infer(request, way), requests))
            case Http(verb, path, body, headers):
                return self._http(verb, path, body, headers)
            case Rpc(method, message):
                return self._rpc(method, message)
            case Scrape(names):
                return self._scrape(names)
            case Shared(content, steps):
                return self._shared(content, steps)
            case Wait(inner, text):
                end_s = time.monotonic() + WAIT_S
                while text not in json.dumps(answer := self._step(inner)) and time.monotonic() < end_s:
                    time.sleep(POLL_S)
                return answer

    def _infer(self, request: Request, way: str) -> Answer:
        if way in (JSON, BINARY):
            body, headers = http_body(request, way)
            version = f"/versions/{request.version}" if request.version else ""
            return self._http("POST", f"/v2/models/{request.model}{version}/infer", body, headers)
        if way == STREAM:
            return self._on_stream([request], at_once=True)
        return self._unary("ModelInfer", grpc_message(request, way), request.headers)

    def _shared(self, content: bytes, steps: Sequence[Http | Rpc]) -> Answer:
        path = Path("/dev/shm") / self._segment
        path.write_bytes(content)
        try:
            found = [self._step(step) for step in steps]
            return [*found, path.read_bytes().hex()]
        finally:
            path.unlink()

    def _rpc(self, method: str, message: Mapping[str, Any]) -> Answer:
        message = json.loads(json.dumps(message).replace(SEGMENT, self._segment))
        kind = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name[method].input_type
        return self._unary(method, ParseDict(dict(message), GetMessageClass(kind)()), {})

    def _unary(self, method: str, message: Message, headers: Mapping[str, str]) -> Answer:
        kind = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name[method].output_type
        call: Any = self._channel.unary_unary(
            SERVICE + method, type(message).SerializeToString, GetMessageClass(kind).FromString
        )
        try:
            return response_of(call(message, timeout=TIMEOUT_S, metadata=tuple(headers.items())))
        except grpc.RpcError as error:
            return _error_of(error)

    def _on_stream(self, requests: Sequence[Request], at_once: bool) -> Answer:
        """Send requests on a stream; those after the first one when the one before has its last answer."""
        queue: SimpleQueue[Request | None] = SimpleQueue()
        waiting = list(requests)

        def more(count: int) -> None:
            for request in waiting[:count]:
                queue.put(request)
            del waiting[:count]
            if not waiting:
                queue.put(None)

        def messages() -> Iterator[pb.ModelInferRequest]:
            while (request := queue.get()) is not None:
                yield grpc_message(request, GRPC)

        call: Any = self._channel.stream_stream(
            SERVICE + "ModelStreamInfer",
            pb.ModelInferRequest.SerializeToString,
            pb.ModelStreamInferResponse.FromString,
        )
        headers = tuple(requests[0].headers.items()) if requests else ()
        more(len(waiting) if at_once else 1)
        answers: list[Answer] = []
        try:
            for message in call(messages(), timeout=TIMEOUT_S, metadata=headers):
                answer = response_of(message.infer_response)
                if message.error_message:
                    answer = {"error_message": message.error_message, **answer}
                answers.append(answer)
                final = message.infer_response.parameters.get("triton_final_response")
                if waiting and (final is None or final.bool_param):  # refusals do not have it
                    more(1)
        except grpc.RpcError as error:
            answers.append(_error_of(error))
        return answers

    def _http(self, verb: str, path: str, body: Any, headers: Mapping[str, str]) -> Answer:
        content = body if isinstance(body, bytes) else json.dumps(body).replace(SEGMENT, self._segment).encode()
        connection = http.client.HTTPConnection(self._addresses.http, timeout=TIMEOUT_S)
        try:
            connection.request(verb, path, content or None, dict(headers))
            found = connection.getresponse()
            return _http_answer(found, found.read())
        except (OSError, http.client.HTTPException) as error:
            return {"failed": type(error).__name__}
        finally:
            connection.close()

    def _scrape(self, names: Sequence[str]) -> Answer:
        connection = http.client.HTTPConnection(self._addresses.metrics, timeout=TIMEOUT_S)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        return sorted(_sample(line) for line in lines if line.startswith(tuple(names)))

    def _settled(self, answer: Answer) -> Answer:
        """Return an answer without what varies."""
        if isinstance(answer, dict):
            return {
                key: 1 if key in VOLATILE_KEYS and value != "0" else self._settled(value)
                for key, value in answer.items()
            }
        if isinstance(answer, list):
            return [self._settled(each) for each in answer]
        if isinstance(answer, str):
            for old, new in {**self._addresses.renamed, self._segment: SEGMENT}.items():
                answer = answer.replace(old, new)
            answer = re.sub(r"\b0x[0-9a-f]{8,}", "0x0", answer)  # where an object lies
        return answer


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


def _error_of(error: Any) -> Answer:
    return {"code": error.code().name, "message": error.details()}


def _http_answer(found: http.client.HTTPResponse, content: bytes) -> Answer:
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


def _sample(line: str) -> str:
    """Return a line of the metrics with its labels in order and its value as a float."""
    match = re.fullmatch(r"(\w+)(?:\{(.*)\})? (\S+)", line)
    if match is None:
        return line
    labels = ",".join(sorted(re.findall(r'\w+="[^"]*"', match[2] or "")))
    return f"{match[1]}{{{labels}}} {float(match[3])}"


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
