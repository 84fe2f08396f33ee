"""The protocol's methods in HTTP's spelling: JSON to the request's message, the response's message to a reply.

Which methods are served is for `server/methods.py` to say; what is here and not there is answered with 501.
"""

import base64
import binascii
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import Message

from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import invalid
from gangway.server.http.json_text import dump, kind_of, shown
from gangway.server.http.messages import MAX_INT64, count_of, string_of, to_json, utf8
from gangway.server.http.replies import Reply, json_reply
from gangway.server.http.routes import OperationName, Route

Content = Mapping[str, Any]  # the request's JSON object
MAX_UINT32: Final = 2**32 - 1
DONE: Final = Reply(200)


@dataclass(frozen=True)
class Operation:
    """One method of the service: its name there, and both translations. They may raise RequestError."""

    method: str
    request: Callable[[Route, Content], Message]
    reply: Callable[[Any], Reply]


def _model(kind: Callable[..., Message]) -> Callable[[Route, Content], Message]:
    return lambda route, _: kind(name=route.model, version=route.version)


def _region(kind: Callable[..., Message]) -> Callable[[Route, Content], Message]:
    return lambda route, _: kind(name=route.region)


def _health(good: bool, state: str = "") -> Reply:
    """Triton's clients look at the status alone; KServe's reads the body that its specification has."""
    return Reply(200 if good else 400, (dump({state: good}),) if state else ())


def _message_reply(response: Message) -> Reply:
    return json_reply(to_json(response))


def _index_request(route: Route, content: Content) -> Message:
    ready = content.get("ready", False)
    if not isinstance(ready, bool):
        invalid(f"repository index: expected a boolean as 'ready', got {kind_of(ready)}")
    return pb.RepositoryIndexRequest(repository_name=route.repository, ready=ready)


def _index_reply(response: pb.RepositoryIndexResponse) -> Reply:
    return json_reply([{name: value for name, value in to_json(model).items() if value} for model in response.models])


def _load_request(route: Route, content: Content) -> Message:
    request = pb.RepositoryModelLoadRequest(repository_name=route.repository, model_name=route.model)
    _set_repository_parameters(request.parameters, content, f"load of model '{route.model}'")
    return request


def _unload_request(route: Route, content: Content) -> Message:
    request = pb.RepositoryModelUnloadRequest(repository_name=route.repository, model_name=route.model)
    _set_repository_parameters(request.parameters, content, f"unload of model '{route.model}'")
    return request


def _set_repository_parameters(target: Any, content: Content, where: str) -> None:
    parameters = content.get("parameters", {})
    if not isinstance(parameters, dict):
        invalid(f"{where}: expected 'parameters' to be an object, got {kind_of(parameters)}")
    for name, value in parameters.items():
        match value:
            case bool():
                target[name].bool_param = value
            case int() if -MAX_INT64 - 1 <= value <= MAX_INT64:
                target[name].int64_param = value
            case str() if name.startswith("file:"):
                target[name].bytes_param = _base64(value, f"{where}: parameter '{name}'")
            case str():
                target[name].string_param = utf8(value, f"{where}: parameter '{name}'")
            case _:
                invalid(
                    f"{where}: parameter '{name}': expected a string, an integer or a boolean, got {kind_of(value)}"
                )


def _system_register(route: Route, content: Content) -> Message:
    where = f"shared memory region '{route.region}'"
    return pb.SystemSharedMemoryRegisterRequest(
        name=route.region,
        key=string_of(content, "key", where),
        offset=count_of(content, "offset", where, default=0),
        byte_size=count_of(content, "byte_size", where),
    )


def _cuda_register(route: Route, content: Content) -> Message:
    where = f"shared memory region '{route.region}'"
    handle = content.get("raw_handle")
    if not isinstance(handle, dict):
        invalid(f"{where}: expected an object as 'raw_handle', got {kind_of(handle)}")
    device_id = count_of(content, "device_id", where)
    if device_id > MAX_INT64:
        invalid(f"{where}: there is no device {device_id}")
    return pb.CudaSharedMemoryRegisterRequest(
        name=route.region,
        raw_handle=_base64(string_of(handle, "b64", where), where),
        device_id=device_id,
        byte_size=count_of(content, "byte_size", where),
    )


def _base64(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        invalid(f"{where}: not base64: {error}")


def _regions_reply(response: Any) -> Reply:
    return json_reply([to_json(response.regions[name]) for name in sorted(response.regions)])


def _trace_request(route: Route, content: Content) -> Message:
    """A setting is a string, a list of strings, or null, which takes it back; numbers count as their text."""
    request = pb.TraceSettingRequest(model_name=route.model)
    for name, value in content.items():
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, str | int) for item in values):
            invalid(f"trace setting '{name}': expected strings, got {shown(value)}")
        request.settings[name].value.extend(utf8(_setting_text(item), f"trace setting '{name}'") for item in values)
    return request


def _setting_text(value: str | int) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _trace_reply(response: pb.TraceSettingResponse) -> Reply:
    settings: dict[str, Any] = {}
    for name in sorted(response.settings):
        values = list(response.settings[name].value)
        settings[name] = values[0] if len(values) == 1 and name != "trace_level" else values
    return json_reply(settings)


def _log_request(_: Route, content: Content) -> Message:
    request = pb.LogSettingsRequest()
    for name, value in content.items():
        match value:
            case bool():
                request.settings[name].bool_param = value
            case int() if 0 <= value <= MAX_UINT32:
                request.settings[name].uint32_param = value
            case str():
                request.settings[name].string_param = utf8(value, f"log setting '{name}'")
            case _:
                invalid(f"log setting '{name}': expected a string, a boolean or a number from 0, got {shown(value)}")
    return request


def _log_reply(response: pb.LogSettingsResponse) -> Reply:
    settings = {}
    for name in sorted(response.settings):
        choice = response.settings[name].WhichOneof("parameter_choice")
        settings[name] = getattr(response.settings[name], choice) if choice else None
    return json_reply(settings)


_LOGGING = Operation("LogSettings", _log_request, _log_reply)
_TRACE = Operation("TraceSetting", _trace_request, _trace_reply)
_DONE = lambda _: DONE  # noqa: E731

# operation -> HTTP method -> what it is
OPERATIONS: Final[Mapping[OperationName, Mapping[str, Operation]]] = {
    "live": {"GET": Operation("ServerLive", lambda *_: pb.ServerLiveRequest(), lambda r: _health(r.live, "live"))},
    "ready": {"GET": Operation("ServerReady", lambda *_: pb.ServerReadyRequest(), lambda r: _health(r.ready, "ready"))},
    "metadata": {"GET": Operation("ServerMetadata", lambda *_: pb.ServerMetadataRequest(), _message_reply)},
    "model_ready": {"GET": Operation("ModelReady", _model(pb.ModelReadyRequest), lambda r: _health(r.ready))},
    "model_metadata": {"GET": Operation("ModelMetadata", _model(pb.ModelMetadataRequest), _message_reply)},
    "model_config": {
        "GET": Operation("ModelConfig", _model(pb.ModelConfigRequest), lambda r: _message_reply(r.config)),
    },
    "model_statistics": {"GET": Operation("ModelStatistics", _model(pb.ModelStatisticsRequest), _message_reply)},
    "index": {"POST": Operation("RepositoryIndex", _index_request, _index_reply)},
    "load": {"POST": Operation("RepositoryModelLoad", _load_request, _DONE)},
    "unload": {"POST": Operation("RepositoryModelUnload", _unload_request, _DONE)},
    "system_status": {
        "GET": Operation("SystemSharedMemoryStatus", _region(pb.SystemSharedMemoryStatusRequest), _regions_reply),
    },
    "system_register": {"POST": Operation("SystemSharedMemoryRegister", _system_register, _DONE)},
    "system_unregister": {
        "POST": Operation("SystemSharedMemoryUnregister", _region(pb.SystemSharedMemoryUnregisterRequest), _DONE),
    },
    "cuda_status": {
        "GET": Operation("CudaSharedMemoryStatus", _region(pb.CudaSharedMemoryStatusRequest), _regions_reply),
    },
    "cuda_register": {"POST": Operation("CudaSharedMemoryRegister", _cuda_register, _DONE)},
    "cuda_unregister": {
        "POST": Operation("CudaSharedMemoryUnregister", _region(pb.CudaSharedMemoryUnregisterRequest), _DONE),
    },
    "trace": {
        "GET": Operation("TraceSetting", lambda route, _: _trace_request(route, {}), _trace_reply),
        "POST": _TRACE,
    },
    "logging": {
        "GET": Operation("LogSettings", lambda route, _: _log_request(route, {}), _log_reply),
        "POST": _LOGGING,
    },
}
