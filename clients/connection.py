"""A connection to an inference server that speaks Triton's gRPC protocol, by grpcio."""

import json
import re
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import grpc
from google.protobuf.message import Message

from gangway.clients.addresses import host_and_port
from gangway.clients.errors import ClientError, InputError, RefusedError, UnreachableError, reason
from gangway.clients.inputs import OpenDimensions
from gangway.clients.tls import GIVE_SSL, Tls, speaks_tls
from gangway.protos import grpc_service_pb2 as pb

SERVICE = "/inference.GRPCInferenceService/"
UNLIMITED_MESSAGES = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
# How the details of an error begin that gRPC raises itself because there is no connection.
NO_CONNECTION = ("failed to connect", "DNS resolution failed", "errors resolving")
WRONG_PORT = ("this port speaks HTTP", "only /metrics is served on this port")  # what Gangway says to gRPC there
PROBE_SECONDS = 1.0
USUAL_PORT = "gRPC is usually on port 8001"
BUCKETS_PARAMETER = "gangway_buckets"  # of a configuration: sizes that a Gangway server compiles first
DIMENSIONS_PARAMETER = "gangway_dimensions"  # likewise: the names of each input's open dimensions, as JSON

Response = TypeVar("Response", bound=Message)


def grpc_channel(url: str, tls: Tls | None, options: Sequence[tuple[str, int]] = ()) -> grpc.Channel:
    """Return a channel of grpcio, which connects with its first call; messages may have any size. Raises InputError."""
    if "://" in url:
        raise InputError(f"{url}: expected HOST:PORT of a gRPC server, without a scheme; {USUAL_PORT}")
    options = [*UNLIMITED_MESSAGES, *options]
    if tls is None:
        return grpc.insecure_channel(url, options=options)
    return grpc.secure_channel(url, _credentials(tls), options=options)


def speaks_http1(url: str, timeout_s: float) -> bool:
    """Return whether a server at "host:port" answers in HTTP/1: one that has gRPC there does not."""
    try:
        with socket.create_connection(host_and_port(url), timeout_s) as connection:
            connection.settimeout(timeout_s)
            connection.sendall(b"GET / HTTP/1.1\r\nHost: server\r\nConnection: close\r\n\r\n")
            return connection.recv(6) == b"HTTP/1"
    except (OSError, ValueError):
        return False


class ServerConnection:
    """A channel. A call ends within `timeout_s`, or raises UnreachableError; an error status raises RefusedError."""

    def __init__(self, url: str, timeout_s: float, tls: Tls | None = None) -> None:
        self.url = url
        self.timeout_s = timeout_s
        self._is_plain = tls is None
        self._channel = grpc_channel(url, tls)

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

    def open_dimensions(self, model: str, version: str = "") -> OpenDimensions:
        """Return what a configuration says of open dimensions: names, and the least size, if it declares any of one."""
        parameters = self.model_config(model, version).config.parameters
        texts = {name: parameters[name].string_value for name in (BUCKETS_PARAMETER, DIMENSIONS_PARAMETER)
            if name in parameters}  # fmt: skip
        sizes = re.fullmatch(r"[^=;]+=([\d, ]+)", texts.get(BUCKETS_PARAMETER, "").strip())
        names = json.loads(texts.get(DIMENSIONS_PARAMETER, "{}"))
        return OpenDimensions(min(map(int, sizes[1].split(","))) if sizes else None, names)

    def model_statistics(self, model: str, version: str = "") -> pb.ModelStatisticsResponse:
        """Counts and cumulated times of a model since the server started."""
        request = pb.ModelStatisticsRequest(name=model, version=version)
        return self._call("ModelStatistics", request, pb.ModelStatisticsResponse)

    def repository_index(self) -> pb.RepositoryIndexResponse:
        """Return every version of every model in the server's repositories, and whether it is ready."""
        return self._call("RepositoryIndex", pb.RepositoryIndexRequest(), pb.RepositoryIndexResponse)

    def ready_models(self) -> set[str]:
        """Return the names of the models that are ready."""
        return {model.name for model in self.repository_index().models if model.state == "READY"}

    def load_model(self, model: str) -> None:
        """Load a model, or load it again; return when it is ready."""
        request = pb.RepositoryModelLoadRequest(model_name=model)
        self._call("RepositoryModelLoad", request, pb.RepositoryModelLoadResponse)

    def unload_model(self, model: str) -> None:
        """Unload a model; requests under way are answered."""
        request = pb.RepositoryModelUnloadRequest(model_name=model)
        self._call("RepositoryModelUnload", request, pb.RepositoryModelUnloadResponse)

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
        if status is grpc.StatusCode.UNIMPLEMENTED and details.startswith(WRONG_PORT):
            return UnreachableError(f"{self.url}: {details}")
        if status is grpc.StatusCode.UNAVAILABLE and speaks_http1(self.url, min(self.timeout_s, PROBE_SECONDS)):
            return UnreachableError(f"{self.url} speaks HTTP/1.1, and this command speaks gRPC: {USUAL_PORT}")
        if status is grpc.StatusCode.UNAVAILABLE and self._is_plain and self._speaks_tls():
            return UnreachableError(f"{self.url} {GIVE_SSL}")
        if status is grpc.StatusCode.UNAVAILABLE and details.startswith(NO_CONNECTION):
            return UnreachableError(f"no server answers at {self.url} ({details})")
        return RefusedError(f"{method}: {status.name}: {details}")

    def _speaks_tls(self) -> bool:
        try:
            return speaks_tls(*host_and_port(self.url), min(self.timeout_s, PROBE_SECONDS))
        except ValueError:
            return False


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _credentials(tls: Tls) -> grpc.ChannelCredentials:
    """Return the credentials for a channel of grpcio. Raises InputError."""
    return grpc.ssl_channel_credentials(
        *(_bytes_of(file) for file in (tls.root_certificates, tls.private_key, tls.certificate_chain))
    )


def _bytes_of(file: Path | None) -> bytes | None:
    try:
        return None if file is None else file.read_bytes()
    except OSError as error:
        raise InputError(f"{file}: {reason(error)}") from error
