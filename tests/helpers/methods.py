"""Ways to call the other methods of the service: health, metadata, statistics, repository, shared memory, settings.

Each takes the message of gRPC to a server, in the form of its protocol, and brings back the answer as gRPC has it. What
holds for both protocols is one test, parametrised by `METHOD_WAYS`.
"""

import base64
from collections.abc import Callable, Mapping
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message

from gangway.clients.connection import SERVICE
from gangway.protos import grpc_service_pb2 as pb
from tests.helpers.http_requests import ask_http
from tests.helpers.ways import NO_HEADERS, Asked, Headers, RefusedError

TIMEOUT_S = 60
Route = tuple[str, str, Any]  # verb, path, JSON
NO_BODY = b""


def by_grpc(server: Asked, request: Message, headers: Headers = NO_HEADERS) -> Any:
    """By a call of gRPC. Raises RefusedError."""
    name = _name_of(request)
    with grpc.insecure_channel(server.url) as channel:
        call = channel.unary_unary(SERVICE + name, response_deserializer=_answer_of(name).FromString)
        try:
            return call(request.SerializeToString(), timeout=TIMEOUT_S, metadata=tuple(headers.items()))
        except grpc.RpcError as error:
            raise RefusedError(error.details(), error.code().name) from error


def by_http(server: Asked, request: Message, headers: Headers = NO_HEADERS) -> Any:
    """By a request of HTTP, which says readiness by its status. Raises RefusedError."""
    name = _name_of(request)
    answer = ask_http(server.http_url, *ROUTES[name](request), headers)
    if name.endswith(("Live", "Ready")) and answer.status in {200, 400} and b"error" not in answer.body:
        return _answer_of(name)(**{"live" if name.endswith("Live") else "ready": answer.status == 200})
    content = answer.content if answer.body else {}
    if answer.status != 200:
        assert list(content) == ["error"]
        raise RefusedError(content["error"], answer.status)
    return ParseDict(_FORMS.get(name, dict)(content), _answer_of(name)())


METHOD_WAYS: Mapping[str, Callable[..., Any]] = {"gRPC": by_grpc, "HTTP": by_http}


def _name_of(request: Message) -> str:
    return type(request).__name__.removesuffix("Request")


def _answer_of(name: str) -> Any:
    return getattr(pb, f"{name}Response")


def _model(request: Any, what: str = "") -> str:
    version = f"/versions/{request.version}" if request.version else ""
    return f"/v2/models/{request.name}{version}{what}" if request.name else f"/v2/models{what}"


def _repository(request: Any, what: str) -> str:
    return f"/v2/repository{f'/{request.repository_name}' * bool(request.repository_name)}/{what}"


def _parameters(request: Any) -> dict[str, Any]:
    given = {key: getattr(each, each.WhichOneof("parameter_choice")) for key, each in request.parameters.items()}
    plain = {key: base64.b64encode(each).decode() if isinstance(each, bytes) else each for key, each in given.items()}
    return {"parameters": plain} if plain else {}


def _region(request: Any, kind: str, what: str) -> str:
    return f"/v2/{kind}sharedmemory{f'/region/{request.name}' * bool(request.name)}/{what}"


def _settings(request: Any, path: str, values: dict[str, Any]) -> Route:
    return ("POST", path, values) if request.settings else ("GET", path, NO_BODY)


ROUTES: Mapping[str, Callable[[Any], Route]] = {
    "ServerLive": lambda request: ("GET", "/v2/health/live", NO_BODY),
    "ServerReady": lambda request: ("GET", "/v2/health/ready", NO_BODY),
    "ServerMetadata": lambda request: ("GET", "/v2", NO_BODY),
    "ModelReady": lambda request: ("GET", _model(request, "/ready"), NO_BODY),
    "ModelMetadata": lambda request: ("GET", _model(request), NO_BODY),
    "ModelConfig": lambda request: ("GET", _model(request, "/config"), NO_BODY),
    "ModelStatistics": lambda request: ("GET", _model(request, "/stats"), NO_BODY),
    "RepositoryIndex": lambda request: ("POST", _repository(request, "index"), {"ready": request.ready}),
    "RepositoryModelLoad": lambda request: (
        "POST", _repository(request, f"models/{request.model_name}/load"), _parameters(request),
    ),
    "RepositoryModelUnload": lambda request: (
        "POST", _repository(request, f"models/{request.model_name}/unload"), _parameters(request),
    ),
    "SystemSharedMemoryStatus": lambda request: ("GET", _region(request, "system", "status"), NO_BODY),
    "SystemSharedMemoryRegister": lambda request: (
        "POST",
        _region(request, "system", "register"),
        {"key": request.key, "offset": request.offset, "byte_size": request.byte_size},
    ),
    "SystemSharedMemoryUnregister": lambda request: ("POST", _region(request, "system", "unregister"), NO_BODY),
    "CudaSharedMemoryStatus": lambda request: ("GET", _region(request, "cuda", "status"), NO_BODY),
    "CudaSharedMemoryRegister": lambda request: (
        "POST",
        _region(request, "cuda", "register"),
        {
            "raw_handle": {"b64": base64.b64encode(request.raw_handle).decode()},
            "device_id": request.device_id,
            "byte_size": request.byte_size,
        },
    ),
    "CudaSharedMemoryUnregister": lambda request: ("POST", _region(request, "cuda", "unregister"), NO_BODY),
    "TraceSetting": lambda request: _settings(
        request,
        f"/v2{f'/models/{request.model_name}' * bool(request.model_name)}/trace/setting",
        {key: list(each.value) or None for key, each in request.settings.items()},
    ),
    "LogSettings": lambda request: _settings(
        request,
        "/v2/logging",
        {key: getattr(each, each.WhichOneof("parameter_choice")) for key, each in request.settings.items()},
    ),
}  # fmt: skip
_LOG_KINDS = {bool: "bool_param", int: "uint32_param", str: "string_param"}
_FORMS: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "ModelConfig": lambda content: {"config": content},
    "RepositoryIndex": lambda content: {"models": content},
    "SystemSharedMemoryStatus": lambda content: {"regions": {region["name"]: region for region in content}},
    "CudaSharedMemoryStatus": lambda content: {"regions": {region["name"]: region for region in content}},
    "TraceSetting": lambda content: {
        "settings": {key: {"value": each if isinstance(each, list) else [each]} for key, each in content.items()}
    },
    "LogSettings": lambda content: {"settings": {key: {_LOG_KINDS[type(v)]: v} for key, v in content.items()}},
}
