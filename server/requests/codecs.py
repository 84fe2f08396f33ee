"""How a checked request is carried out: what goes into shared memory, and how the answer comes out of it."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from gangway.artifact.format import MAX_TENSORS
from gangway.artifact.precision import BF16, FP32
from gangway.executor.frames import Frame, Part, header_of, join_strings, needed_bytes, plan_frame, read_frame
from gangway.executor.slots import SlotOutcome
from gangway.protos import StatusCode
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import RequestError, invalid
from gangway.server.models.served import Compiled, ServedModel
from gangway.server.models.tensors import Shapes, Tensor, item_bytes
from gangway.server.requests.contents import REQUEST_ID, length_prefix
from gangway.server.requests.data_plane import FrameLayout, Layout, Submission, TailLayout, TensorLayout
from gangway.server.requests.regions import (
    NO_REGIONS,
    OFFSET,
    REGION,
    SIZE,
    Content,
    Contents,
    Region,
    RegionPart,
    RegionRange,
)
from gangway.server.statistics import versions_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


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
    """Return parameters to append to a serialised response: how it was served (docs/explanation/targets.md)."""
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


def _precision_report(precision: str) -> bytes:
    message = pb.ModelInferResponse()
    message.parameters["precision"].string_param = precision
    return message.SerializeToString()


PRECISIONS_USED: Final = (FP32, BF16)
"""Of a model whose precision the scheduler chooses, by `SlotCounts.bf16`."""

PRECISION_REPORTS: Final = tuple(map(_precision_report, PRECISIONS_USED))
"""Parameters that say so, to append to a serialised response."""


def with_id(response: bytes, request_id: bytes) -> bytes:
    """Return a serialised response, which has no id, with one."""
    return b"".join((response, length_prefix(REQUEST_ID, len(request_id)), request_id)) if request_id else response


@dataclass(frozen=True)
class ResponseTemplate:
    """The response of a model for certain outputs of certain shapes. All but id and tensors is equal for equal
    requests.
    """

    header: bytes  # serialised ModelInferResponse without id and tensors
    # Place in the model, and what stands before the contents. Without a place they are external, and empty here:
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


Sinks = Mapping[int, RegionRange]  # of outputs that are not to be in the answer, by their place in the model
NO_SINKS: Final[Sinks] = {}

STRING_BYTES = 32  # of one element, where nothing better is known
EMPTY_FRAME_BYTES = 64  # for an answer that nobody reads
_SPARE_RANK = 4  # of an output whose rank may be unknown


HiddenInput = tuple[Tensor, tuple[int, ...], bytes]  # one that goes with a request of a sequence: shape and contents


class Codec(Protocol):
    """One way to have a model compute. Safe for threads: equal requests share it."""

    def layout(self, contents: Contents) -> Layout:
        """Return what memory a request with these contents needs, which are in the request's order."""
        ...

    def write(self, submission: Submission, contents: Contents) -> None:
        """Copy the contents into the request's memory."""

    def answer(
        self, request_id: bytes, submission: Submission, regions: Mapping[str, Region] = NO_REGIONS
    ) -> bytes | None:
        """Return the serialised response; None if there was too little room, which another attempt will have.

        Outputs that belong to regions are written there. Raises RequestError if they cannot be.
        """


@dataclass(frozen=True)
class TensorCodec:
    """A compiled model: every tensor has a place of its own, and a size that is known."""

    memory: TensorLayout
    places: tuple[int, ...]  # of the request's inputs, in the compiled model
    response: ResponseTemplate
    sinks: Sinks = field(default_factory=dict)

    def answer_bytes(self, rows: int) -> int:
        """Return the size of all outputs."""
        return sum(self.memory.output_bytes) * rows

    def layout(self, contents: Contents) -> TensorLayout:
        """Return the model's layout, always the same one."""
        return self.memory

    def contents_in(self, submission: Submission) -> Contents:
        """Return copies of what `write` has written; nothing may be external."""
        return [bytes(submission.inputs[place]) for place in self.places]

    def write(self, submission: Submission, contents: Contents) -> None:
        """Copy each input to its place, but those that workers use where they are."""
        for place, content in zip(self.places, contents, strict=True):
            if place not in submission.external.inputs:
                copy_content(content, submission.inputs[place])

    def answer(self, request_id: bytes, submission: Submission, regions: Mapping[str, Region] = NO_REGIONS) -> bytes:
        """Return the response."""
        for place, sink in self.sinks.items():
            if place not in submission.external.outputs:
                sink.within(regions).write(submission.outputs[place])
        return self.response.fill(request_id, submission.outputs)


@dataclass(frozen=True)
class EmptyCodec:
    """A request without rows to a compiled model: a row of zeros is computed, so it waits and counts like others."""

    memory: TensorLayout | TailLayout
    response: ResponseTemplate

    def layout(self, contents: Contents) -> TensorLayout | TailLayout:
        """Return the model's layout."""
        return self.memory

    def write(self, submission: Submission, contents: Contents) -> None:
        """Write the zeros."""
        for view in submission.inputs:
            view[:] = bytes(len(view))

    def answer(self, request_id: bytes, submission: Submission, regions: Mapping[str, Region] = NO_REGIONS) -> bytes:
        """Return the response, whose tensors have no contents."""
        return self.response.fill(request_id, [submission.outputs[0][:0]] * MAX_TENSORS)


@dataclass
class AnswerSize:
    """How many bytes to have ready for the answer: what the last one needed, if it was more than thought."""

    size_bytes: int


@dataclass
class AnswerMemo:
    """What the frame of the answer before began with, its size, where the outputs lay in it, and the response.

    `known` is replaced as a whole.
    """

    known: "tuple[bytes, int, Sequence[Part], ResponseTemplate] | None" = None


@dataclass(frozen=True, kw_only=True)
class FramedAnswer:
    """The half of a codec that reads the answer, if that is a frame of outputs of any size (`executor/frames.py`)."""

    model: ServedModel
    outputs: tuple[Tensor, ...]
    answer_size: AnswerSize
    sinks: Sinks = field(default_factory=dict)
    answered: AnswerMemo = field(init=False, default_factory=AnswerMemo, compare=False)

    def answer_bytes(self, _rows: int) -> int:
        """Return the size of the frame of all outputs, as far as it is known."""
        return self.answer_size.size_bytes

    def parts_in(self, view: memoryview) -> Sequence[Part] | None:
        """Return where the outputs lie in the block of the answer; None if there was too little room.

        The next attempt will have it. Raises RequestError if that would be too much to be sent.
        """
        needed = needed_bytes(view)
        if needed <= len(view):
            return read_frame(view).parts
        most = self.model.most_answer_bytes
        if needed > most:
            message = f"the answer of model '{self.model.name}' has {needed} bytes"
            raise RequestError(StatusCode.RESOURCE_EXHAUSTED, f"{message}, {most} are possible")
        self.answer_size.size_bytes = min(needed + needed // 8, most)  # other requests may need a bit more
        return None

    def answer(
        self, request_id: bytes, submission: Submission, regions: Mapping[str, Region] = NO_REGIONS
    ) -> bytes | None:
        """Return the response, with the shapes that the tensors have got.

        Raises RequestError if it would be too large to be sent, or for the regions where outputs shall be.
        """
        (view,), known = submission.outputs, self.answered.known
        if known is None or known[1] > len(view) or view[: len(known[0])] != known[0]:
            parts = self.parts_in(view)
            if parts is None:
                return None
            frame = Frame(tuple(parts), needed_bytes(view))
            known = self.answered.known = header_of(frame), frame.size_bytes, parts, self._template(parts)
        _, _, parts, template = known
        tensors = [view[part.offset : part.offset + part.size_bytes] for part in parts]
        for place, sink in self.sinks.items():
            sink.within(regions).write(tensors[place])
        return template.fill(request_id, tensors)

    def _template(self, parts: Sequence[Part]) -> ResponseTemplate:
        answered = []
        for tensor in self.outputs:
            part, sink = parts[tensor.index], self.sinks.get(tensor.index)
            if sink is not None:
                sink.require(part.size_bytes, tensor.name)
            answered.append(Answered(tensor, tensor.client_shape(part.shape), part.size_bytes, sink))
        return ResponseTemplate.of(self.model, answered)


@dataclass
class RequestMemo:
    """The frame of the request before, which most often is that of the next one: planned once. For any threads."""

    known: tuple[FrameLayout, bytes] | None = None  # and what the frame begins with; replaced as a whole
    was_left: bool = False  # by an instance of a Python model, to the front end

    def layout(
        self, model_id: int, tensors: Sequence[tuple[Sequence[int], int]], answer_bytes: int, joins: bool
    ) -> FrameLayout:
        """Return the sizes of both frames, for inputs of these (shape, bytes of contents)."""
        if self.known is not None:
            known = self.known[0]
            same = known.output_bytes == answer_bytes and known.joins == joins
            if same and [(part.shape, part.size_bytes) for part in known.inputs.parts] == tensors:
                return known
        layout = FrameLayout(model_id, plan_frame(tensors), answer_bytes, joins)
        self.known = layout, header_of(layout.inputs)
        return layout

    def write_header(self, view: memoryview, layout: FrameLayout) -> None:
        """Write what a request's frame begins with."""
        known = self.known
        header = known[1] if known is not None and known[0] is layout else header_of(layout.inputs)
        view[: len(header)] = header


@dataclass(frozen=True, kw_only=True)
class FrameCodec(FramedAnswer):
    """A model for onnxruntime: inputs of any shape in one block, outputs in another (`executor/frames.py`)."""

    inputs: tuple[Tensor, ...]  # in the request's order
    shapes: tuple[tuple[int, ...], ...]  # of the inputs, as the model has them
    asked: RequestMemo = field(init=False, default_factory=RequestMemo, compare=False)

    @property
    def places(self) -> tuple[int, ...]:
        """The places of the request's inputs in the model."""
        return tuple(tensor.index for tensor in self.inputs)

    def layout(self, contents: Contents) -> FrameLayout:
        """Return the sizes of both frames."""
        tensors: list[tuple[Sequence[int], int]] = [((), 0)] * len(self.model.all_inputs)
        for tensor, shape, content in zip(self.inputs, self.shapes, contents, strict=True):
            tensors[tensor.index] = (shape, len(content))
        return self.asked.layout(self.model.model_id, tensors, self.answer_size.size_bytes, self.model.joins)

    def write(self, submission: Submission, contents: Contents) -> None:
        """Write the frame of the inputs."""
        assert isinstance(submission.layout, FrameLayout), "made by this codec"
        (view,) = submission.inputs
        self.asked.write_header(view, submission.layout)
        for tensor, content in zip(self.inputs, contents, strict=True):
            part = submission.layout.inputs.parts[tensor.index]
            copy_content(content, view[part.offset : part.offset + part.size_bytes])
        forget_answer(submission)

    def contents_in(self, submission: Submission) -> Contents:
        """Return copies of what `write` has written."""
        assert isinstance(submission.layout, FrameLayout), "made by this codec"
        (view,), parts = submission.inputs, submission.layout.inputs.parts
        found = [parts[tensor.index] for tensor in self.inputs]
        return [bytes(view[part.offset : part.offset + part.size_bytes]) for part in found]


@dataclass(frozen=True, kw_only=True)
class TailCodec(FramedAnswer):
    """A compiled model with a tail: every input has a place of its own, all outputs are in one frame."""

    memory: TensorLayout
    places: tuple[int, ...]  # of the request's inputs, in the model

    def layout(self, contents: Contents) -> TailLayout:
        """Return the sizes of the inputs, and that of the answer's frame."""
        return TailLayout(self.memory.model_id, self.memory.input_bytes, self.answer_size.size_bytes)

    def write(self, submission: Submission, contents: Contents) -> None:
        """Copy each input to its place."""
        for place, content in zip(self.places, contents, strict=True):
            copy_content(content, submission.inputs[place])
        forget_answer(submission)

    def contents_in(self, submission: Submission) -> Contents:
        """Return copies of what `write` has written."""
        return [bytes(submission.inputs[place]) for place in self.places]


def forget_answer(submission: Submission) -> None:
    """Let the block of the answer hold no frame: an answer of another request may have been there."""
    submission.outputs[0][:8] = bytes(8)


def frame_codec_of(
    model: ServedModel, shapes: Shapes, outputs: Sequence[Tensor], sinks: Sinks = NO_SINKS
) -> FrameCodec:
    """Return how onnxruntime answers a request with inputs of these shapes."""
    own = tuple(tensor.model_shape(shape) for tensor, shape in shapes.inputs)
    inputs = tuple(tensor for tensor, _ in shapes.inputs)
    size = AnswerSize(expected_bytes(model, shapes))
    return FrameCodec(model=model, outputs=tuple(outputs), answer_size=size, sinks=sinks, inputs=inputs, shapes=own)


def tail_codec_of(
    model: ServedModel, compiled: Compiled, shapes: Shapes, outputs: Sequence[Tensor], sinks: Sinks = NO_SINKS
) -> TailCodec:
    """Return how a compiled model with a tail answers a request with inputs of these shapes."""
    size = AnswerSize(expected_bytes(model, shapes))
    places = tuple(tensor.index for tensor, _ in shapes.inputs)
    return TailCodec(
        model=model, outputs=tuple(outputs), answer_size=size, sinks=sinks, memory=compiled.layout, places=places
    )


def codec_of(model: ServedModel, shapes: Shapes, outputs: Sequence[Tensor], sinks: Sinks = NO_SINKS) -> Codec:
    """Return how the model answers a request with inputs of these shapes: compiled, if it is for them.

    Raises RequestError (INTERNAL, as Triton does) if an output has no room where it shall be.
    """
    compiled = model.compiled_for(shapes)
    if compiled is None:
        return frame_codec_of(model, shapes, outputs, sinks)
    if compiled.tail and not shapes.is_empty:
        return tail_codec_of(model, compiled, shapes, outputs, sinks)
    rows = 0 if shapes.is_empty else shapes.rows
    answered = []
    for tensor in outputs:
        spec = compiled.outputs[tensor.index]
        shape = (rows, *(max(size, 0) for size in spec.shape[1:])) if model.batched else spec.shape
        sink, size_bytes = sinks.get(tensor.index), rows * spec.row_bytes
        if sink is not None:
            sink.require(size_bytes, tensor.name)
        answered.append(Answered(tensor, tensor.client_shape(shape), size_bytes, sink))
    response = ResponseTemplate.of(model, answered)
    if shapes.is_empty:
        memory = compiled.layout
        if not compiled.tail:
            return EmptyCodec(memory, response)
        return EmptyCodec(TailLayout(memory.model_id, memory.input_bytes, EMPTY_FRAME_BYTES), response)
    places = tuple(tensor.index for tensor, _ in shapes.inputs)
    return TensorCodec(compiled.layout, places, response, sinks)


def expected_bytes(model: ServedModel, shapes: Shapes) -> int:
    """Return the size of the answer's frame: exact where all is known, generous where not."""
    largest = max((math.prod(shape) for _, shape in shapes.inputs), default=1)
    tensors = []
    for tensor in model.outputs.values():
        shape = tensor.known_shape(shapes.sizes, shapes.rows if model.batched else None)
        elements = max(largest, 1) if shape is None else math.prod(shape)
        rank = len(tensor.shape) + (_SPARE_RANK if shape is None else 0)
        tensors.append(((0,) * rank, elements * (item_bytes(tensor.datatype) or STRING_BYTES)))
    for state in model.sequence.states if model.sequence else ():
        size_bytes = math.prod(state.shape) * (item_bytes(state.tensor.datatype) or STRING_BYTES)
        tensors.append(((0,) * len(state.shape), size_bytes))
    return min(plan_frame(tensors).size_bytes, model.most_answer_bytes)


PIECE_BYTES: Final = 1 << 20


def copy_content(content: Content, view: memoryview) -> None:
    """Fill `view` with an input's contents, by one copy. Raises RequestError if its region has become too small."""
    if isinstance(content, RegionPart):
        content.read_into(view)
    elif len(view) <= PIECE_BYTES:
        view[:] = content
    else:
        whole = memoryview(content)
        for at in range(0, len(view), PIECE_BYTES):
            view[at : at + PIECE_BYTES] = whole[at : at + PIECE_BYTES]
            time.sleep(0)  # the loop has its turn: copying keeps the interpreter


def integer_of(content: Content, datatype: str) -> int:
    """Return the integer that an input's contents are. Raises RequestError if its region has become too small."""
    view = memoryview(bytearray(item_bytes(datatype)))
    copy_content(content, view)
    return int.from_bytes(view, "little", signed=datatype.startswith("INT"))


CLASSIFICATION = "classification"
NOT_CLASSIFIED = ("BYTES", "BOOL", "FP16", "BF16")
MAX_CLASSES = 2**31 - 1

OutputTensor = pb.ModelInferRequest.InferRequestedOutputTensor


@dataclass(frozen=True)
class Classes:
    """How many classes are wanted of an output, and what they are called, if they have names."""

    count: int
    labels: Sequence[str] = ()


def wanted_classes(output: OutputTensor, tensor: Tensor, model: ServedModel) -> Classes | None:
    """Return the classes that a requested output asks for; None if it asks for its elements. Raises RequestError."""
    if CLASSIFICATION not in output.parameters:
        return None
    where = f"output '{tensor.name}' for model '{model.name}'"
    choice = output.parameters[CLASSIFICATION].WhichOneof("parameter_choice")
    if choice not in ("int64_param", "uint64_param"):
        invalid(f"{where}: parameter '{CLASSIFICATION}': expected int64_param, got {choice}")
    count = int(getattr(output.parameters[CLASSIFICATION], choice))
    if not 0 <= count <= MAX_CLASSES:
        invalid(f"{where}: parameter '{CLASSIFICATION}': expected 0 to {MAX_CLASSES}, got {count}")
    if not count:
        return None
    if tensor.datatype in NOT_CLASSIFIED:
        invalid(f"class result not available for output due to unsupported type '{tensor.datatype}': {where}")
    if REGION in output.parameters:
        invalid(f"{where}: a classification cannot be written to shared memory")
    return Classes(count, model.labels.get(tensor.name, ()))


@dataclass(frozen=True)
class ClassifyingCodec:
    """The classification extension: another codec, whose response has the largest elements of some outputs as text.

    It works on finished responses, however the model was executed and wherever the request came from. `batched`: the
    first dimension counts rows.
    """

    codec: Codec
    classes: Mapping[str, Classes]  # by output
    batched: bool

    def layout(self, contents: Contents) -> Layout:
        """Return what the other codec needs."""
        return self.codec.layout(contents)

    def write(self, submission: Submission, contents: Contents) -> None:
        """Do as the other codec."""
        self.codec.write(submission, contents)

    def answer(
        self, request_id: bytes, submission: Submission, regions: Mapping[str, Region] = NO_REGIONS
    ) -> bytes | None:
        """Return the response with classes; None if there was too little room."""
        response = self.codec.answer(request_id, submission, regions)
        return None if response is None else classified(response, self.classes, self.batched)


def classified(response: bytes, classes: Mapping[str, Classes], batched: bool) -> bytes:
    """Return a serialised ModelInferResponse with these outputs classified."""
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


def texts_of(
    content: bytes, datatype: str, shape: tuple[int, int], count: int, labels: Sequence[str]
) -> list[list[str]]:
    """Return the texts of the `count` largest elements of each row of a tensor [rows, elements], the largest first."""
    import numpy as np  # noqa: PLC0415 - a front end need not wait for it: see `process.Listeners`

    from gangway.artifact.datatypes import DTYPES  # noqa: PLC0415

    rows, elements = shape
    values = np.frombuffer(content, DTYPES[datatype], rows * elements)
    return class_texts(values.reshape(shape), count, labels)


def class_texts(values: "npt.NDArray[np.generic]", count: int, labels: Sequence[str]) -> list[list[str]]:
    """Return "value:index:label" of the largest elements of each row of `values` [rows, elements], the largest first.

    Of equal ones the first comes first; what is not a number comes last.
    """
    import numpy as np  # noqa: PLC0415 - see above

    texts = []
    for row in values:
        # Backwards there and back again: the sort is stable, and of equal ones the first shall come first.
        order = np.argsort(row[::-1], kind="stable")[::-1]
        places = len(row) - 1 - order
        if row.dtype.kind == "f":
            unknown = np.isnan(row[places])
            places = np.concatenate([places[~unknown], places[unknown]])
        texts.append([_text(row[place], int(place), labels) for place in places[:count]])
    return texts


def _text(value: "np.generic", index: int, labels: Sequence[str]) -> str:
    number = f"{float(value):f}" if value.dtype.kind == "f" else str(value)
    return f"{number}:{index}:{labels[index]}" if index < len(labels) else f"{number}:{index}"
