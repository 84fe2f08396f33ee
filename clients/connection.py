"""A connection to an inference server that speaks Triton's gRPC protocol."""

from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

import grpc
from google.protobuf.message import Message

from gangway.clients.tls import Tls
from gangway.protos import grpc_service_pb2 as pb

# What can go wrong for a client, each with the exit status of its command.


class ClientError(Exception):
    """The command cannot go on; the text says why, for people. `exit_status` tells scripts what kind it is."""

    exit_status = 1


class RefusedError(ClientError):
    """The server answered with an error status (unknown model, wrong shape, ...)."""

    exit_status = 1


class InputError(ClientError):
    """The command line or a file it names does not fit the model."""

    exit_status = 2


class UnreachableError(ClientError):
    """Nobody answered at the address, or not in time."""

    exit_status = 3


SERVICE = "/inference.GRPCInferenceService/"
UNLIMITED_MESSAGES = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
# How gRPC begins the details of an error that it makes up itself because there is no connection.
NO_CONNECTION = ("failed to connect", "DNS resolution failed", "errors resolving")

Response = TypeVar("Response", bound=Message)


class Connection:
    """A channel. A call ends within `timeout_s`, or raises UnreachableError; an error status raises RefusedError."""

    def __init__(self, url: str, timeout_s: float, tls: Tls | None = None) -> None:
        self.url = url
        self.timeout_s = timeout_s
        self._channel = (
            grpc.secure_channel(url, tls.credentials(), options=UNLIMITED_MESSAGES)
            if tls
            else grpc.insecure_channel(url, options=UNLIMITED_MESSAGES)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def model_metadata(self, model: str, version: str = "") -> pb.ModelMetadataResponse:
        """Names, datatypes and shapes of a model's inputs and outputs."""
        request = pb.ModelMetadataRequest(name=model, version=version)
        return self._call("ModelMetadata", request, pb.ModelMetadataResponse)

    def model_config(self, model: str, version: str = "") -> pb.ModelConfigResponse:
        """A model's configuration, as the server has completed it."""
        request = pb.ModelConfigRequest(name=model, version=version)
        return self._call("ModelConfig", request, pb.ModelConfigResponse)

    def model_statistics(self, model: str, version: str = "") -> pb.ModelStatisticsResponse:
        """Counts and cumulated times of a model since the server started."""
        request = pb.ModelStatisticsRequest(name=model, version=version)
        return self._call("ModelStatistics", request, pb.ModelStatisticsResponse)

    def infer(self, request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        """One inference."""
        return self._call("ModelInfer", request, pb.ModelInferResponse)

    def _call(self, method: str, request: Message, response: type[Response]) -> Response:
        call: Callable[..., Response] = self._channel.unary_unary(
            SERVICE + method, request_serializer=_serialize, response_deserializer=response.FromString
        )
        try:
            return call(request, timeout=self.timeout_s)
        except grpc.RpcError as error:
            raise self._explain(method, error) from error

    def _explain(self, method: str, error: grpc.RpcError) -> ClientError:
        status, details = error.code(), error.details() or "no details"
        if status is grpc.StatusCode.DEADLINE_EXCEEDED:
            return UnreachableError(f"{self.url} did not answer {method} within {self.timeout_s * 1000:.0f} ms")
        if status is grpc.StatusCode.UNAVAILABLE and details.startswith(NO_CONNECTION):
            return UnreachableError(f"no server answers at {self.url} ({details})")
        return RefusedError(f"{method}: {status.name}: {details}")


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
