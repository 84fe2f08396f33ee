"""`GET /v2/openapi.json`: what it says of each model is so, and its examples work as they stand."""

from typing import Any

import pytest

from testing.live_server import LiveServer
from tests.helpers.http_requests import ask_http
from tests.helpers.openapi_examples import check_examples, described


@pytest.fixture(scope="module")
def content(gangway_server: LiveServer) -> dict[str, Any]:
    return described(gangway_server.http_url)


def test_every_ready_model_is_described(gangway_server: LiveServer, content: dict[str, Any]) -> None:
    names = ask_http(gangway_server.http_url, "GET", "/v2/models").content["models"]
    index = ask_http(gangway_server.http_url, "POST", "/v2/repository/index", {"ready": True}).content
    assert names == sorted({model["name"] for model in index}) and names
    for name in names:
        assert ask_http(gangway_server.http_url, "GET", f"/v2/models/{name}").status == 200
        assert "get" in content["paths"][f"/v2/models/{name}"]


def test_examples_work(gangway_server: LiveServer, content: dict[str, Any]) -> None:
    tried = check_examples(gangway_server.http_url, content)
    assert {"/v2/models/simple/infer", "/v1/models/simple:predict"} <= set(tried)


def test_rows_have_one_name_in_inputs_and_outputs(content: dict[str, Any]) -> None:
    def dims(schema: dict[str, Any], member: str) -> set[str]:
        return {each["properties"]["shape"]["description"] for each in schema["properties"][member]["items"]["oneOf"]}

    inference = content["paths"]["/v2/models/simple/infer"]["post"]
    asked, answered = inference["requestBody"], inference["responses"]["200"]
    assert dims(asked["content"]["application/json"]["schema"], "inputs") == {"[N, 16]"}
    assert dims(answered["content"]["application/json"]["schema"], "outputs") == {"[N, 16]"}
