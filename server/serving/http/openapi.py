"""What the server answers, as OpenAPI 3.1: the inference of each model with an example that works as it stands.

Tools for HTTP (Swagger UI, Postman, generators of clients) read it from `GET /v2/openapi.json`.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote

from gangway.artifact.datatypes import RAW_ONLY, example_input
from gangway.artifact.example_requests import example_of
from gangway.server.models.served import ServedModel
from gangway.server.models.tensors import Tensor
from gangway.server.serving.http.model_page import least_declared_size

VERSION: Final = "3.1.0"
_OK: Final = {"200": {"description": "OK"}}
_GENERAL: Final[Mapping[str, Mapping[str, Any]]] = {
    "/v2": {"get": {"summary": "Name, version and extensions of the server", "responses": _OK}},
    "/v2/health/live": {"get": {"summary": "Whether the server is alive", "responses": _OK}},
    "/v2/health/ready": {"get": {"summary": "Whether all models are ready", "responses": _OK}},
    "/v2/models": {"get": {"summary": "Names of the models that are ready", "responses": _OK}},
    "/v2/repository/index": {"post": {"summary": "All models and versions, and their states", "responses": _OK}},
}
Json = dict[str, Any]


def openapi(models: Iterable[ServedModel], version: str) -> Json:
    """Return the description of a server of this version. Of a model's versions the last one counts."""
    paths: Json = dict(_GENERAL)
    for model in {model.name: model for model in models}.values():
        paths |= dict(_paths_of(model))
    return {"openapi": VERSION, "info": {"title": "Gangway", "version": version}, "paths": paths}


def _paths_of(model: ServedModel) -> Iterator[tuple[str, Json]]:
    base = f"/v2/models/{quote(model.name, safe='')}"  # braces would be parameters
    yield base, {"get": _operation(model, "metadata")}
    yield f"{base}/config", {"get": _operation(model, "configuration")}
    yield f"{base}/stats", {"get": _operation(model, "statistics")}
    if not model.is_decoupled:  # which has no single answer
        yield f"{base}/infer", {"post": _inference(model)}


def _operation(model: ServedModel, what: str) -> Json:
    return {"tags": [model.name], "summary": f"{model.name}: {what}", "responses": _OK}


def _inference(model: ServedModel) -> Json:
    inputs = list(model.inputs.values())
    schema = {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "parameters": {"type": "object"},
            "inputs": {"type": "array", "items": {"oneOf": [_schema(tensor) for tensor in inputs]}},
        },
    }
    content: Json = {"schema": schema}
    size = least_declared_size(model)
    examples = [example_input(*example_of(tensor, size)) for tensor in inputs if not tensor.optional]
    if None not in examples and not any(each.datatype in RAW_ONLY for each in model.outputs.values()):
        content["example"] = {"inputs": examples}
    answer = {
        "type": "object",
        "properties": {
            "model_name": {"const": model.name},
            "model_version": {"type": "string"},
            "outputs": {"type": "array", "items": {"oneOf": [_schema(each) for each in model.outputs.values()]}},
        },
    }
    responses = {
        "200": {"description": "the outputs", "content": {"application/json": {"schema": answer}}},
        "400": {"description": "the request does not fit the model; `error` says why"},
    }
    body = {"required": True, "content": {"application/json": content}}
    return {**_operation(model, "inference"), "requestBody": body, "responses": responses}


def _schema(tensor: Tensor) -> Json:
    names = tensor.symbols or ("",) * len(tensor.shape)
    sizes = ", ".join(
        (name or "any size") if size < 0 else str(size) for name, size in zip(names, tensor.shape, strict=True)
    )
    return {
        "title": tensor.name,
        "type": "object",
        "required": ["name", "shape", "datatype", "data"],
        "properties": {
            "name": {"const": tensor.name},
            "datatype": {"const": tensor.datatype},
            "shape": {"type": "array", "description": f"[{sizes}]", "items": {"type": "integer", "minimum": 0}},
            "data": {"type": "array", "description": "values row by row, nested or flat", "items": {}},
        },
    }
