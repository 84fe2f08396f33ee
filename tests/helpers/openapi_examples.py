"""The OpenAPI description of a server, and its examples, held against the server."""

from collections.abc import Collection
from typing import Any

from openapi_schema_validator import OAS31Validator
from openapi_spec_validator import validate

from tests.helpers.http_requests import ask_http


def described(address: str) -> dict[str, Any]:
    """What a server says of itself, which is valid OpenAPI."""
    answer = ask_http(address, "GET", "/v2/openapi.json")
    assert answer.status == 200
    content: dict[str, Any] = answer.content
    validate(content)
    return content


def check_examples(address: str, content: dict[str, Any], paths: Collection[str] = ()) -> list[str]:
    """Ask all that has an example, or needs none; return the paths that have one. `paths`: these only.

    Requests, answers and refusals are as their schemas say.
    """
    tried = []
    for path, operations in content["paths"].items():
        if paths and path not in paths:
            continue
        for verb, operation in operations.items():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            if "requestBody" in operation and "example" not in body:
                continue
            answer = ask_http(address, verb.upper(), path, body.get("example", b""))
            assert answer.status == 200, (path, answer.content)
            _check(content, operation, 200, answer.content)
            if body:
                tried.append(path)
                _conform(content, body["schema"], body["example"])
                refused = ask_http(address, verb.upper(), path, {})
                _check(content, operation, refused.status, refused.content)
    return tried


def _check(content: dict[str, Any], operation: Any, status: int, answer: Any) -> None:
    found = operation["responses"][str(status)]
    if "content" in found:
        _conform(content, found["content"]["application/json"]["schema"], answer)


def _conform(content: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    OAS31Validator({**schema, "components": content["components"]}).validate(value)
