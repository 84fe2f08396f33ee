"""What JSON means for the methods of the service, and their answers in Triton's JSON, whether served or not."""

from typing import Any

import pytest
from google.protobuf import text_format

from gangway.protos import grpc_service_pb2 as pb
from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.errors import RequestError
from gangway.server.models.message_json import to_json
from gangway.server.serving.http.json_text import parse
from gangway.server.serving.http.routes import OPERATIONS, route_of


def request_of(verb: str, path: str, content: Any = None) -> str:
    route = route_of(path.encode())
    assert route is not None
    message = OPERATIONS[route.operation][verb].request(route, content or {})
    return f"{type(message).__name__} {text_format.MessageToString(message, as_one_line=True)}".strip()


def reply_of(operation: str, verb: str, message: Any) -> Any:
    reply = OPERATIONS[operation][verb].reply(message)  # type: ignore[index]
    body = b"".join(reply.parts)
    return reply.status, parse(body) if body else None


@pytest.mark.parametrize(
    ("verb", "path", "content", "expected"),
    [
        ("GET", "/v2", None, "ServerMetadataRequest"),
        ("GET", "/v2/health/live", None, "ServerLiveRequest"),
        ("GET", "/v2/health/ready", None, "ServerReadyRequest"),
        ("GET", "/v2/models/a%20b%2Fc/ready", None, 'ModelReadyRequest name: "a b/c"'),
        ("GET", "/v2/models/m/versions/3", None, 'ModelMetadataRequest name: "m" version: "3"'),
        ("GET", "/v2/models/m/config", None, 'ModelConfigRequest name: "m"'),
        ("GET", "/v2/models/m/versions/3/stats", None, 'ModelStatisticsRequest name: "m" version: "3"'),
        ("GET", "/v2/models/stats", None, "ModelStatisticsRequest"),
        ("POST", "/v2/repository/index", {"ready": True}, "RepositoryIndexRequest ready: true"),
        ("POST", "/v2/repository/r/index", None, 'RepositoryIndexRequest repository_name: "r"'),
        ("POST", "/v2/repository/models/m/load", None, 'RepositoryModelLoadRequest model_name: "m"'),
        (
            "POST",
            "/v2/repository/models/m/load",
            {"parameters": {"config": "{}"}},
            'RepositoryModelLoadRequest model_name: "m" parameters { key: "config" value { string_param: "{}" } }',
        ),
        (
            "POST",
            "/v2/repository/r/models/m/load",
            {"parameters": {"file:1/model.onnx": "b25ueA=="}},
            'RepositoryModelLoadRequest repository_name: "r" model_name: "m"'
            ' parameters { key: "file:1/model.onnx" value { bytes_param: "onnx" } }',
        ),
        (
            "POST",
            "/v2/repository/models/m/unload",
            {"parameters": {"unload_dependents": False}},
            'RepositoryModelUnloadRequest model_name: "m"'
            ' parameters { key: "unload_dependents" value { bool_param: false } }',
        ),
        ("GET", "/v2/systemsharedmemory/status", None, "SystemSharedMemoryStatusRequest"),
        ("GET", "/v2/systemsharedmemory/region/r/status", None, 'SystemSharedMemoryStatusRequest name: "r"'),
        (
            "POST",
            "/v2/systemsharedmemory/region/r/register",
            {"key": "/k", "offset": 8, "byte_size": 2**63},
            f'SystemSharedMemoryRegisterRequest name: "r" key: "/k" offset: 8 byte_size: {2**63}',
        ),
        ("POST", "/v2/systemsharedmemory/unregister", None, "SystemSharedMemoryUnregisterRequest"),
        ("POST", "/v2/systemsharedmemory/region/r/unregister", None, 'SystemSharedMemoryUnregisterRequest name: "r"'),
        ("GET", "/v2/cudasharedmemory/status", None, "CudaSharedMemoryStatusRequest"),
        (
            "POST",
            "/v2/cudasharedmemory/region/r/register",
            {"raw_handle": {"b64": "aGFuZGxl"}, "device_id": 1, "byte_size": 64},
            'CudaSharedMemoryRegisterRequest name: "r" raw_handle: "handle" device_id: 1 byte_size: 64',
        ),
        ("POST", "/v2/cudasharedmemory/region/r/unregister", None, 'CudaSharedMemoryUnregisterRequest name: "r"'),
        ("GET", "/v2/trace/setting", None, "TraceSettingRequest"),
        ("GET", "/v2/models/m/trace/setting", None, 'TraceSettingRequest model_name: "m"'),
        (
            "POST",
            "/v2/trace/setting",
            {"trace_level": ["TIMESTAMPS", "TENSORS"]},
            'TraceSettingRequest settings { key: "trace_level" value { value: "TIMESTAMPS" value: "TENSORS" } }',
        ),
        (
            "POST",
            "/v2/models/m/trace/setting",
            {"trace_rate": 5},
            'TraceSettingRequest settings { key: "trace_rate" value { value: "5" } } model_name: "m"',
        ),
        (
            "POST",
            "/v2/trace/setting",
            {"trace_rate": None},
            'TraceSettingRequest settings { key: "trace_rate" value { } }',
        ),
        ("GET", "/v2/logging", None, "LogSettingsRequest"),
        (
            "POST",
            "/v2/logging",
            {"log_info": True},
            'LogSettingsRequest settings { key: "log_info" value { bool_param: true } }',
        ),
        (
            "POST",
            "/v2/logging",
            {"log_verbose_level": 1},
            'LogSettingsRequest settings { key: "log_verbose_level" value { uint32_param: 1 } }',
        ),
    ],
)
def test_requests(verb: str, path: str, content: Any, expected: str) -> None:
    assert request_of(verb, path, content) == expected


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
        ("/v2/systemsharedmemory/region/r/register", {"key": "k"}, "a number from 0 as 'byte_size', got None"),
        ("/v2/cudasharedmemory/region/r/register", {"raw_handle": "x"}, "expected an object as 'raw_handle'"),
        ("/v2/trace/setting", {"trace_rate": {}}, "trace setting 'trace_rate': expected strings"),
        ("/v2/logging", {"log_verbose_level": -1}, "log setting 'log_verbose_level': expected a string"),
    ],
)
def test_refusals(path: str, content: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        request_of("POST", path, content)


def test_replies() -> None:
    assert reply_of("ready", "GET", pb.ServerReadyResponse(ready=False)) == (400, {"ready": False})
    assert reply_of("live", "GET", pb.ServerLiveResponse(live=True)) == (200, {"live": True})
    assert reply_of("model_ready", "GET", pb.ModelReadyResponse(ready=True)) == (200, None)
    assert reply_of("load", "POST", pb.RepositoryModelLoadResponse()) == (200, None)
    index = pb.RepositoryIndexResponse()
    index.models.add(name="a", version="1", state="READY")
    index.models.add(name="b", state="UNAVAILABLE", reason="no")
    expected = [{"name": "a", "version": "1", "state": "READY"}, {"name": "b", "state": "UNAVAILABLE", "reason": "no"}]
    assert reply_of("index", "POST", index) == (200, expected)
    regions = pb.SystemSharedMemoryStatusResponse()
    regions.regions["r"].name = regions.regions["r"].key = "r"
    regions.regions["r"].byte_size = 2**63
    expected_regions = [{"name": "r", "key": "r", "offset": 0, "byte_size": 2**63}]
    assert reply_of("system_status", "GET", regions) == (200, expected_regions)
    trace = pb.TraceSettingResponse()
    trace.settings["trace_level"].value.append("OFF")
    trace.settings["trace_rate"].value.append("1000")
    assert reply_of("trace", "GET", trace) == (200, {"trace_level": ["OFF"], "trace_rate": "1000"})
    logs = pb.LogSettingsResponse()
    logs.settings["log_info"].bool_param = True
    logs.settings["log_verbose_level"].uint32_param = 0
    logs.settings["log_file"].string_param = ""
    expected_logs = {"log_file": "", "log_info": True, "log_verbose_level": 0}
    assert reply_of("logging", "POST", logs) == (200, expected_logs)


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
