"""Paths of the HTTP protocol: which operation on what."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias
from urllib.parse import unquote

MAX_PATH_BYTES = 4096

OperationName: TypeAlias = Literal[
    "live", "ready", "metadata",
    "model_ready", "model_metadata", "model_config", "model_statistics",
    "infer", "generate", "generate_stream",
    "index", "load", "unload",
    "system_status", "system_register", "system_unregister",
    "cuda_status", "cuda_register", "cuda_unregister",
    "trace", "logging",
]  # fmt: skip

_UNDER_A_MODEL: dict[str, OperationName] = {
    "ready": "model_ready",
    "config": "model_config",
    "stats": "model_statistics",
    "infer": "infer",
    "generate": "generate",
    "generate_stream": "generate_stream",
}
_HEALTH: dict[str, OperationName] = {"live": "live", "ready": "ready"}
_CONTROL: dict[str, OperationName] = {"load": "load", "unload": "unload"}
_SYSTEM: dict[str, OperationName] = {
    "status": "system_status",
    "register": "system_register",
    "unregister": "system_unregister",
}
_CUDA: dict[str, OperationName] = {
    "status": "cuda_status",
    "register": "cuda_register",
    "unregister": "cuda_unregister",
}


HEALTH: frozenset[OperationName] = frozenset({"live", "ready", "model_ready"})


@dataclass(frozen=True)
class Route:
    """What a path names. Empty strings: not given."""

    operation: OperationName
    model: str = ""
    version: str = ""
    region: str = ""
    repository: str = ""


def route_of(raw_path: bytes) -> Route | None:
    """Return the route of a path as it came, None if there is no such path."""
    return _route_of(raw_path) if len(raw_path) <= MAX_PATH_BYTES and raw_path.startswith(b"/v2") else None


@lru_cache(maxsize=1024)
def _route_of(raw_path: bytes) -> Route | None:
    try:
        segments = [unquote(segment, errors="strict") for segment in raw_path.decode("ascii").split("/")]
    except UnicodeDecodeError:
        return None
    match segments[1:]:
        case ["v2"]:
            return Route("metadata")
        case ["v2", "health", state] if state in _HEALTH:
            return Route(_HEALTH[state])
        case ["v2", "logging"]:
            return Route("logging")
        case ["v2", "trace", "setting"]:
            return Route("trace")
        case ["v2", "models", "stats"]:
            return Route("model_statistics")
        case ["v2", "models", model, "trace", "setting"] if model:
            return Route("trace", model=model)
        case ["v2", "models", model, "versions", version, *rest] if model and version:
            return _model_route(model, version, rest)
        case ["v2", "models", model, *rest] if model:
            return _model_route(model, "", rest)
        case ["v2", "repository", *rest]:
            return _repository_route(rest)
        case ["v2", "systemsharedmemory", *rest]:
            return _memory_route(rest, _SYSTEM)
        case ["v2", "cudasharedmemory", *rest]:
            return _memory_route(rest, _CUDA)
    return None


def _model_route(model: str, version: str, rest: list[str]) -> Route | None:
    match rest:
        case []:
            return Route("model_metadata", model, version)
        case [action] if action in _UNDER_A_MODEL:
            return Route(_UNDER_A_MODEL[action], model, version)
    return None


def _repository_route(rest: list[str]) -> Route | None:
    """`repository/[NAME/]index` and `repository/[NAME/]models/MODEL/load`."""
    match rest:
        case ["index"]:
            return Route("index")
        case ["models", model, action] if model and action in _CONTROL:
            return Route(_CONTROL[action], model=model)
        case [repository, "index"]:
            return Route("index", repository=repository)
        case [repository, "models", model, action] if model and action in _CONTROL:
            return Route(_CONTROL[action], model=model, repository=repository)
    return None


def _memory_route(rest: list[str], actions: dict[str, OperationName]) -> Route | None:
    match rest:
        case ["status" | "unregister" as action]:
            return Route(actions[action])
        case ["region", region, action] if region and action in actions:
            return Route(actions[action], region=region)
    return None
