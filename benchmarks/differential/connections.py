"""Where a server answers, and calls of gRPC to it."""

import http.client
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from benchmarks.differential.asked import GRPC, Request
from benchmarks.differential.transports import Transport
from benchmarks.differential.wire import Answer, error_of, grpc_message, response_of
from gangway.clients.connection import SERVICE
from gangway.protos import grpc_service_pb2 as pb

TIMEOUT_S = 20


@dataclass(frozen=True)
class Addresses:
    """Where a server answers, each as host:port, or unix:PATH for gRPC; `renamed`: texts of its answers, and what
    stands for them; `transport`: how gRPC is reached.
    """

    grpc_at: str
    http_at: str
    metrics_at: str
    renamed: Mapping[str, str]
    transport: Transport = field(default_factory=Transport)

    def channel(self, stranger: str = "") -> grpc.Channel:
        """Return a channel of its own connection."""
        own = [("grpc.use_local_subchannel_pool", 1)]
        credentials = self.transport.strangers[stranger] if stranger else self.transport.credentials
        if credentials is not None:
            return grpc.secure_channel(self.grpc_at, credentials, own)
        return grpc.insecure_channel(self.grpc_at, own)

    def connection(self) -> http.client.HTTPConnection:
        """Return a connection of HTTP."""
        return http.client.HTTPConnection(self.http_at, timeout=TIMEOUT_S)


class Messages:
    """Calls of gRPC over one connection."""

    def __init__(self, addresses: Addresses, stranger: str = "") -> None:
        self._channel = addresses.channel(stranger)

    def close(self) -> None:
        """Let go of the connection."""
        self._channel.close()

    def infer(self, request: Request, way: str = GRPC) -> Answer:
        """Return the answer to a request, with raw or typed contents."""
        return self.unary("ModelInfer", grpc_message(request, way), request.headers)

    def unary(self, method: str, message: Message, headers: Mapping[str, str]) -> Answer:
        """Return the answer of a method."""
        try:
            return response_of(self._method(method)(message, timeout=TIMEOUT_S, metadata=tuple(headers.items())))
        except grpc.RpcError as error:
            return error_of(error)

    def begin(self, request: Request, timeout_s: float = TIMEOUT_S) -> Any:
        """Send a request; return its call."""
        return self._method("ModelInfer").future(grpc_message(request, GRPC), timeout=timeout_s)

    def stream(self, requests: Iterable[Request], headers: Mapping[str, str], timeout_s: float = TIMEOUT_S) -> Any:
        """Return a stream, which sends the requests as they come."""
        call = self._channel.stream_stream(
            SERVICE + "ModelStreamInfer", pb.ModelInferRequest.SerializeToString, pb.ModelStreamInferResponse.FromString
        )
        messages = (grpc_message(request, GRPC) for request in requests)
        return call(messages, timeout=timeout_s, metadata=tuple(headers.items()))

    def _method(self, name: str) -> Any:
        method = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name[name]
        asked, answered = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        return self._channel.unary_unary(SERVICE + name, asked.SerializeToString, answered.FromString)
