"""The protocol's methods with one message in and one out: what gRPC and HTTP both answer, each in its own spelling.

A further method is added to `methods_of`, and every front end serves it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from google.protobuf.message import Message

from gangway.protos import grpc_service_pb2 as pb
from gangway.protos import health_pb2
from gangway.server.answers import Answers
from gangway.server.logs.answers import LogAnswers
from gangway.server.region_methods import RegionMethods
from gangway.server.repository_calls import RepositoryCalls
from gangway.server.tracing.answers import TraceAnswers

Request = TypeVar("Request", bound=Message)


@dataclass(frozen=True)
class Method(Generic[Request]):
    """The request's type, and what answers it. `answer` may raise RequestError, and may be called by any thread."""

    request: type[Request]
    answer: Callable[[Request], Message]


AnyMethod: TypeAlias = Method[Any]


def methods_of(
    answers: Answers, regions: RegionMethods, repository: RepositoryCalls, traces: TraceAnswers, logs: LogAnswers
) -> Mapping[str, AnyMethod]:
    """Return what is served besides inference, by the name that it has in the service."""

    def index(request: pb.RepositoryIndexRequest) -> pb.RepositoryIndexResponse:
        repository.refresh()
        return answers.repository_index(request)

    return {
        "ServerLive": Method(pb.ServerLiveRequest, answers.server_live),
        "ServerReady": Method(pb.ServerReadyRequest, answers.server_ready),
        "ModelReady": Method(pb.ModelReadyRequest, answers.model_ready),
        "ServerMetadata": Method(pb.ServerMetadataRequest, answers.server_metadata),
        "ModelMetadata": Method(pb.ModelMetadataRequest, answers.model_metadata),
        "ModelConfig": Method(pb.ModelConfigRequest, answers.model_config),
        "ModelStatistics": Method(pb.ModelStatisticsRequest, answers.model_statistics),
        "RepositoryIndex": Method(pb.RepositoryIndexRequest, index),
        "RepositoryModelLoad": Method(pb.RepositoryModelLoadRequest, repository.load),
        "RepositoryModelUnload": Method(pb.RepositoryModelUnloadRequest, repository.unload),
        "SystemSharedMemoryStatus": Method(pb.SystemSharedMemoryStatusRequest, regions.system_status),
        "SystemSharedMemoryRegister": Method(pb.SystemSharedMemoryRegisterRequest, regions.system_register),
        "SystemSharedMemoryUnregister": Method(pb.SystemSharedMemoryUnregisterRequest, regions.system_unregister),
        "CudaSharedMemoryStatus": Method(pb.CudaSharedMemoryStatusRequest, regions.cuda_status),
        "CudaSharedMemoryRegister": Method(pb.CudaSharedMemoryRegisterRequest, regions.cuda_register),
        "CudaSharedMemoryUnregister": Method(pb.CudaSharedMemoryUnregisterRequest, regions.cuda_unregister),
        "TraceSetting": Method(pb.TraceSettingRequest, traces.trace_setting),
        "LogSettings": Method(pb.LogSettingsRequest, logs.log_settings),
    }


def health_check_of(answers: Answers) -> AnyMethod:
    """Return the method Check of gRPC's own health service."""
    return Method(health_pb2.HealthCheckRequest, answers.health_check)
