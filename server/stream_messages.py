"""The messages of ModelStreamInfer: a request of a stream, read; its answer, written as those of ModelInfer are."""

from dataclasses import dataclass

from gangway.protos import grpc_service_pb2 as pb
from gangway.server.wire import length_prefix, split_request
from google.protobuf.message import DecodeError

SEQUENCE_PARAMETER = "sequence_id"
FINAL_PARAMETER = "triton_final_response"

_INFER_RESPONSE = pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER
_MARK = SEQUENCE_PARAMETER.encode()  # most headers need no second look


def _final() -> bytes:
    message = pb.ModelInferResponse()
    message.parameters[FINAL_PARAMETER].bool_param = True
    return message.SerializeToString()


_FINAL = _final()  # to be appended to a response: one field after the other is one message


@dataclass(frozen=True)
class StreamedRequest:
    """One ModelInferRequest of a stream: what inference needs of it, and where it stands among the others.

    Requests with the same `sequence` (None: none) are answered one after the other.
    """

    header: bytes
    request_id: bytes
    raws: list[memoryview]
    sequence: int | str | None
    size_bytes: int

    @classmethod
    def of(cls, message: bytes) -> "StreamedRequest":
        """Take a message apart. Raises MalformedRequestError."""
        header, request_id, raws = split_request(message)
        return cls(header, request_id, raws, sequence_of(header), len(message))


def sequence_of(header: bytes) -> int | str | None:
    """Return which sequence a request belongs to; None also if it cannot be read, which others will complain about."""
    if _MARK not in header:
        return None
    try:
        parameters = pb.ModelInferRequest.FromString(header).parameters
    except DecodeError:
        return None
    if SEQUENCE_PARAMETER not in parameters:
        return None
    parameter = parameters[SEQUENCE_PARAMETER]
    choice = parameter.WhichOneof("parameter_choice")
    if choice not in ("int64_param", "uint64_param", "string_param"):
        return None
    found: int | str = getattr(parameter, choice)
    return found or None


def success(response: bytes) -> bytes:
    """Return the answer with a serialised ModelInferResponse in it, which is said to be the request's last."""
    return b"".join((length_prefix(_INFER_RESPONSE, len(response) + len(_FINAL)), response, _FINAL))


def failure(reason: str, request_id: bytes) -> bytes:
    """Return the answer to a request that was refused or failed."""
    response = pb.ModelInferResponse(id=request_id.decode())
    return pb.ModelStreamInferResponse(error_message=reason, infer_response=response).SerializeToString()
