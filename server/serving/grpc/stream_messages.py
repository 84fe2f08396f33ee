"""The messages of ModelStreamInfer: requests taken apart, and answers around the responses to them. Pure."""

from collections.abc import Callable
from typing import TypeAlias

import msgspec
from google.protobuf.message import DecodeError

from gangway.protos import grpc_service_pb2 as pb
from gangway.server.models.sequences import ID, ID_KINDS, UINT64_MASK
from gangway.server.requests.contents import Raws, length_prefix, split_contents, split_request

FINAL_PARAMETER = "triton_final_response"

SequenceKey: TypeAlias = tuple[str, int | str]  # model and id: two models do not share ids
HasSequences: TypeAlias = Callable[[str], bool]  # `Inference.has_sequences`

_INFER_RESPONSE = pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER
_MARK = ID.encode()  # most headers need no second look


def _final(is_final: bool) -> bytes:
    message = pb.ModelInferResponse()
    message.parameters[FINAL_PARAMETER].bool_param = is_final
    return message.SerializeToString()


_FINAL, _NOT_FINAL = (
    _final(True),
    _final(False),
)  # to be appended to a response: one field after the other is one message


class StreamedRequest(msgspec.Struct, frozen=True):
    """One ModelInferRequest of a stream: what inference needs of it, and where it stands among the others.

    Requests with the same `sequence` (None: none) are answered one after the other, if their model has any.
    """

    header: bytes
    request_id: bytes
    raws: Raws
    sequence: SequenceKey | None
    size_bytes: int

    @classmethod
    def of(cls, message: bytes, has_sequences: HasSequences) -> "StreamedRequest":
        """Take a message apart. Raises MalformedRequestError."""
        header, request_id, raws = split_contents(split_request(message))
        sequence = sequence_of(header)
        if sequence is not None and not has_sequences(sequence[0]):
            sequence = None
        return cls(header, request_id, raws, sequence, len(message))


def sequence_of(header: bytes) -> SequenceKey | None:
    """Return which sequence a request belongs to; None also if the header is unparsable; the planner reports that."""
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


def success(response: bytes, is_final: bool = True) -> tuple[bytes, ...]:
    """Return the parts of the answer with a serialised ModelInferResponse in it, and whether it is the last one."""
    end = _FINAL if is_final else _NOT_FINAL
    return length_prefix(_INFER_RESPONSE, len(response) + len(end)), response, end


def failure(reason: str, request_id: bytes, model: str = "", is_final: bool = True) -> bytes:
    """Return the answer to a request that was refused, or what stands for a response of this model that failed."""
    response = pb.ModelInferResponse(id=request_id.decode(), model_name=model)
    if model:
        response.parameters[FINAL_PARAMETER].bool_param = is_final
    return pb.ModelStreamInferResponse(error_message=reason, infer_response=response).SerializeToString()
