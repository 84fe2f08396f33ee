"""What the server answers, as OpenAPI 3.1: the inference of each model with an example that works as it stands.

Tools for HTTP (Swagger UI, Postman, generators of clients) read it from `GET /v2/openapi.json`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

import numpy as np

from gangway.artifact.datatypes import RAW_ONLY, example_input
from gangway.artifact.example_requests import example_of
from gangway.artifact.snippets import SEQUENCE
from gangway.server.models.embeddings import BASE64, EMBED, FLOAT, MAX_INPUTS, RERANK
from gangway.server.models.served import ServedModel
from gangway.server.models.tensors import Tensor
from gangway.server.serving.http.model_page import dims_of, least_declared_size

VERSION: Final = "3.1.0"
Json = dict[str, Any]
Examples = list[Json] | None  # the inputs of an example, if there is one

_OK: Final = {"200": {"description": "OK"}}
_GENERAL: Final[Mapping[str, Mapping[str, Any]]] = {
    "/v2": {"get": {"summary": "Name, version and extensions of the server", "responses": _OK}},
    "/v2/health/live": {"get": {"summary": "Whether the server is alive", "responses": _OK}},
    "/v2/health/ready": {"get": {"summary": "Whether all models are ready", "responses": _OK}},
    "/v2/models": {"get": {"summary": "Names of the models that are ready", "responses": _OK}},
    "/v2/repository/index": {"post": {"summary": "All models and versions, and their states", "responses": _OK}},
}
_TEXT: Final = {"type": "string", "minLength": 1}
_ID: Final = {"type": "integer", "minimum": 0}
_COUNT: Final = {"type": "integer", "minimum": 1}
_TRUNCATE: Final = {"type": "boolean", "default": False, "description": "cut texts that are too long"}


def _object(required: Sequence[str], **properties: Any) -> Json:
    return {"type": "object", "required": list(required), "properties": properties}


def _array(items: Any, **more: Any) -> Json:
    return {"type": "array", "items": items, **more}


def _content(schema: Any) -> Json:
    return {"application/json": {"schema": schema}}


def _of(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


_NULLABLE: Final = {"type": ["string", "null"]}
_USAGE: Final = _object(("prompt_tokens", "total_tokens"), prompt_tokens=_ID, total_tokens=_ID)
_SCHEMAS: Final[Mapping[str, Json]] = {
    "Error": _object(("error",), error={"type": "string"}),
    "OpenAIError": _object(
        ("error",),
        error=_object(
            ("message", "type", "param", "code"),
            message={"type": "string"},
            type={"type": "string"},
            param=_NULLABLE,
            code=_NULLABLE,
        ),
    ),
    "ModelList": _object(
        ("object", "data"),
        object={"const": "list"},
        data=_array(_object(("id", "object"), id={"type": "string"}, object={"const": "model"})),
        models=_array({"type": "string"}),
    ),
    "Embeddings": _object(
        ("object", "data", "model", "usage"),
        object={"const": "list"},
        data=_array(
            _object(
                ("object", "index", "embedding"),
                object={"const": "embedding"},
                index=_ID,
                embedding={"anyOf": [_array({"type": "number"}), {"type": "string", "contentEncoding": "base64"}]},
            )
        ),
        model={"type": "string"},
        usage=_USAGE,
    ),
    "Ranking": _object(
        ("model", "results", "usage"),
        model={"type": "string"},
        results=_array(
            _object(
                ("index", "relevance_score"),
                index=_ID,
                relevance_score={"type": "number"},
                document=_object(("text",), text={"type": "string"}),
            )
        ),
        usage=_USAGE,
    ),
}


def openapi(models: Iterable[ServedModel], version: str) -> Json:
    """Return the description of a server of this version. Of a model's versions the last one counts."""
    last = {model.name: model for model in models}
    listed = {"summary": "The models that are ready, as OpenAI lists them", "responses": _answers("ModelList")}
    paths: Json = {**_GENERAL, "/v1/models": {"get": listed}}
    paths |= dict(_paths_of_texts(last.values()))
    for model in last.values():
        paths |= dict(_paths_of(model))
    info = {"title": "Gangway", "version": version}
    return {"openapi": VERSION, "info": info, "paths": paths, "components": {"schemas": dict(_SCHEMAS)}}


def _answers(name: str, error: str = "Error", **refusals: str) -> Json:
    """Return the responses of an operation: the schema of its answer, and why it refuses, by status ("s400")."""
    told = {status[1:]: {"description": reason, "content": _content(_of(error))} for status, reason in refusals.items()}
    return {"200": {"description": "OK", "content": _content(_of(name))}, **told}


# -- texts


def _paths_of_texts(models: Iterable[ServedModel]) -> Iterator[tuple[str, Json]]:
    by_task: dict[str, list[str]] = {EMBED: [], RERANK: []}
    for model in models:
        if model.embeddings is not None and (model.tokenizer is not None or model.takes_texts):
            by_task[model.embeddings.task].append(model.name)
    if names := by_task[EMBED]:
        texts = {"anyOf": [_TEXT, _many(_TEXT), _many(_ID), _many(_many(_ID))]}
        schema = _object(
            ("model", "input"),
            model={"enum": names},
            input={**texts, "description": "a text, token ids, or an array of either"},
            encoding_format={"enum": [FLOAT, BASE64], "default": FLOAT},
            dimensions={**_COUNT, "description": "the first so many values of each embedding"},
            truncate=_TRUNCATE,
            user={"type": "string", "description": "ignored"},
        )
        example = {"model": names[0], "input": ["A cat sits."]}
        yield "/v1/embeddings", {"post": _of_texts("Embeddings of texts, as OpenAI has them", schema, example)}
    if names := by_task[RERANK]:
        schema = _object(
            ("model", "query", "documents"),
            model={"enum": names},
            query=_TEXT,
            documents=_many({"anyOf": [_TEXT, _object(("text",), text=_TEXT)]}),
            top_n={**_COUNT, "description": "how many results, best first"},
            return_documents={"type": "boolean", "default": True},
            truncate=_TRUNCATE,
        )
        example = {"model": names[0], "query": "cats", "documents": ["A cat sits.", "It rains."]}
        yield "/v1/rerank", {"post": _of_texts("Documents by their scores, as Jina has it", schema, example)}


def _many(items: Any) -> Json:
    return _array(items, minItems=1, maxItems=MAX_INPUTS)


def _of_texts(summary: str, schema: Json, example: Json) -> Json:
    answer = "Embeddings" if "input" in schema["properties"] else "Ranking"
    responses = _answers(
        answer,
        "OpenAIError",
        s400="a member is wrong, or a text is too long; `param` names the member",
        s404="there is no such model",
        s503="overload, or the model is not ready",
    )
    content = {"application/json": {"schema": schema, "example": example}}
    return {
        "tags": ["texts"],
        "summary": summary,
        "requestBody": {"required": True, "content": content},
        "responses": responses,
    }


# -- models


def _paths_of(model: ServedModel) -> Iterator[tuple[str, Json]]:
    base = f"/v2/models/{quote(model.name, safe='')}"  # braces would be parameters
    yield base, {"get": _operation(model, "metadata")}
    yield f"{base}/config", {"get": _operation(model, "configuration")}
    yield f"{base}/stats", {"get": _operation(model, "statistics")}
    if not model.is_decoupled:  # which has no single answer
        examples = _examples(model)
        yield f"{base}/infer", {"post": _inference(model, examples)}
        has_json = not any(each.datatype in RAW_ONLY for each in (*model.inputs.values(), *model.outputs.values()))
        if has_json and not model.sequence:  # whose parameters the first protocol has no place for
            yield f"/v1/models/{quote(model.name, safe='')}:predict", {"post": _prediction(model, examples)}


def _operation(model: ServedModel, what: str) -> Json:
    return {"tags": [model.name], "summary": f"{model.name}: {what}", "responses": _OK}


def _asked(model: ServedModel, what: str, schema: Json, example: Json | None, answer: Json) -> Json:
    """Return an operation that sends values, and may be refused."""
    content = {"schema": schema, **({"example": example} if example is not None else {})}
    responses = {
        "200": {"description": "the outputs", "content": _content(answer)},
        "400": {"description": "the request does not fit the model", "content": _content(_of("Error"))},
        "503": {"description": "overload, or the model is not ready", "content": _content(_of("Error"))},
    }
    body = {"required": True, "content": {"application/json": content}}
    return {**_operation(model, what), "requestBody": body, "responses": responses}


def _examples(model: ServedModel) -> Examples:
    """Return the inputs of an example; None if one is too large, or JSON has not all of them and of the outputs."""
    if any(each.datatype in RAW_ONLY for each in model.outputs.values()):
        return None
    size = least_declared_size(model)
    found = [example_input(*example_of(each, size)) for each in model.inputs.values() if not each.optional]
    known = [each for each in found if each is not None]
    return known if len(known) == len(found) else None


def _inference(model: ServedModel, examples: Examples) -> Json:
    inputs = [_schema(model, tensor) for tensor in model.inputs.values()]
    schema = _object(
        ("inputs",), id={"type": "string"}, parameters={"type": "object"}, inputs=_array({"oneOf": inputs})
    )
    outputs = [_schema(model, each) for each in model.outputs.values()]
    answer = _object(
        ("model_name", "outputs"),
        model_name={"const": model.name},
        model_version={"type": "string"},
        outputs=_array({"oneOf": outputs}),
    )
    parameters = {"parameters": dict(SEQUENCE)} if model.sequence else {}
    return _asked(model, "inference", schema, None if examples is None else parameters | {"inputs": examples}, answer)


def _prediction(model: ServedModel, examples: Examples) -> Json:
    """Return KServe's first protocol: rows in, rows out, or whole tensors by name."""
    values = {
        each.name: {"description": f"{each.datatype} [{', '.join(dims_of(model, each))}], nested"}
        for each in model.inputs.values()
    }
    needed = [each.name for each in model.inputs.values() if not each.optional]
    schema = {
        "oneOf": [
            _object(("instances",), instances=_array({}, minItems=1)),
            _object(("inputs",), inputs=_object(needed, **values)),
        ]
    }
    example = None if examples is None else {"inputs": {each["name"]: _nested(each) for each in examples}}
    answer = {"oneOf": [_object(("predictions",), predictions=_array({})), _object(("outputs",), outputs={})]}
    return _asked(model, "predict, by KServe's first protocol", schema, example, answer)


def _nested(example: Mapping[str, Any]) -> Any:
    return np.array(example["data"], object).reshape(example["shape"]).tolist()


def _schema(model: ServedModel, tensor: Tensor) -> Json:
    dims = ", ".join(dims_of(model, tensor))
    return {
        "title": tensor.name,
        **_object(
            ("name", "shape", "datatype", "data"),
            name={"const": tensor.name},
            datatype={"const": tensor.datatype},
            shape=_array({"type": "integer", "minimum": 0}, description=f"[{dims}]"),
            data=_array({}, description="values row by row, nested or flat"),
        ),
    }
