"""JSON that is no request of the method that it is sent to, and messages as JSON."""

from itertools import product
from typing import Any

import pytest

from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.errors import RequestError
from gangway.server.models.message_json import to_json
from gangway.server.serving.http.routes import OPERATIONS, route_of
from tests.helpers.http_requests import HttpAsk

LET_IN = {"secret": "42"}  # where something is restricted
GETS = ("/v2", "/v2/models", "/v2/models/simple", "/v2/models/simple/config", "/v2/models/simple/stats", "/v2/logging")
POSTS = ("/v2/repository/index", "/v2/models/simple/infer")
SUMS = {
    "inputs": [
        {"name": name, "datatype": "INT32", "shape": [1, 16], "data": list(range(16))} for name in ("INPUT0", "INPUT1")
    ]
}


@pytest.mark.parametrize(
    ("path", "content", "said"),
    [
        ("/v2/repository/index", {"ready": 1}, "expected a boolean as 'ready'"),
        ("/v2/repository/models/m/load", {"parameters": []}, "expected 'parameters' to be an object"),
        ("/v2/repository/models/m/load", {"parameters": {"file:a": "%"}}, "parameter 'file:a': not base64"),
        ("/v2/repository/models/m/load", {"parameters": {"config": {}}}, "parameter 'config': expected a string"),
        ("/v2/systemsharedmemory/region/r/register", {"byte_size": 1}, "region 'r': expected a string as 'key'"),
        ("/v2/systemsharedmemory/region/r/register", {"key": "k", "byte_size": -1}, "a number from 0 as 'byte_size'"),
        ("/v2/systemsharedmemory/region/r/register", {"key": "k", "byte_size": 2**64}, "a number from 0"),
        ("/v2/systemsharedmemory/region/r/register", {"key": "k"}, "a number from 0 as 'byte_size', got null"),
        ("/v2/cudasharedmemory/region/r/register", {"raw_handle": "x"}, "expected an object as 'raw_handle'"),
        ("/v2/trace/setting", {"trace_rate": {}}, "trace setting 'trace_rate': expected strings"),
        ("/v2/logging", {"log_verbose_level": -1}, "log setting 'log_verbose_level': expected a string"),
    ],
)
def test_refusals(path: str, content: Any, said: str) -> None:
    route = route_of(path.encode())
    assert route is not None
    with pytest.raises(RequestError, match=said):
        OPERATIONS[route.operation]["POST"].request(route, content)


def test_messages_have_all_fields_and_numbers() -> None:
    config = ModelConfig(name="m", max_batch_size=8)
    config.input.add(name="x", data_type="TYPE_FP32", dims=[2**40])
    config.parameters["k"].string_value = "v"
    content = to_json(config)
    assert content["input"][0]["dims"] == [2**40]
    assert content["input"][0]["data_type"] == "TYPE_FP32"
    assert content["input"][0]["format"] == "FORMAT_NONE"
    assert (content["platform"], content["parameters"]) == ("", {"k": {"string_value": "v"}})
    assert "dynamic_batching" not in content


@pytest.mark.parametrize("path", GETS)
@pytest.mark.parametrize("encoding", ["", "identity", "gzip", "deflate", "br"])
def test_what_has_no_body_has_no_encoding(http: HttpAsk, path: str, encoding: str) -> None:
    """A session's headers come with each of its requests."""
    assert http("GET", path, headers={**LET_IN, "Content-Encoding": encoding}).status == 200


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    ("body", "encoding"), [*product([b""], ["", "identity", "gzip", "deflate"]), *product([SUMS], ["", "identity"])]
)
def test_an_encoding_that_changes_nothing(http: HttpAsk, path: str, body: Any, encoding: str) -> None:
    plain = http("POST", path, body, LET_IN)
    encoded = http("POST", path, body, {**LET_IN, "Content-Encoding": encoding})
    assert (encoded.status, encoded.content) == (plain.status, plain.content)
