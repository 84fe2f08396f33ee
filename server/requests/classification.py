"""The classification extension: instead of an output's elements the largest of them, as "value:index:label".

It works on finished responses, so that it does not matter how the model was executed or where the request came from.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gangway.executor.frames import join_strings
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import invalid
from gangway.server.models.served import ServedModel
from gangway.server.models.tensors import Tensor
from gangway.server.requests.calls import Call, Contents
from gangway.server.requests.data_plane import Layout, Request
from gangway.server.requests.regions import NO_REGIONS, REGION, Region

PARAMETER = "classification"
UNSUPPORTED = ("BYTES", "BOOL", "FP16", "BF16")
MAX_CLASSES = 2**31 - 1

OutputTensor = pb.ModelInferRequest.InferRequestedOutputTensor


@dataclass(frozen=True)
class Classes:
    """How many classes are wanted of an output, and what they are called, if they have names."""

    count: int
    labels: Sequence[str] = ()


def wanted_classes(output: OutputTensor, tensor: Tensor, model: ServedModel) -> Classes | None:
    """Return the classes that a requested output asks for; None if it asks for its elements. Raises RequestError."""
    if PARAMETER not in output.parameters:
        return None
    where = f"output '{tensor.name}' for model '{model.name}'"
    choice = output.parameters[PARAMETER].WhichOneof("parameter_choice")
    if choice not in ("int64_param", "uint64_param"):
        invalid(f"{where}: parameter '{PARAMETER}': expected int64_param, got {choice}")
    count = int(getattr(output.parameters[PARAMETER], choice))
    if not 0 <= count <= MAX_CLASSES:
        invalid(f"{where}: parameter '{PARAMETER}': expected 0 to {MAX_CLASSES}, got {count}")
    if not count:
        return None
    if tensor.datatype in UNSUPPORTED:
        invalid(f"class result not available for output due to unsupported type '{tensor.datatype}': {where}")
    if REGION in output.parameters:
        invalid(f"{where}: a classification cannot be written to shared memory")
    return Classes(count, model.labels.get(tensor.name, ()))


@dataclass(frozen=True)
class ClassifyingCall:
    """Another call, with some outputs of its response classified. `batched`: the first dimension counts rows."""

    call: Call
    classes: Mapping[str, Classes]  # by output
    batched: bool

    def layout(self, contents: Contents) -> Layout:
        """Return what the other call needs."""
        return self.call.layout(contents)

    def write(self, request: Request, contents: Contents) -> None:
        """Do as the other call."""
        self.call.write(request, contents)

    def answer(self, request_id: bytes, request: Request, regions: Mapping[str, Region] = NO_REGIONS) -> bytes | None:
        """Return the response with classes; None if there was too little room."""
        response = self.call.answer(request_id, request, regions)
        return None if response is None else classified(response, self.classes, self.batched)


def classified(response: bytes, classes: Mapping[str, Classes], batched: bool) -> bytes:
    """Return a serialised ModelInferResponse with these outputs classified."""
    from gangway.server.requests.top_classes import texts_of  # noqa: PLC0415 - numpy, which a front end need not wait for

    message = pb.ModelInferResponse.FromString(response)
    for index, output in enumerate(message.outputs):
        if output.name in classes:
            rows = output.shape[0] if batched else 1
            elements = math.prod(output.shape[batched:])
            wanted, content = classes[output.name], message.raw_output_contents[index]
            texts = texts_of(content, output.datatype, (rows, elements), wanted.count, wanted.labels)
            message.raw_output_contents[index] = join_strings([text for row in texts for text in row])
            output.datatype = "BYTES"
            output.shape[:] = [rows] * batched + [min(wanted.count, elements)]
    return message.SerializeToString()
