"""Everything but inference, through Triton's public client and gRPC's own health check."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from gangway.executor.slots import SlotStatus
from gangway.protos import grpc_service_pb2 as pb
from gangway.protos import health_pb2
from gangway.server.messages import WHOLE_MODEL, ModelUnavailable


@pytest.fixture
def call(server: Any) -> Iterator[Callable[[str, bytes], bytes]]:
    with grpc.insecure_channel(server.address) as channel:
        yield lambda method, message: channel.unary_unary(method)(message, timeout=10)


@pytest.fixture
def broken(server: Any) -> Iterator[None]:
    """A repository with a model that failed, one that loads, and an old version that was unloaded."""
    before = server.front_end.models
    server.front_end.handle(ModelUnavailable("broken", WHOLE_MODEL, "config.pbtxt: 3:1 : no such field"))
    server.front_end.handle(ModelUnavailable("late", 1, "compiling", "LOADING"))
    server.front_end.handle(ModelUnavailable("simple", 2, "no such operator"))
    yield
    server.front_end.models = before


def test_health(server: Any) -> None:
    assert server.client.is_server_live()
    assert server.client.is_server_ready()
    assert server.client.is_model_ready("simple")
    assert server.client.is_model_ready("simple", "1")
    assert not server.client.is_model_ready("simple", "2")
    assert not server.client.is_model_ready("nobody")
    with pytest.raises(InferenceServerException, match="expected 0 to"):
        server.client.is_model_ready("simple", "x")


def test_grpc_health_check(call: Callable[[str, bytes], bytes]) -> None:
    def check(service: str) -> int:
        request = health_pb2.HealthCheckRequest(service=service).SerializeToString()
        return health_pb2.HealthCheckResponse.FromString(call("/grpc.health.v1.Health/Check", request)).status

    assert check("") == check("inference.GRPCInferenceService") == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as caught:
        check("nothing")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


def test_server_metadata(server: Any) -> None:
    metadata = server.client.get_server_metadata()
    assert metadata.name == "gangway"
    assert metadata.version
    assert set(metadata.extensions) >= {
        "binary_tensor_data",
        "classification",
        "logging",
        "model_configuration",
        "model_repository",
        "sequence",
        "statistics",
        "trace",
    }


def test_model_metadata(server: Any) -> None:
    metadata = server.client.get_model_metadata("simple")
    assert (metadata.name, list(metadata.versions), metadata.platform) == ("simple", ["1"], "onnxruntime_onnx")
    assert [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs] == [
        ("INPUT0", "INT32", [-1, 16]),
        ("INPUT1", "INT32", [-1, 16]),
    ]
    assert [t.name for t in metadata.outputs] == ["OUTPUT0", "OUTPUT1"]
    assert list(server.client.get_model_metadata("image").inputs[0].shape) == [1, 3, 224, 224]


def test_model_config(server: Any) -> None:
    config = server.client.get_model_config("simple").config
    assert (config.name, config.max_batch_size, config.backend) == ("simple", 8, "onnxruntime")
    assert list(config.input[0].dims) == [16]


@pytest.mark.parametrize("method", ["get_model_metadata", "get_model_config", "get_inference_statistics"])
def test_unknown_models(server: Any, method: str) -> None:
    with pytest.raises(InferenceServerException, match="Request for unknown model: 'nobody' is not found") as caught:
        getattr(server.client, method)("nobody")
    assert caught.value.status() == "StatusCode.NOT_FOUND"


def test_statistics_count_what_happened(server: Any, simple_inputs: Callable[..., list[triton.InferInput]]) -> None:
    def statistics() -> Any:
        return server.client.get_inference_statistics("simple").model_stats[0]

    before = statistics()
    for rows in (1, 3, 3):
        server.client.infer("simple", simple_inputs(rows))
    with pytest.raises(InferenceServerException):
        server.client.infer("simple", simple_inputs(9))
    server.client.infer("simple", simple_inputs(), timeout=600_000_000)
    server.client.infer("simple", simple_inputs(), timeout=1)
    server.scheduler.status = SlotStatus.LATE
    with pytest.raises(InferenceServerException, match="timeout"):
        server.client.infer("simple", simple_inputs(), timeout=1000)
    after = statistics()
    assert after.inference_count - before.inference_count == 9
    assert after.execution_count - before.execution_count == 5
    assert after.last_inference > before.last_inference
    for part in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
        assert getattr(after.inference_stats, part).count - getattr(before.inference_stats, part).count == 5
    assert after.inference_stats.fail.count - before.inference_stats.fail.count == 1
    assert after.inference_stats.fail.ns > before.inference_stats.fail.ns
    parts = ("queue", "compute_input", "compute_infer", "compute_output")
    assert 0 < sum(getattr(after.inference_stats, part).ns for part in parts) <= after.inference_stats.success.ns
    batches = {batch.batch_size: batch.compute_infer.count for batch in after.batch_stats}
    batches_before = {batch.batch_size: batch.compute_infer.count for batch in before.batch_stats}
    assert batches[3] - batches_before.get(3, 0) == 2
    own = {
        name: after.response_stats[name].success.count - own_before.success.count
        for name, own_before in before.response_stats.items()
    }
    assert (own["gangway_qos_met"], own["gangway_qos_missed"], own["gangway_refused"]) == (1, 2, 1)
    assert len(server.client.get_inference_statistics().model_stats) > 1


def test_a_broken_model_does_not_hinder_the_others(server: Any, broken: None, simple_inputs: Any) -> None:
    index = {(model.name, model.version): model for model in server.client.get_model_repository_index().models}
    assert (index["simple", "1"].state, index["simple", "1"].reason) == ("READY", "")
    assert index["broken", ""].state == "UNAVAILABLE"
    assert index["broken", ""].reason == "config.pbtxt: 3:1 : no such field"
    assert index["late", "1"].state == "LOADING"
    assert not server.client.is_server_ready()
    assert not server.client.is_model_ready("broken")
    assert server.client.is_model_ready("simple")
    assert server.client.infer("simple", simple_inputs()).get_response().model_version == "1"
    with pytest.raises(InferenceServerException, match=r"'broken' .* not at ready state: config.pbtxt: 3:1") as caught:
        server.client.infer("broken", simple_inputs())
    assert caught.value.status() == "StatusCode.UNAVAILABLE"


def test_index_of_ready_models(server: Any, broken: None, call: Callable[[str, bytes], bytes]) -> None:
    request = pb.RepositoryIndexRequest(ready=True).SerializeToString()
    answer = call("/inference.GRPCInferenceService/RepositoryIndex", request)
    models = pb.RepositoryIndexResponse.FromString(answer).models
    assert {model.state for model in models} == {"READY"}
    assert "broken" not in {model.name for model in models}


@pytest.mark.parametrize("method", ["ModelReady", "ModelStatistics", "RepositoryIndex"])
def test_bytes_that_are_no_message(call: Callable[[str, bytes], bytes], method: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        call(f"/inference.GRPCInferenceService/{method}", b"\x0a\xff")
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert f"not a {method}Request" in caught.value.details()


def test_a_new_version_takes_over_at_once(server: Any, announced: Any) -> None:
    def answering_version(asked: str = "") -> str:
        result = server.client.infer("simple", announced.inputs(), model_version=asked)
        return str(result.get_response().model_version)

    before = server.front_end.models
    assert answering_version() == "1"
    server.front_end.handle(replace(announced.message, version=2))
    assert (answering_version(), answering_version("1")) == ("2", "1")
    assert list(server.client.get_model_metadata("simple").versions) == ["1", "2"]
    assert list(server.client.get_model_metadata("simple", "1").versions) == ["1"]
    server.front_end.handle(ModelUnavailable("simple", 2, "unloaded"))
    assert answering_version() == "1"
    server.front_end.models = before
