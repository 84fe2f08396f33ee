"""The messages of ModelStreamInfer: a request of a stream, read; its answer, written as those of ModelInfer are."""

from dataclasses import dataclass
from typing import TypeAlias

from google.protobuf.message import DecodeError

from gangway.protos import grpc_service_pb2 as pb
from gangway.server.large_contents import split_contents
from gangway.server.sequence.step import ID, ID_KINDS, UINT64_MASK
from gangway.server.wire import Raws, length_prefix, split_request

FINAL_PARAMETER = "triton_final_response"

SequenceKey: TypeAlias = tuple[str, int | str]  # model and id: two models do not share ids

_INFER_RESPONSE = pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER
_MARK = ID.encode()  # most headers need no second look


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
    raws: Raws
    sequence: SequenceKey | None
    size_bytes: int

    @classmethod
    def of(cls, message: bytes) -> "StreamedRequest":
        """Take a message apart. Raises MalformedRequestError."""
        header, request_id, raws = split_contents(split_request(message))
        return cls(header, request_id, raws, sequence_of(header), len(message))


def sequence_of(header: bytes) -> SequenceKey | None:
    """Return which sequence a request belongs to; None also if it cannot be read, which others will complain about."""
    if _MARK not in header:
        return None
    try:
        request = pb.ModelInferRequest.FromString(header)
    except DecodeError:
        return None
    if ID not in request.parameters:
        return None
    parameter = request.parameters[ID]
    choice = parameter.WhichOneof("parameter_choice")
    if choice not in ID_KINDS:
        return None
    found: int | str = getattr(parameter, choice)
    identity = found & UINT64_MASK if isinstance(found, int) else found
    return (request.model_name, identity) if identity else None


def success(response: bytes) -> bytes:
    """Return the answer with a serialised ModelInferResponse in it, which is said to be the request's last."""
    return b"".join((length_prefix(_INFER_RESPONSE, len(response) + len(_FINAL)), response, _FINAL))


def failure(reason: str, request_id: bytes) -> bytes:
    """Return the answer to a request that was refused or failed."""
    response = pb.ModelInferResponse(id=request_id.decode())
    return pb.ModelStreamInferResponse(error_message=reason, infer_response=response).SerializeToString()
