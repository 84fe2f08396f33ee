"""The classification extension: instead of an output's elements the largest of them, as "value:index:label".

It works on finished responses, so that it does not matter how the model was executed or where the request came from.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gangway.artifact.datatypes import DTYPES
from gangway.executor.frames import join_strings
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.calls import Call, Contents
from gangway.server.data_plane import Layout, Request
from gangway.server.errors import invalid
from gangway.server.models import ServedModel, Tensor
from gangway.server.region_ranges import REGION
from gangway.server.regions import NO_REGIONS, Region

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
    message = pb.ModelInferResponse.FromString(response)
    for index, output in enumerate(message.outputs):
        if output.name in classes:
            rows = output.shape[0] if batched else 1
            elements = math.prod(output.shape[batched:])
            values = np.frombuffer(message.raw_output_contents[index], DTYPES[output.datatype], rows * elements)
            texts = class_texts(values.reshape(rows, elements), classes[output.name])
            message.raw_output_contents[index] = join_strings([text for row in texts for text in row])
            output.datatype = "BYTES"
            output.shape[:] = [rows] * batched + [min(classes[output.name].count, elements)]
    return message.SerializeToString()


def class_texts(values: npt.NDArray[np.generic], classes: Classes) -> list[list[str]]:
    """Return the texts of the largest elements of each row of `values` [rows, elements], the largest first.

    Of equal ones the first comes first; what is not a number comes last.
    """
    texts = []
    for row in values:
        # Backwards there and back again: the sort is stable, and of equal ones the first shall come first.
        order = np.argsort(row[::-1], kind="stable")[::-1]
        places = len(row) - 1 - order
        if row.dtype.kind == "f":
            unknown = np.isnan(row[places])
            places = np.concatenate([places[~unknown], places[unknown]])
        texts.append([_text(row[place], int(place), classes.labels) for place in places[: classes.count]])
    return texts


def _text(value: np.generic, index: int, labels: Sequence[str]) -> str:
    number = f"{float(value):f}" if value.dtype.kind == "f" else str(value)
    return f"{number}:{index}:{labels[index]}" if index < len(labels) else f"{number}:{index}"
