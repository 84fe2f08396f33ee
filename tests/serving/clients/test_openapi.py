"""`GET /v2/openapi.json`: what it says of each model is so, and its examples work as they stand."""

from typing import Any

import pytest

from testing.live_server import LiveServer
from tests.helpers.http_requests import ask_http


@pytest.fixture(scope="module")
def described(gangway_server: LiveServer) -> dict[str, Any]:
    answer = ask_http(gangway_server.http_url, "GET", "/v2/openapi.json")
    assert answer.status == 200
    content: dict[str, Any] = answer.content
    return content


def test_every_ready_model_is_described(gangway_server: LiveServer, described: dict[str, Any]) -> None:
    names = ask_http(gangway_server.http_url, "GET", "/v2/models").content["models"]
    index = ask_http(gangway_server.http_url, "POST", "/v2/repository/index", {"ready": True}).content
    assert names == sorted({model["name"] for model in index}) and names
    assert described["openapi"].startswith("3.1.")
    for name in names:
        assert ask_http(gangway_server.http_url, "GET", f"/v2/models/{name}").status == 200
        assert "get" in described["paths"][f"/v2/models/{name}"]


def test_examples_work(gangway_server: LiveServer, described: dict[str, Any]) -> None:
    tried = 0
    for path, operations in described["paths"].items():
        for verb, operation in operations.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            if "requestBody" in operation and "example" not in content:
                continue
            body = content.get("example", b"")
            answer = ask_http(gangway_server.http_url, verb.upper(), path, body)
            assert answer.status == 200, (path, answer.content)
            if content:
                tried += 1
                schemas = operation["responses"]["200"]["content"]["application/json"]["schema"]["properties"]
                known = {each["title"]: each["properties"] for each in schemas["outputs"]["items"]["oneOf"]}
                for output in answer.content["outputs"]:
                    assert output["datatype"] == known[output["name"]]["datatype"]["const"]
    assert tried > 1
