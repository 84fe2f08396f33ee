"""The protocol's methods with one message in and one out, which gRPC and HTTP both serve.

A further method is added to `process.methods_of`, and gRPC and HTTP both serve it. Each is a coroutine of the loop.
What only computes for a moment is answered at once. What others have to say is awaited. What tells of all models is
made in slices, one answer at a time. Few threads do what is long and cannot be divided.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeAlias, TypeVar

from google.protobuf.message import Message

from gangway.protos import StatusCode, health_pb2
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import RequestError, invalid, unsupported
from gangway.server.messages import WHOLE_MODEL, RegionChange
from gangway.server.models.served import Models, ServedModel
from gangway.server.models.tensors import Tensor
from gangway.server.options.server import SERVER_NAME
from gangway.server.requests.regions import MAX_NAME_BYTES, Regions, Registration, open_segment
from gangway.server.serving.pending import Driven, Offload
from gangway.server.serving.turns import Slices, Turns
from gangway.server.system import own_version

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


class ServerMethods:
    """Health, metadata, configuration, statistics, and the index of the repository.

    Methods are named as the remote procedures. Each takes the request's message and returns the response's. `models` is
    replaced by the front end. `ready` says whether the initial load is over and the server is not stopping; `leaving`
    that it soon will, so that neither it nor a model says that it is ready. Unless
    `strict_readiness`, the server then counts as ready whatever the state of its models. `memory_bytes` says what a
    model holds, which may be idle, 0 if that is not known; `is_served` whether the other processes work; `says_ready`
    what a Python model says of its readiness.
    """

    def __init__(
        self,
        name: str = SERVER_NAME,
        memory_bytes: Callable[[ServedModel, bool], int] = lambda model, is_idle: 0,
        is_served: Callable[[], bool] = lambda: True,
        says_ready: Callable[[ServedModel], Driven[bool]] | None = None,
    ) -> None:
        self.models = Models()
        self.ready = False
        self.leaving = False
        self.strict_readiness = True
        self._name = name
        self._memory_bytes = memory_bytes
        self._is_served = is_served
        self._says_ready = says_ready

    def server_live(self, _request: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        """Say yes: a server that answers is alive."""
        return pb.ServerLiveResponse(live=True)

    def server_ready(self, _request: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        """Say whether requests are taken and, with strict readiness (the default), every model is ready."""
        return pb.ServerReadyResponse(ready=self._all_ready())

    async def model_ready(self, request: pb.ModelReadyRequest, _slices: Slices) -> pb.ModelReadyResponse:
        """Say whether a model can be used: not an unknown one, and none while the other processes do not work.

        A Python model may say no itself.
        """
        try:
            model = self.models.find(request.name, request.version)
        except RequestError as error:
            if error.code is StatusCode.INVALID_ARGUMENT:
                raise
            return pb.ModelReadyResponse(ready=False)
        if not self._is_served() or self.leaving:
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=self._says_ready is None or await self._says_ready(model))

    def server_metadata(self, _request: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        """Return name, version and the extensions that work."""
        return pb.ServerMetadataResponse(name=self._name, version=own_version(), extensions=EXTENSIONS)

    def model_metadata(self, request: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        """Return versions, inputs and outputs of a model; of one version, if the request names it, as Triton does."""
        model = self.models.find(request.name, request.version)
        shown = [model] if request.version else self.models.served(model.name)
        versions = [str(served.version) for served in shown]
        platform = model.config.platform or model.config.backend
        response = pb.ModelMetadataResponse(name=model.name, versions=versions, platform=platform)
        response.inputs.extend(map(_tensor_metadata, model.inputs.values()))
        response.outputs.extend(map(_tensor_metadata, model.outputs.values()))
        return response

    def model_config(self, request: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        """Return a model's completed configuration."""
        return pb.ModelConfigResponse(config=self.models.find(request.name, request.version).config)

    async def model_statistics(self, request: pb.ModelStatisticsRequest, slices: Slices) -> pb.ModelStatisticsResponse:
        """Return the counters of one version, of one model, or of all."""
        response = pb.ModelStatisticsResponse()
        for model in self._selected(request):
            held_bytes = self._memory_bytes(model, self.models.is_idle(model))
            response.model_stats.append(model.statistics.message(model.name, model.version, held_bytes))
            await slices.rest()
        return response

    async def repository_index(self, request: pb.RepositoryIndexRequest, slices: Slices) -> pb.RepositoryIndexResponse:
        """List every model the repository has, with its state."""
        if request.repository_name:
            unsupported("'repository_name' specification is not supported")
        response = pb.RepositoryIndexResponse()
        for known in self.models.entries.values():
            entry = self.models.state_of(known)
            version_text = "" if entry.version == WHOLE_MODEL else str(entry.version)
            if isinstance(entry, ServedModel):
                note = self.models.note_of(entry)
                response.models.add(name=entry.name, version=version_text, state="READY", reason=note)
            elif entry.state == "UNKNOWN" and not request.ready:  # it was never loaded: there is only its name
                response.models.add(name=entry.name)
            elif not request.ready:
                response.models.add(name=entry.name, version=version_text, state=entry.state, reason=entry.reason)
            await slices.rest()
        return response

    def health_check(self, request: health_pb2.HealthCheckRequest) -> health_pb2.HealthCheckResponse:
        """Answer gRPC's own health check: SERVING when the server is ready."""
        if request.service not in HEALTH_SERVICES:
            raise RequestError(StatusCode.NOT_FOUND, f"unknown service '{request.service}'")
        statuses = health_pb2.HealthCheckResponse.ServingStatus
        return health_pb2.HealthCheckResponse(status=statuses.SERVING if self._all_ready() else statuses.NOT_SERVING)

    def _all_ready(self) -> bool:
        return (
            self.ready
            and not self.leaving
            and self._is_served()
            and (self.models.all_ready or not self.strict_readiness)
        )

    def _selected(self, request: pb.ModelStatisticsRequest) -> list[ServedModel]:
        if not request.name:
            return self.models.served()
        model = self.models.find(request.name, request.version)  # so that an unknown one is an error
        return [model] if request.version else self.models.served(model.name)


def _tensor_metadata(tensor: Tensor) -> pb.ModelMetadataResponse.TensorMetadata:
    return pb.ModelMetadataResponse.TensorMetadata(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)


MAX_KEY_CHARACTERS: Final = 4096  # no path is longer


class RegionMethods:
    """The methods for shared memory: system regions work, GPU memory does not exist here.

    Methods are named as the remote procedures. Each takes the request's message and returns the response's. `make` has
    all front ends `apply` a change, or raises RequestError. Unless they `are_allowed`, there are none.
    """

    def __init__(
        self, regions: Regions, make: Callable[[RegionChange], Driven[None]], are_allowed: bool = True
    ) -> None:
        self._regions = regions
        self._make = make
        self._are_allowed = are_allowed

    def apply(self, change: RegionChange) -> None:
        """Make a change in this process. Raises RequestError."""
        if change.kind == "unregister":
            self._regions.unregister(change.name)
            return
        if change.file and _file_number(change.key) != change.file:  # a successor comes later than the client
            invalid(f"Unable to open shared memory region: '{change.key}': it is not the segment that was registered")
        self._regions.register(Registration(change.name, change.key, change.offset, change.size_bytes))

    def system_status(self, request: pb.SystemSharedMemoryStatusRequest) -> pb.SystemSharedMemoryStatusResponse:
        """List one region, or all of them if none is named."""
        response = pb.SystemSharedMemoryStatusResponse()
        for known in self._regions.registrations():
            if request.name in ("", known.name):
                status = response.regions[known.name]
                status.name, status.key = known.name, known.key
                status.offset, status.byte_size = known.offset, known.size_bytes
        if request.name and not response.regions:
            message = f"Unable to find system shared memory region: '{request.name}'"
            raise RequestError(StatusCode.NOT_FOUND, message)
        return response

    async def system_register(
        self, request: pb.SystemSharedMemoryRegisterRequest, _slices: Slices
    ) -> pb.SystemSharedMemoryRegisterResponse:
        """Register a region, in all front ends."""
        self._check_allowed()
        name, key = request.name, request.key
        if len(name) > MAX_NAME_BYTES or len(key) > MAX_KEY_CHARACTERS:
            self._regions.register(Registration(name, key, request.offset, request.byte_size))  # which refuses it
        else:
            file = _file_number(key)
            await self._make(RegionChange("register", name, key, request.offset, request.byte_size, file))
        return pb.SystemSharedMemoryRegisterResponse()

    async def system_unregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest, _slices: Slices
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        """Forget one region, or all of them if none is named, in all front ends."""
        self._check_allowed()
        if len(request.name) <= MAX_NAME_BYTES:  # else it is not known, which is fine
            await self._make(RegionChange("unregister", request.name))
        return pb.SystemSharedMemoryUnregisterResponse()

    def cuda_status(self, request: pb.CudaSharedMemoryStatusRequest) -> pb.CudaSharedMemoryStatusResponse:
        """Say that there are none."""
        if request.name in [known.name for known in self._regions.registrations()]:
            registered = "is registered as system shared memory, not CUDA shared memory"
            raise RequestError(StatusCode.NOT_FOUND, f"The region named '{request.name}' {registered}")
        if request.name:
            message = f"Unable to find cuda shared memory region: '{request.name}'"
            raise RequestError(StatusCode.NOT_FOUND, message)
        return pb.CudaSharedMemoryStatusResponse()

    def cuda_register(self, request: pb.CudaSharedMemoryRegisterRequest) -> pb.CudaSharedMemoryRegisterResponse:
        """Refuse: this server computes on CPUs."""
        self._check_allowed()
        invalid(f"failed to register CUDA shared memory region: '{request.name}', GPUs not supported")

    def cuda_unregister(self, _request: pb.CudaSharedMemoryUnregisterRequest) -> pb.CudaSharedMemoryUnregisterResponse:
        """Do nothing: what was never registered is fine, as in Triton."""
        self._check_allowed()
        return pb.CudaSharedMemoryUnregisterResponse()

    def _check_allowed(self) -> None:
        """Raise RequestError if clients may not register regions."""
        if not self._are_allowed:
            unsupported("Client shared memory is disabled: --allow-client-shm=true of the server enables it")


def _file_number(key: str) -> int:
    """Return which file a key means now; 0 if there is none."""
    try:
        descriptor = open_segment(key)
    except RequestError:
        return 0
    try:
        return os.fstat(descriptor).st_ino
    finally:
        os.close(descriptor)


RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Method(Generic[RequestT]):
    """The request's type, and the coroutine that answers it, which may raise RequestError.

    `before` is awaited before. `is_long` says whether an answer to this request tells of all models.
    """

    request: type[RequestT]
    answer: Callable[[RequestT, Slices], Driven[Message]]
    before: Callable[[], Driven[None]] | None = None
    is_long: Callable[[RequestT], bool] = lambda request: False


AnyMethod: TypeAlias = Method[Any]


def at_once(answer: Callable[[RequestT], ResponseT]) -> Callable[[RequestT, Slices], Driven[ResponseT]]:
    """Return the coroutine that answers as this function does."""

    async def answered(request: RequestT, _slices: Slices) -> ResponseT:
        return answer(request)

    return answered


class Methods:
    """What is served besides inference, by the name that it has in the service.

    `deferred` is called before an answer is made, so that all that has been answered is counted. `aside`: threads for
    what is long.
    """

    def __init__(
        self,
        methods: Mapping[str, AnyMethod],
        loop: asyncio.AbstractEventLoop,
        aside: Offload,
        deferred: Callable[[], None],
    ) -> None:
        self.by_name = methods
        self._loop = loop
        self._aside = aside
        self._deferred = deferred
        self._long_requests, self._long_answers = Turns(loop), Turns(loop)

    async def ask(
        self,
        method: AnyMethod,
        read: Callable[[], Message],
        write: Callable[[Any, Slices], Driven[Answer]],
        is_short: bool,
    ) -> Answer:
        """Return what `write` makes of the answer to the request that `read` makes. Raises what they raise.

        `is_short`: reading it takes no longer than the loop has. Both may raise RequestError, and so may the method.
        """
        if is_short:
            request = read()
        else:
            async with self._long_requests:  # the other thread is there for inference
                request = await self._aside.run(read)
        del read
        self._deferred()
        if method.before is not None:
            await method.before()
        if method.is_long(request):
            async with self._long_answers as slices:  # each holds memory
                return await write(await method.answer(request, slices), slices)
        slices = Slices(self._loop)
        answer = method.answer(request, slices)
        del request
        return await write(await answer, slices)


PERIOD_S = 0.25  # how late a watcher may learn of a change
MAX_WATCHERS = 64  # each has a timer

_Status = health_pb2.HealthCheckResponse.ServingStatus


class Health:
    """gRPC's own health service. `check` is a method like the others; `status` is what those who watch are told."""

    def __init__(self, answers: ServerMethods) -> None:
        self._answers = answers
        self.check: AnyMethod = Method(health_pb2.HealthCheckRequest, at_once(answers.health_check))

    def status(self, request: health_pb2.HealthCheckRequest) -> health_pb2.HealthCheckResponse:
        """Return the status; a service that is not known is none that fails: it may come."""
        if request.service not in HEALTH_SERVICES:
            return health_pb2.HealthCheckResponse(status=_Status.SERVICE_UNKNOWN)
        return self._answers.health_check(request)
