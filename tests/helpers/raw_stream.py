"""ModelStreamInfer without a client library in between: message by message."""

import queue
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import grpc
import numpy as np

from gangway.protos import grpc_service_pb2 as pb

METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
TIMEOUT_S = 20


def simple_request(identity: str = "", rows: int = 1, model: str = "simple") -> pb.ModelInferRequest:
    """A request for the sum and difference of zeros and zeros."""
    request = pb.ModelInferRequest(model_name=model, id=identity)
    for name in ("INPUT0", "INPUT1"):
        request.inputs.add(name=name, datatype="INT32", shape=[rows, 16])
        request.raw_input_contents.append(np.zeros((rows, 16), np.int32).tobytes())
    return request


class RawStream:
    """One call. Answers are only taken from the connection by `receive`."""

    def __init__(self, address: str, metadata: Sequence[tuple[str, str]] = (), timeout_s: float = TIMEOUT_S) -> None:
        self._channel = grpc.insecure_channel(address)
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        open_call = self._channel.stream_stream(METHOD, response_deserializer=pb.ModelStreamInferResponse.FromString)
        self.call = open_call(iter(self._requests.get, None), timeout=timeout_s, metadata=list(metadata))

    def send(self, request: pb.ModelInferRequest | bytes) -> None:
        self._requests.put(request if isinstance(request, bytes) else request.SerializeToString())

    def half_close(self) -> None:
        """Say that no further request comes."""
        self._requests.put(None)

    def receive(self) -> pb.ModelStreamInferResponse:
        response: pb.ModelStreamInferResponse = next(self.call)
        return response

    def close(self) -> None:
        self.half_close()
        self.call.cancel()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
