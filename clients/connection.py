"""A connection to an inference server that speaks Triton's gRPC protocol: errors, TLS, calls.

The flags of TLS have the names of those of Triton's client examples.
"""

import argparse
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import grpc
from google.protobuf.message import Message

from gangway.protos import grpc_service_pb2 as pb

SERVICE = "/inference.GRPCInferenceService/"
UNLIMITED_MESSAGES = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
# How the details of an error begin that gRPC raises itself because there is no connection.
NO_CONNECTION = ("failed to connect", "DNS resolution failed", "errors resolving")
WRONG_PORT = ("this port speaks HTTP", "only /metrics is served on this port")  # what Gangway says to gRPC there
PROBE_SECONDS = 1.0
USUAL_PORT = "gRPC is usually on port 8001"
HTTP2 = "h2"  # in the negotiation of TLS

Response = TypeVar("Response", bound=Message)


class ClientError(Exception):
    """The command cannot continue. The text is for people, `exit_status` for scripts."""

    exit_status = 1


class RefusedError(ClientError):
    """The server answered with an error status (unknown model, wrong shape, ...)."""

    exit_status = 1


class InputError(ClientError):
    """The command line or a file it names does not fit the model."""

    exit_status = 2


class UnreachableError(ClientError):
    """No server answered at the address, or not in time."""

    exit_status = 3


@dataclass(frozen=True)
class Tls:
    """Trusted authorities, and the client's own certificate: PEM files. No `root_certificates`: those of the system."""

    root_certificates: Path | None = None
    private_key: Path | None = None
    certificate_chain: Path | None = None

    @classmethod
    def of(cls, options: argparse.Namespace) -> Self | None:
        """Return what the flags say, None without --ssl. Raises InputError for flags or files that are wrong."""
        files = (options.root_certificates, options.private_key, options.certificate_chain)
        if not options.ssl:
            if any(files):
                raise InputError("certificates and keys are for TLS: give --ssl, too")
            return None
        if (options.private_key is None) != (options.certificate_chain is None):
            raise InputError("a client's certificate has two files: --private-key and --certificate-chain")
        tls = cls(*files)
        tls.context()  # which names an unusable file, as gRPC does not
        return tls

    def credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials for a channel of grpcio. Raises InputError."""
        return grpc.ssl_channel_credentials(
            *(_bytes_of(file) for file in (self.root_certificates, self.private_key, self.certificate_chain))
        )

    def context(self) -> ssl.SSLContext:
        """Return the context for a socket that speaks HTTP/2. Raises InputError."""
        try:
            context = ssl.create_default_context(cafile=self.root_certificates)
        except (ssl.SSLError, OSError) as error:
            raise InputError(f"--root-certificates {self.root_certificates}: {_reason(error)}") from error
        if self.private_key and self.certificate_chain:
            try:
                context.load_cert_chain(self.certificate_chain, self.private_key, password=_no_password)
            except (ssl.SSLError, OSError) as error:
                files = f"--certificate-chain {self.certificate_chain} and --private-key {self.private_key}"
                raise InputError(f"{files}: {_reason(error)}") from error
        context.set_alpn_protocols([HTTP2])
        return context


def grpc_channel(url: str, tls: Tls | None, options: Sequence[tuple[str, int]] = ()) -> grpc.Channel:
    """Return a channel of grpcio, which connects with its first call; messages may have any size. Raises InputError."""
    if "://" in url:
        raise InputError(f"{url}: expected HOST:PORT of a gRPC server, without a scheme; {USUAL_PORT}")
    options = [*UNLIMITED_MESSAGES, *options]
    if tls is None:
        return grpc.insecure_channel(url, options=options)
    return grpc.secure_channel(url, tls.credentials(), options=options)


def speaks_http1(url: str, timeout_s: float) -> bool:
    """Return whether a server at "host:port" answers in HTTP/1: one that has gRPC there does not."""
    host, _, port = url.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_s) as connection:
            connection.settimeout(timeout_s)
            connection.sendall(b"GET / HTTP/1.1\r\nHost: server\r\nConnection: close\r\n\r\n")
            return connection.recv(6) == b"HTTP/1"
    except (OSError, ValueError):
        return False


class Connection:
    """A channel. A call ends within `timeout_s`, or raises UnreachableError; an error status raises RefusedError."""

    def __init__(self, url: str, timeout_s: float, tls: Tls | None = None) -> None:
        self.url = url
        self.timeout_s = timeout_s
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

    def model_statistics(self, model: str, version: str = "") -> pb.ModelStatisticsResponse:
        """Counts and cumulated times of a model since the server started."""
        request = pb.ModelStatisticsRequest(name=model, version=version)
        return self._call("ModelStatistics", request, pb.ModelStatisticsResponse)

    def repository_index(self) -> pb.RepositoryIndexResponse:
        """Return every version of every model in the server's repositories, and whether it is ready."""
        return self._call("RepositoryIndex", pb.RepositoryIndexRequest(), pb.RepositoryIndexResponse)

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
        if status is grpc.StatusCode.UNAVAILABLE and details.startswith(NO_CONNECTION):
            return UnreachableError(f"no server answers at {self.url} ({details})")
        return RefusedError(f"{method}: {status.name}: {details}")


class TlsSocket:
    """A connected socket over TLS, with the few methods of a non-blocking socket that `RawChannel` needs."""

    def __init__(self, plain: socket.socket, tls: Tls, host: str) -> None:
        """Shake hands, within the socket's time-out; it does not block afterwards. Raises OSError, InputError."""
        self._secured = tls.context().wrap_socket(plain, server_hostname=host)
        self._secured.setblocking(False)

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._secured.fileno()

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        """Send some of the first buffer; return how much. Raises BlockingIOError while there is no room."""
        try:
            return self._secured.send(buffers[0])
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            raise BlockingIOError from None

    def recv_into(self, buffer: memoryview) -> int:
        """Take what has arrived, 0 at the end of the connection. Raises BlockingIOError if nothing has.

        All of it: what TLS has read from the socket already, `select` does not see.
        """
        count = 0
        try:
            while count < len(buffer) and (taken := self._secured.recv_into(buffer[count:])):
                count += taken
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if not count:
                raise BlockingIOError from None
        except ssl.SSLEOFError:
            return count
        return count

    def close(self) -> None:
        """Close the connection."""
        self._secured.close()


def add_tls_options(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that `Tls.of` reads."""
    group = parser.add_argument_group("TLS")
    group.add_argument("--ssl", action="store_true", help="speak TLS")
    group.add_argument(
        "--root-certificates", type=Path, metavar="FILE", help="PEM: authorities to trust (default: the system's)"
    )
    group.add_argument("--private-key", type=Path, metavar="FILE", help="PEM: the client's key, for mutual TLS")
    group.add_argument("--certificate-chain", type=Path, metavar="FILE", help="PEM: the client's certificate")


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _bytes_of(file: Path | None) -> bytes | None:
    try:
        return None if file is None else file.read_bytes()
    except OSError as error:
        raise InputError(f"{file}: {_reason(error)}") from error


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _no_password() -> str:
    raise InputError("the key is encrypted, and there is nobody to ask for the password")
