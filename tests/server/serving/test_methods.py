"""All methods but inference, over gRPC and HTTP, and gRPC's own health check."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from gangway.clients.connection import SERVICE
from gangway.executor.slots import SlotStatus
from gangway.protos import grpc_service_pb2 as pb
from gangway.protos import health_pb2
from gangway.server.messages import WHOLE_MODEL, ModelUnavailable
from gangway.server.options.endpoints import GrpcOptions
from gangway.server.options.server import GeneralOptions
from tests.helpers.methods import METHOD_WAYS
from tests.helpers.ways import RefusedError
from tests.server.conftest import NO_ACCESS_LOG

Call = Callable[[Any], Any]
KEY = {"secret": "42"}  # which HTTP wants for some methods


@pytest.fixture(params=METHOD_WAYS)
def call(server: Any, request: pytest.FixtureRequest) -> Call:
    """Calls a method by its message."""
    return partial(METHOD_WAYS[request.param], server, headers=KEY)


@pytest.fixture
def broken(server: Any) -> Iterator[None]:
    """A repository with a model that failed, one that loads, and an old version that was unloaded."""
    before = server.front_end.models
    server.front_end.handle(ModelUnavailable("broken", WHOLE_MODEL, "config.pbtxt: 3:1 : no such field"))
    server.front_end.handle(ModelUnavailable("late", 1, "compiling", "LOADING"))
    server.front_end.handle(ModelUnavailable("simple", 2, "no such operator"))
    yield
    server.front_end.models = before


def test_health(call: Call) -> None:
    assert call(pb.ServerLiveRequest()).live
    assert call(pb.ServerReadyRequest()).ready
    ready = {("simple", ""): True, ("simple", "1"): True, ("simple", "2"): False, ("nobody", ""): False}
    for (name, version), expected in ready.items():
        assert call(pb.ModelReadyRequest(name=name, version=version)).ready == expected
    with pytest.raises(RefusedError, match="expected 0 to"):
        call(pb.ModelReadyRequest(name="simple", version="x"))


@pytest.fixture
def on_the_wire(server: Any) -> Iterator[Callable[[str, bytes], bytes]]:
    with grpc.insecure_channel(server.url) as channel:
        yield lambda method, message: channel.unary_unary(method)(message, timeout=10)


def test_grpc_health_check(on_the_wire: Callable[[str, bytes], bytes]) -> None:
    def check(service: str) -> int:
        request = health_pb2.HealthCheckRequest(service=service).SerializeToString()
        return health_pb2.HealthCheckResponse.FromString(on_the_wire("/grpc.health.v1.Health/Check", request)).status

    assert check("") == check("inference.GRPCInferenceService") == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as caught:
        check("nothing")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


def test_metadata_and_configuration(call: Call) -> None:
    server = call(pb.ServerMetadataRequest())
    assert server.name == "gangway" and server.version
    extensions = ("binary_tensor_data", "classification", "logging", "model_configuration", "model_repository")
    assert {*extensions, "sequence", "statistics", "trace"} <= set(server.extensions)
    model = call(pb.ModelMetadataRequest(name="simple"))
    assert (model.name, list(model.versions), model.platform) == ("simple", ["1"], "onnxruntime_onnx")
    inputs = [(each.name, each.datatype, list(each.shape)) for each in model.inputs]
    assert inputs == [("INPUT0", "INT32", [-1, 16]), ("INPUT1", "INT32", [-1, 16])]
    assert [each.name for each in model.outputs] == ["OUTPUT0", "OUTPUT1"]
    assert list(call(pb.ModelMetadataRequest(name="image", version="1")).inputs[0].shape) == [1, 3, 224, 224]
    config = call(pb.ModelConfigRequest(name="simple")).config
    assert (config.name, config.max_batch_size, config.backend) == ("simple", 8, "onnxruntime")
    assert list(config.input[0].dims) == [16]


@pytest.mark.parametrize("kind", [pb.ModelMetadataRequest, pb.ModelConfigRequest, pb.ModelStatisticsRequest])
def test_unknown_models(call: Call, kind: Any) -> None:
    with pytest.raises(RefusedError, match="Request for unknown model: 'nobody' is not found") as caught:
        call(kind(name="nobody"))
    assert caught.value.is_of("NOT_FOUND")


@pytest.fixture(scope="module")
def closed(start_front_end: Any) -> Any:
    """A front end whose clients may not register regions."""
    return start_front_end(GrpcOptions(), None, NO_ACCESS_LOG, GeneralOptions(allow_client_shm=False))


@pytest.mark.parametrize("way", METHOD_WAYS)
@pytest.mark.parametrize(
    "kind",
    [
        pb.SystemSharedMemoryRegisterRequest,
        pb.SystemSharedMemoryUnregisterRequest,
        pb.CudaSharedMemoryRegisterRequest,
        pb.CudaSharedMemoryUnregisterRequest,
    ],
)
def test_clients_that_may_not_register_regions(closed: Any, way: str, kind: Any) -> None:
    call = METHOD_WAYS[way]
    with pytest.raises(RefusedError, match="Client shared memory is disabled: --allow-client-shm=true") as caught:
        call(closed, kind(name="region"))
    assert caught.value.is_of("UNIMPLEMENTED")
    assert not call(closed, pb.SystemSharedMemoryStatusRequest()).regions


def test_settings_of_traces_and_logs(call: Call) -> None:
    before = call(pb.TraceSettingRequest())
    assert list(before.settings["trace_level"].value) == ["OFF"]
    changes = {"trace_rate": "5", "log_frequency": "3"}
    changed = pb.TraceSettingRequest(model_name="simple")
    for setting, value in changes.items():
        changed.settings[setting].value.append(value)
    answer = call(changed)
    assert {setting: "".join(answer.settings[setting].value) for setting in changes} == changes
    assert answer == call(pb.TraceSettingRequest(model_name="simple"))
    assert call(pb.TraceSettingRequest()) == before
    for setting in changes:  # no value: that of all models again
        changed.settings[setting].ClearField("value")
    assert call(changed) == before
    logs = pb.LogSettingsRequest()
    for verbose in (1, 0):
        logs.settings["log_info"].bool_param = not verbose
        logs.settings["log_verbose_level"].uint32_param = verbose
        answer = call(logs)
        assert answer == call(pb.LogSettingsRequest())
        assert answer.settings["log_info"].bool_param == (not verbose)
        assert answer.settings["log_verbose_level"].uint32_param == verbose


def test_statistics_count_what_happened(
    server: Any, call: Call, simple_inputs: Callable[..., list[triton.InferInput]]
) -> None:
    def statistics() -> Any:
        return call(pb.ModelStatisticsRequest(name="simple")).model_stats[0]

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
    assert len(call(pb.ModelStatisticsRequest()).model_stats) > 1


def test_a_broken_model_does_not_hinder_the_others(server: Any, call: Call, broken: None, simple_inputs: Any) -> None:
    index = {(model.name, model.version): model for model in call(pb.RepositoryIndexRequest()).models}
    assert (index["simple", "1"].state, index["simple", "1"].reason) == ("READY", "")
    assert index["broken", ""].state == "UNAVAILABLE"
    assert index["broken", ""].reason == "config.pbtxt: 3:1 : no such field"
    assert index["late", "1"].state == "LOADING"
    assert not call(pb.ServerReadyRequest()).ready
    assert not call(pb.ModelReadyRequest(name="broken")).ready
    assert call(pb.ModelReadyRequest(name="simple")).ready
    assert server.client.infer("simple", simple_inputs()).get_response().model_version == "1"
    with pytest.raises(InferenceServerException, match=r"'broken' .* not at ready state: config.pbtxt: 3:1") as caught:
        server.client.infer("broken", simple_inputs())
    assert caught.value.status() == "StatusCode.UNAVAILABLE"


def test_index_of_ready_models(call: Call, broken: None) -> None:
    models = call(pb.RepositoryIndexRequest(ready=True)).models
    assert {model.state for model in models} == {"READY"}
    assert "broken" not in {model.name for model in models}


@pytest.mark.parametrize("method", ["ModelReady", "ModelStatistics", "RepositoryIndex"])
def test_bytes_that_are_no_message(on_the_wire: Callable[[str, bytes], bytes], method: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        on_the_wire(SERVICE + method, b"\x0a\xff")
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert f"not a {method}Request" in caught.value.details()


def test_a_new_version_takes_over_at_once(server: Any, call: Call, announced: Any) -> None:
    def answering_version(asked: str = "") -> str:
        result = server.client.infer("simple", announced.inputs(), model_version=asked)
        return str(result.get_response().model_version)

    before = server.front_end.models
    assert answering_version() == "1"
    server.front_end.handle(replace(announced.message, version=2))
    assert (answering_version(), answering_version("1")) == ("2", "1")
    assert list(call(pb.ModelMetadataRequest(name="simple")).versions) == ["1", "2"]
    assert list(call(pb.ModelMetadataRequest(name="simple", version="1")).versions) == ["1"]
    server.front_end.handle(ModelUnavailable("simple", 2, "unloaded"))
    assert answering_version() == "1"
    server.front_end.models = before
