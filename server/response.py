"""ModelInferResponse, written by hand: everything but id and tensors is the same for equal requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gangway.executor.slots import SlotOutcome
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.models import ServedModel
from gangway.server.region_ranges import OFFSET, REGION, SIZE, RegionRange
from gangway.server.statistics import versions_of
from gangway.server.tensor import Tensor
from gangway.server.wire import REQUEST_ID, length_prefix

_RAW_OUTPUT_CONTENTS = pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER


class Answered(NamedTuple):
    """One output of a response: its shape, as the client shall see it, and the bytes of its contents.

    These are in the response, or where `sink` says.
    """

    tensor: Tensor
    shape: Sequence[int]
    size_bytes: int
    sink: RegionRange | None = None


def report_of(outcome: SlotOutcome, rows: int, target_us: float, in_place: int = 0) -> bytes:
    """Return parameters to append to the serialised response of a request: how it was served (docs/deadlines.md)."""
    numbers = {
        "queue_us": outcome.queue_us,
        "compute_us": outcome.compute_us,
        "target_us": target_us,
        "ranks": outcome.ranks,
        "blocks": outcome.counts.blocks,
        "conflicts": outcome.counts.conflicts,
        "preemptions": outcome.counts.preemptions,
        "in_place": in_place,
        "batch_rows": outcome.batch_rows or rows,
    }
    message = pb.ModelInferResponse()
    for name, number in numbers.items():
        message.parameters[name].int64_param = round(number)
    message.parameters["versions"].string_param = ",".join(map(str, versions_of(outcome.counts.versions)))
    return message.SerializeToString()


def with_id(response: bytes, request_id: bytes) -> bytes:
    """Return a serialised response, which has no id, with one."""
    return b"".join((response, length_prefix(REQUEST_ID, len(request_id)), request_id)) if request_id else response


@dataclass(frozen=True)
class ResponseTemplate:
    """The response of a model for certain outputs of certain shapes."""

    header: bytes  # serialised ModelInferResponse without id and tensors
    # Place in the model, and what stands before the contents. Without a place they are elsewhere, and empty here:
    # clients look for the contents of the n-th output at the n-th place.
    outputs: tuple[tuple[int | None, bytes], ...]

    @classmethod
    def of(cls, model: ServedModel, outputs: Sequence[Answered]) -> "ResponseTemplate":
        """Return the template for these outputs, in this order."""
        message = pb.ModelInferResponse(model_name=model.name, model_version=str(model.version))
        places: list[tuple[int | None, bytes]] = []
        for tensor, shape, size_bytes, sink in outputs:
            output = message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
            if sink is None:
                places.append((tensor.index, length_prefix(_RAW_OUTPUT_CONTENTS, size_bytes)))
            else:
                _say_where(output, sink, size_bytes)
                places.append((None, length_prefix(_RAW_OUTPUT_CONTENTS, 0)))
        return cls(message.SerializeToString(), tuple(places))

    def fill(self, request_id: bytes, tensors: Sequence[memoryview]) -> bytes:
        """Return the serialised response, with the one copy of the outputs. `tensors`: all of the compiled model."""
        parts: list[bytes | memoryview] = [self.header]
        if request_id:
            parts += (length_prefix(REQUEST_ID, len(request_id)), request_id)
        for index, prefix in self.outputs:
            parts.append(prefix)
            if index is not None:
                parts.append(tensors[index])
        return b"".join(parts)


def _say_where(output: pb.ModelInferResponse.InferOutputTensor, sink: RegionRange, size_bytes: int) -> None:
    output.parameters[REGION].string_param = sink.region
    if sink.offset:
        output.parameters[OFFSET].int64_param = sink.offset
    output.parameters[SIZE].int64_param = size_bytes
