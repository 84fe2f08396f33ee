"""Ways to ask for an inference: each takes the protocol's own message to a server and brings back its own answer.

A case that holds for all protocols is one test, parametrised by `WAYS`.
"""

import json
import queue
from collections.abc import Mapping, Sequence
from contextlib import closing
from http.client import HTTPConnection
from types import MappingProxyType
from typing import Any, Protocol

import grpc
import numpy as np
import numpy.typing as npt

from gangway.artifact.datatypes import DTYPES
from gangway.clients.connection import SERVICE, UNLIMITED_MESSAGES
from gangway.executor.frames import join_strings
from gangway.protos import grpc_service_pb2 as pb
from gangway.python_backend.elements import count_elements, split_elements

Array = npt.NDArray[Any]
Headers = Mapping[str, str]
TIMEOUT_S = 60
NO_HEADERS: Headers = MappingProxyType({})
REGION = "shared_memory_region"
JSON_SIZE = "Inference-Header-Content-Length"
PARAMETER_KINDS = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
NAMES = {dtype: name for name, dtype in DTYPES.items()} | {np.dtype(object): "BYTES"}
CONTENTS = {
    "BOOL": "bool_contents",
    "INT64": "int64_contents",
    **{f"UINT{bits}": f"uint{64 if bits == 64 else ''}_contents" for bits in (8, 16, 32, 64)},
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
HTTP_STATUSES = {"INVALID_ARGUMENT": 400, "NOT_FOUND": 404, "INTERNAL": 500, "UNIMPLEMENTED": 501, "UNAVAILABLE": 503}


class RefusedError(Exception):
    """An answer that is an error. `status`: a name of gRPC's, a number of HTTP's; None in a stream, which has none."""

    def __init__(self, message: str, status: str | int | None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status

    def is_of(self, name: str) -> bool:
        """Whether the status is what the protocol says in place of this one of gRPC's."""
        return self.status in (name, HTTP_STATUSES[name], None)


class Asked(Protocol):
    """A server, whichever process it is in: addresses of gRPC and of HTTP."""

    @property
    def url(self) -> str: ...

    @property
    def http_url(self) -> str: ...


class Way(Protocol):
    """Ask once, over a connection of its own. Raises RefusedError."""

    def __call__(
        self, server: Asked, request: pb.ModelInferRequest, headers: Headers = NO_HEADERS
    ) -> pb.ModelInferResponse: ...


def request_of(
    model: str, feeds: Mapping[str, Array], /, outputs: Sequence[str] = (), identity: str = "", **parameters: Any
) -> pb.ModelInferRequest:
    """Return a request with raw contents."""
    request = pb.ModelInferRequest(model_name=model, id=identity)
    for name, array in feeds.items():
        request.inputs.add(name=name, datatype=NAMES[array.dtype], shape=array.shape)
        request.raw_input_contents.append(content_of(array))
    for name in outputs:
        request.outputs.add(name=name)
    _set(request.parameters, parameters)
    return request


def content_of(array: Array) -> bytes:
    """Return a tensor's raw content; of texts and bytes each behind its length."""
    return join_strings(list(array.ravel())) if array.dtype == object else array.tobytes()


def elements_of(content: bytes) -> list[bytes]:
    """Return the elements of BYTES."""
    return split_elements(content, count_elements(content))


def parameters_of(message: Any) -> dict[str, Any]:
    """Return the parameters of a request, of an answer or of one of its tensors."""
    return {key: getattr(each, each.WhichOneof("parameter_choice")) for key, each in message.parameters.items()}


def by_grpc(server: Asked, request: pb.ModelInferRequest, headers: Headers = NO_HEADERS) -> pb.ModelInferResponse:
    """By a call of gRPC."""
    with grpc.insecure_channel(server.url, UNLIMITED_MESSAGES) as channel:
        call = channel.unary_unary(SERVICE + "ModelInfer", response_deserializer=pb.ModelInferResponse.FromString)
        try:
            response: pb.ModelInferResponse = call(
                request.SerializeToString(), timeout=TIMEOUT_S, metadata=tuple(headers.items())
            )
        except grpc.RpcError as error:
            raise RefusedError(error.details(), error.code().name) from error
    return response


def by_typed(server: Asked, request: pb.ModelInferRequest, headers: Headers = NO_HEADERS) -> pb.ModelInferResponse:
    """Over gRPC, with typed contents in place of raw ones."""
    typed = pb.ModelInferRequest()
    typed.CopyFrom(request)
    for tensor, content in zip(typed.inputs, request.raw_input_contents, strict=True):
        is_bytes = tensor.datatype == "BYTES"
        values = elements_of(content) if is_bytes else np.frombuffer(content, DTYPES[tensor.datatype]).tolist()
        getattr(tensor.contents, CONTENTS.get(tensor.datatype, "int_contents")).extend(values)
    del typed.raw_input_contents[:]
    return by_grpc(server, typed, headers)


def by_stream(server: Asked, request: pb.ModelInferRequest, headers: Headers = NO_HEADERS) -> pb.ModelInferResponse:
    """By a stream of gRPC, of which it is the only request; the answer is the first one."""
    with grpc.insecure_channel(server.url, UNLIMITED_MESSAGES) as channel:
        call = channel.stream_stream(
            SERVICE + "ModelStreamInfer", response_deserializer=pb.ModelStreamInferResponse.FromString
        )
        messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        messages.put(request.SerializeToString())
        try:
            answer = next(call(iter(messages.get, None), timeout=TIMEOUT_S, metadata=tuple(headers.items())))
        except grpc.RpcError as error:  # a deadline is the stream's
            raise RefusedError(error.details(), error.code().name) from error
        finally:
            messages.put(None)
    if answer.error_message:
        raise RefusedError(answer.error_message, None)
    response: pb.ModelInferResponse = answer.infer_response
    return response


def by_http(server: Asked, request: pb.ModelInferRequest, headers: Headers = NO_HEADERS) -> pb.ModelInferResponse:
    """Over HTTP, with all tensors behind the JSON that are in no shared memory."""
    contents, inputs = iter(request.raw_input_contents), []
    for tensor in request.inputs:
        parameters = parameters_of(tensor)
        if REGION not in parameters:
            parameters["binary_data_size"] = len(next(contents))
        inputs.append({**_described(tensor), "parameters": parameters})
    head = json.dumps(_body_of(request, inputs, is_binary=True)).encode()
    body = b"".join([head, *request.raw_input_contents])
    return _posted(server, request, body, {**headers, JSON_SIZE: str(len(head))})


def by_json(server: Asked, request: pb.ModelInferRequest, headers: Headers = NO_HEADERS) -> pb.ModelInferResponse:
    """Over HTTP, with all tensors in the JSON, which has neither FP16 nor BF16."""
    inputs = [
        {**_described(tensor), "data": _values_of(tensor.datatype, content)}
        for tensor, content in zip(request.inputs, request.raw_input_contents, strict=True)
    ]
    return _posted(server, request, json.dumps(_body_of(request, inputs, is_binary=False)).encode(), headers)


WAYS: Mapping[str, Way] = {
    "gRPC": by_grpc,
    "gRPC, typed": by_typed,
    "stream": by_stream,
    "HTTP": by_http,
    "JSON": by_json,
}


def _posted(server: Asked, request: pb.ModelInferRequest, body: bytes, headers: Headers) -> pb.ModelInferResponse:
    version = f"/versions/{request.model_version}" if request.model_version else ""
    with closing(HTTPConnection(server.http_url, timeout=TIMEOUT_S)) as connection:
        connection.request("POST", f"/v2/models/{request.model_name}{version}/infer", body, dict(headers))
        response = connection.getresponse()
        content, size = response.read(), response.headers.get(JSON_SIZE)
    head = json.loads(content[: int(size)] if size else content)
    if response.status != 200:
        raise RefusedError(head["error"], response.status)
    return _message_of(head, content[int(size) :] if size else b"")


def _body_of(request: pb.ModelInferRequest, inputs: list[dict[str, Any]], is_binary: bool) -> dict[str, Any]:
    outputs: list[dict[str, Any]] = [
        {"name": output.name, "parameters": {"binary_data": is_binary} | parameters_of(output)}
        for output in request.outputs
    ]
    for output in outputs:
        if REGION in output["parameters"]:
            del output["parameters"]["binary_data"]
    parameters = parameters_of(request) | ({} if outputs or not is_binary else {"binary_data_output": True})
    optional = {"id": request.id, "parameters": parameters, "outputs": outputs}
    return {"inputs": inputs, **{key: value for key, value in optional.items() if value}}


def _described(tensor: Any) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}


def _message_of(head: dict[str, Any], tail: bytes) -> pb.ModelInferResponse:
    message = pb.ModelInferResponse(
        model_name=head["model_name"], model_version=head["model_version"], id=head.get("id", "")
    )
    _set(message.parameters, head.get("parameters", {}))
    for output in head["outputs"]:
        parameters = output.get("parameters", {})
        size_bytes = parameters.pop("binary_data_size", None)
        tensor = message.outputs.add(name=output["name"], datatype=output["datatype"], shape=output["shape"])
        _set(tensor.parameters, parameters)
        if size_bytes is None:
            dtype = DTYPES.get(output["datatype"], np.dtype(object))
            message.raw_output_contents.append(content_of(np.array(output.get("data", []), dtype)))
        else:
            message.raw_output_contents.append(tail[:size_bytes])
            tail = tail[size_bytes:]
    assert not tail
    return message


def _set(target: Any, parameters: Mapping[str, Any]) -> None:
    for key, value in parameters.items():
        is_large = type(value) is int and value >= 1 << 63
        setattr(target[key], "uint64_param" if is_large else PARAMETER_KINDS[type(value)], value)


def _values_of(datatype: str, content: bytes) -> list[Any]:
    if datatype != "BYTES":
        return np.frombuffer(content, DTYPES[datatype]).tolist()
    return [element.decode() for element in elements_of(content)]
