"""Paths of the HTTP protocol: which method of the service each of them stands for, and how it is answered.

The methods that are served come from `serving/process.py`. A path whose method is missing there is answered with 501.
"""

import base64
import binascii
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final
from urllib.parse import unquote

from google.protobuf.message import Message

from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import invalid
from gangway.server.models.message_json import to_json
from gangway.server.serving.http.json_text import (
    MAX_INT64,
    dump,
    kind_of,
    number_in,
    parameters_of,
    shown,
    string_of,
    utf8,
)
from gangway.server.serving.http.replies import Reply, json_reply

MAX_PATH_BYTES = 4096

# What each path stands for; M is a model, V a version, R a region. A version may follow each model, and a repository
# be named before `index` and `models`.
PATHS: Final = {
    "/v2": "metadata",
    "/v2/health/live": "live",
    "/v2/health/ready": "ready",
    "/v2/models/M": "model_metadata",
    "/v2/models/M/versions/V": "model_metadata",
    "/v2/models/M/ready": "model_ready",
    "/v2/models/M/config": "model_config",
    "/v2/models/M/stats": "model_statistics",
    "/v2/models/stats": "model_statistics",
    "/v2/models": "models",
    "/v2/openapi.json": "openapi",
    "/v2/models/M/infer": "infer",
    "/v2/models/M/generate": "generate",
    "/v2/models/M/generate_stream": "generate_stream",
    "/v2/repository/index": "index",
    "/v2/repository/models/M/load": "load",
    "/v2/repository/models/M/unload": "unload",
    "/v2/systemsharedmemory/status": "system_status",
    "/v2/systemsharedmemory/region/R/status": "system_status",
    "/v2/systemsharedmemory/region/R/register": "system_register",
    "/v2/systemsharedmemory/unregister": "system_unregister",
    "/v2/systemsharedmemory/region/R/unregister": "system_unregister",
    "/v2/cudasharedmemory/status": "cuda_status",
    "/v2/cudasharedmemory/region/R/status": "cuda_status",
    "/v2/cudasharedmemory/region/R/register": "cuda_register",
    "/v2/cudasharedmemory/unregister": "cuda_unregister",
    "/v2/cudasharedmemory/region/R/unregister": "cuda_unregister",
    "/v2/trace/setting": "trace",
    "/v2/models/M/trace/setting": "trace",
    "/v2/logging": "logging",
    "/v1/models": "listed_models",
    "/v1/models/M": "first_ready",
    "/v1/models/M:predict": "predict",
    "/v1/models/M/versions/V:predict": "predict",
    "/v2/gangway/state": "state",
    "/v2/gangway/events": "events",
    "/v2/gangway/models/M": "model_state",
    "/v2/gangway/models/M/versions/V": "model_state",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/": "page",
    "/models/M": "model_page",
}
# By segments; None is any that is not empty.
_OPERATIONS: Final = {
    tuple([None if segment in ("M", "R", "V") else segment for segment in path.split("/")]): operation
    for path, operation in PATHS.items()
    if operation != "predict"
}


OPENAI_PATHS: Final = (b"/v1/embeddings", b"/v1/rerank")  # where errors have OpenAI's shape
METRICS_PATH: Final = b"/metrics"  # on a port of its own
OPENAI_PATHS_WITHOUT_BASE: Final = frozenset({b"/embeddings", b"/rerank"})
_PREFIXES: Final = (b"/v2", b"/v1/models", b"/models/", *OPENAI_PATHS)
PREDICT: Final = ":predict"  # behind the last segment of a path of KServe's first protocol
UNSERVED: Final = frozenset({b"explain", b"classify", b"regress"})  # in its place
_BEFORE_VERSIONED: Final = (("", "v2"), ("", "v2", "gangway"))  # `models`, behind which a version may follow a name

HEALTH: Final = frozenset({"live", "ready", "model_ready", "first_ready"})


@dataclass(frozen=True)
class Route:
    """What a path names. Empty strings: not given."""

    operation: str
    model: str = ""
    version: str = ""
    region: str = ""
    repository: str = ""


def route_of(raw_path: bytes) -> Route | None:
    """Return the route of a path as it came, None if there is no such path."""
    if raw_path == b"/":
        return Route("page")
    return _route_of(raw_path) if len(raw_path) <= MAX_PATH_BYTES and raw_path.startswith(_PREFIXES) else None


@lru_cache(maxsize=1024)
def _route_of(raw_path: bytes) -> Route | None:
    try:
        segments = [unquote(segment, errors="strict") for segment in raw_path.decode("ascii").split("/")]
    except UnicodeDecodeError:
        return None
    if segments[1] == "v1" and segments[-1].endswith(PREDICT):
        segments[-1] = segments[-1].removesuffix(PREDICT)
        is_versioned = len(segments) == 6 and segments[4] == "versions" and segments[5]
        if segments[3] and (len(segments) == 4 or is_versioned):
            return Route("predict", segments[3], segments[5] if is_versioned else "")
        return None
    version = repository = ""
    before = segments.index("models") if "models" in segments else 0
    if tuple(segments[:before]) in _BEFORE_VERSIONED and segments[before + 2 : before + 3] == ["versions"]:
        version = "".join(segments[before + 3 : before + 4])
        if version:
            del segments[before + 2 : before + 4]
    elif segments[2:3] == ["repository"] and len(segments) in (5, 7):
        repository = segments.pop(3)
    if not version and (operation := _OPERATIONS.get(tuple(segments))) is not None:
        return Route(operation, repository=repository)
    for place in (2, 3, 4):
        if segments[place:] and (name := segments[place]):
            operation = _OPERATIONS.get((*segments[:place], None, *segments[place + 1 :]))
            if operation == "trace" and version:
                return None
            if operation is not None and segments[2].endswith("sharedmemory"):
                return Route(operation, region=name)
            if operation is not None:
                return Route(operation, name, version, repository=repository)
    return None


Content = Mapping[str, Any]  # the request's JSON object
MAX_UINT32: Final = 2**32 - 1
DONE: Final = Reply(200)


@dataclass(frozen=True)
class Operation:
    """One method of the service in HTTP's spelling: its name there, JSON to its request, its response to a reply.

    Both translations may raise RequestError. `parts`: of the body of a reply that may be long; none of them is.
    """

    method: str
    request: Callable[[Route, Content], Message]
    reply: Callable[[Any], Reply]
    parts: Callable[[Any], Iterator[bytes]] | None = None

    @classmethod
    def in_parts(
        cls, method: str, request: Callable[[Route, Content], Message], parts: Callable[[Any], Iterator[bytes]]
    ) -> "Operation":
        """Return one whose reply may be long."""
        return cls(method, request, lambda response: Reply(200, tuple(parts(response))), parts)


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


def _ready_index(*_: object) -> Message:
    return pb.RepositoryIndexRequest(ready=True)


def _index_parts(response: pb.RepositoryIndexResponse) -> Iterator[bytes]:
    yield from _array({name: value for name, value in to_json(model).items() if value} for model in response.models)


def listed_model(name: str) -> dict[str, Any]:
    """Return what OpenAI says of a model."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "gangway"}


def _listed_reply(response: pb.RepositoryIndexResponse) -> Reply:
    """Answer clients of KServe's first protocol, and of OpenAI."""
    names = sorted({model.name for model in response.models})
    return json_reply({"models": names, "object": "list", "data": [listed_model(name) for name in names]})


def _names_reply(response: pb.RepositoryIndexResponse) -> Reply:
    """KServe's answer: the names of models."""
    return json_reply({"models": sorted({model.name for model in response.models})})


def _statistics_parts(response: pb.ModelStatisticsResponse) -> Iterator[bytes]:
    yield b'{"model_stats":'
    yield from _array(map(to_json, response.model_stats))
    yield b"}"


def _array(items: Iterable[Any]) -> Iterator[bytes]:
    """Yield a JSON array, item by item."""
    begin = b"["
    for item in items:
        yield begin + dump(item)
        begin = b","
    yield b"]" if begin == b"," else b"[]"


def _control(
    kind: type[pb.RepositoryModelLoadRequest | pb.RepositoryModelUnloadRequest], what: str
) -> Callable[[Route, Content], Message]:
    def request(route: Route, content: Content) -> Message:
        message = kind(repository_name=route.repository, model_name=route.model)
        _set_repository_parameters(message.parameters, content, f"{what} of model '{route.model}'")
        return message

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
        offset=number_in(content, "offset", where, default=0),
        byte_size=number_in(content, "byte_size", where),
    )


def _cuda_register(route: Route, content: Content) -> Message:
    where = f"shared memory region '{route.region}'"
    handle = content.get("raw_handle")
    if not isinstance(handle, dict):
        invalid(f"{where}: expected an object as 'raw_handle', got {kind_of(handle)}")
    device_id = number_in(content, "device_id", where)
    if device_id > MAX_INT64:
        invalid(f"{where}: there is no device {device_id}")
    return pb.CudaSharedMemoryRegisterRequest(
        name=route.region,
        raw_handle=_base64(string_of(handle, "b64", where), where),
        device_id=device_id,
        byte_size=number_in(content, "byte_size", where),
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
    return json_reply(parameters_of(response.settings))


_LOGGING = Operation("LogSettings", _log_request, _log_reply)
_TRACE = Operation("TraceSetting", _trace_request, _trace_reply)
_DONE = lambda _: DONE  # noqa: E731

# operation -> HTTP method -> what it is
OPERATIONS: Final[Mapping[str, Mapping[str, Operation]]] = {
    "live": {"GET": Operation("ServerLive", lambda *_: pb.ServerLiveRequest(), lambda r: _health(r.live, "live"))},
    "ready": {"GET": Operation("ServerReady", lambda *_: pb.ServerReadyRequest(), lambda r: _health(r.ready, "ready"))},
    "metadata": {"GET": Operation("ServerMetadata", lambda *_: pb.ServerMetadataRequest(), _message_reply)},
    "model_ready": {"GET": Operation("ModelReady", _model(pb.ModelReadyRequest), lambda r: _health(r.ready))},
    "model_metadata": {"GET": Operation("ModelMetadata", _model(pb.ModelMetadataRequest), _message_reply)},
    "model_config": {
        "GET": Operation("ModelConfig", _model(pb.ModelConfigRequest), lambda r: _message_reply(r.config))
    },
    "model_statistics": {
        "GET": Operation.in_parts("ModelStatistics", _model(pb.ModelStatisticsRequest), _statistics_parts)
    },
    "index": {"POST": Operation.in_parts("RepositoryIndex", _index_request, _index_parts)},
    "models": {"GET": Operation("RepositoryIndex", _ready_index, _names_reply)},
    "listed_models": {"GET": Operation("RepositoryIndex", _ready_index, _listed_reply)},
    "load": {"POST": Operation("RepositoryModelLoad", _control(pb.RepositoryModelLoadRequest, "load"), _DONE)},
    "unload": {"POST": Operation("RepositoryModelUnload", _control(pb.RepositoryModelUnloadRequest, "unload"), _DONE)},
    "system_status": {
        "GET": Operation("SystemSharedMemoryStatus", _region(pb.SystemSharedMemoryStatusRequest), _regions_reply)
    },
    "system_register": {"POST": Operation("SystemSharedMemoryRegister", _system_register, _DONE)},
    "system_unregister": {
        "POST": Operation("SystemSharedMemoryUnregister", _region(pb.SystemSharedMemoryUnregisterRequest), _DONE)
    },
    "cuda_status": {
        "GET": Operation("CudaSharedMemoryStatus", _region(pb.CudaSharedMemoryStatusRequest), _regions_reply)
    },
    "cuda_register": {"POST": Operation("CudaSharedMemoryRegister", _cuda_register, _DONE)},
    "cuda_unregister": {
        "POST": Operation("CudaSharedMemoryUnregister", _region(pb.CudaSharedMemoryUnregisterRequest), _DONE)
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


INFERENCES = frozenset({"infer", "generate", "generate_stream", "predict"})  # always POST
PAGES: Final = frozenset({"page", "model_page"})  # which hold nothing of this server
WATCHING: Final = PAGES | {"state", "events", "model_state"}  # see `watching.py`
# What is no method of the service, and always GET: the method that it is restricted with.
OWN: Final[Mapping[str, str]] = {
    **dict.fromkeys(WATCHING, "ModelStatistics"),
    **dict.fromkeys(("openapi", "model_state"), "ModelMetadata"),
    "first_ready": "ModelReady",
}
TEXTS: Final = frozenset({"embeddings", "rerank"})  # inference, whose model the body names; always POST


def verbs_of(route: Route) -> tuple[str, ...]:
    """Return the HTTP methods that a path has."""
    if route.operation in OWN:
        return ("GET",)
    return ("POST",) if route.operation in INFERENCES | TEXTS else tuple(OPERATIONS[route.operation])


def method_of(route: Route, verb: str) -> str:
    """Return the method of the service that a route stands for, or, of those of OWN, is restricted with."""
    if route.operation in OWN:
        return OWN[route.operation]
    return "ModelInfer" if route.operation in INFERENCES | TEXTS else OPERATIONS[route.operation][verb].method
