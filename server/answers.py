"""What the protocol asks apart from inference: health, metadata, configuration, statistics, the repository's index."""

from collections.abc import Callable
from importlib.metadata import version

import grpc

from gangway.protos import grpc_service_pb2 as pb
from gangway.protos import health_pb2
from gangway.server.errors import RequestError, unsupported
from gangway.server.front_end_messages import WHOLE_MODEL
from gangway.server.models import Models, ServedModel
from gangway.server.options.general import SERVER_NAME
from gangway.server.tensor import Tensor

EXTENSIONS = (  # only what works
    "binary_tensor_data",
    "classification",
    "logging",
    "model_configuration",
    "model_repository",
    "model_repository(unload_dependents)",
    "sequence",
    "statistics",
    "system_shared_memory",
    "trace",
)
HEALTH_SERVICES = ("", "inference.GRPCInferenceService")


class Answers:
    """Methods are named as the remote procedures. Each takes the request's message and returns the response's.

    `models` is replaced by the front end; `ready` says whether the initial load is over and the server is not stopping;
    unless `strict_readiness`, the server then counts as ready whatever has become of its models.
    `memory_bytes` says what a model holds, 0 if that is not known; `is_served` whether the other processes get on.
    """

    def __init__(self, name: str = SERVER_NAME) -> None:
        self.models = Models()
        self._name = name
        self.ready = False
        self.memory_bytes: Callable[[ServedModel], int] = lambda model: 0
        self.strict_readiness = True
        self.is_served: Callable[[], bool] = lambda: True
        self._version = version("gangway-serve")

    def server_live(self, _request: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        """Whoever can ask gets a yes."""
        return pb.ServerLiveResponse(live=True)

    def server_ready(self, _request: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        """Say whether requests are taken and, with strict readiness (the default), every model is ready."""
        return pb.ServerReadyResponse(ready=self._all_ready())

    def model_ready(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        """Say whether a model can be used; an unknown one cannot, and none while nobody would execute a request."""
        try:
            self.models.find(request.name, request.version)
        except RequestError as error:
            if error.code == grpc.StatusCode.INVALID_ARGUMENT:
                raise
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=self.is_served())

    def server_metadata(self, _request: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        """Return name, version and the extensions that work."""
        return pb.ServerMetadataResponse(name=self._name, version=self._version, extensions=EXTENSIONS)

    def model_metadata(self, request: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        """Return versions, inputs and outputs of a model."""
        model = self.models.find(request.name, request.version)
        versions = [str(served.version) for served in self.models.served(model.name)]
        response = pb.ModelMetadataResponse(name=model.name, versions=versions, platform=model.config.platform)
        response.inputs.extend(map(_tensor_metadata, model.inputs.values()))
        response.outputs.extend(map(_tensor_metadata, model.outputs.values()))
        return response

    def model_config(self, request: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        """Return a model's completed configuration."""
        return pb.ModelConfigResponse(config=self.models.find(request.name, request.version).config)

    def model_statistics(self, request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        """Return the counters of one version, of one model, or of all."""
        return pb.ModelStatisticsResponse(
            model_stats=[
                model.statistics.message(model.name, model.version, self.memory_bytes(model))
                for model in self._selected(request)
            ]
        )

    def repository_index(self, request: pb.RepositoryIndexRequest) -> pb.RepositoryIndexResponse:
        """List every model the repository has, with its state."""
        if request.repository_name:
            unsupported("'repository_name' specification is not supported")
        response = pb.RepositoryIndexResponse()
        for entry in self.models.entries.values():
            version_text = "" if entry.version == WHOLE_MODEL else str(entry.version)
            if isinstance(entry, ServedModel):
                response.models.add(name=entry.name, version=version_text, state="READY")
            elif entry.state == "UNKNOWN" and not request.ready:  # nobody has asked for it: there is only its name
                response.models.add(name=entry.name)
            elif not request.ready:
                response.models.add(name=entry.name, version=version_text, state=entry.state, reason=entry.reason)
        return response

    def health_check(self, request: health_pb2.HealthCheckRequest) -> health_pb2.HealthCheckResponse:
        """Answer gRPC's own health check: SERVING when the server is ready."""
        if request.service not in HEALTH_SERVICES:
            raise RequestError(grpc.StatusCode.NOT_FOUND, f"unknown service '{request.service}'")
        statuses = health_pb2.HealthCheckResponse.ServingStatus
        return health_pb2.HealthCheckResponse(status=statuses.SERVING if self._all_ready() else statuses.NOT_SERVING)

    def _all_ready(self) -> bool:
        return self.ready and self.is_served() and (self.models.all_ready or not self.strict_readiness)

    def _selected(self, request: pb.ModelStatisticsRequest) -> list[ServedModel]:
        if not request.name:
            return self.models.served()
        model = self.models.find(request.name, request.version)  # so that an unknown one is an error
        return [model] if request.version else self.models.served(model.name)


def _tensor_metadata(tensor: Tensor) -> pb.ModelMetadataResponse.TensorMetadata:
    return pb.ModelMetadataResponse.TensorMetadata(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
