"""How a checked request is carried out: what goes into shared memory, and how the answer comes out of it."""

import math
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn, Protocol, Self

from gangway.artifact.format import MAX_TENSORS
from gangway.artifact.precision import BF16, FP32
from gangway.executor.frames import Frame, FramePart, header_of, join_strings, needed_bytes, plan_frame, read_frame
from gangway.executor.slots import SlotOutcome
from gangway.protos import StatusCode
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import RequestError, invalid
from gangway.server.models.served import ServedModel
from gangway.server.models.tensors import Shapes, Tensor, item_bytes
from gangway.server.requests.contents import REQUEST_ID, length_prefix
from gangway.server.requests.data_plane import ExternalTensors, RequestLayout, Submission
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
from gangway.server.requests.remembered import Remembered
from gangway.server.statistics import versions_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


_RAW_OUTPUT_CONTENTS = pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER


Shape = tuple[int, ...]
Sinks = Mapping[int, RegionRange]  # of outputs that are not to be in the answer, by their place in the model
NO_SINKS: Final[Sinks] = {}


class AnswerTensor(NamedTuple):
    """One output of an answer: its type, its shape as clients have it, and its contents.

    Those of a Python model are what it gives, whatever its configuration says. `offset`: of the contents in the block
    of the answer; None: they are elsewhere.
    """

    datatype: str
    shape: Shape
    content: memoryview
    offset: int | None = None


class DescribedOutput(NamedTuple):
    """An output of a response but for its contents, which have so many bytes. `tensor`: what the configuration says."""

    tensor: Tensor
    datatype: str
    shape: Shape
    size_bytes: int


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

    described: tuple[DescribedOutput, ...] = ()

    @classmethod
    def of(cls, model: ServedModel, outputs: Sequence[DescribedOutput], sinks: Sinks) -> "ResponseTemplate":
        """Return the template for these outputs, in this order.

        Raises RequestError (INTERNAL, as Triton does) if one has no room where it shall be.
        """
        message = pb.ModelInferResponse(model_name=model.name, model_version=str(model.version))
        places: list[tuple[int | None, bytes]] = []
        for tensor, datatype, shape, size_bytes in outputs:
            output = message.outputs.add(name=tensor.name, datatype=datatype, shape=shape)
            sink = sinks.get(tensor.index)
            if sink is None:
                places.append((tensor.index, length_prefix(_RAW_OUTPUT_CONTENTS, size_bytes)))
            else:
                sink.require(size_bytes, tensor.name)
                _say_where(output, sink, size_bytes)
                places.append((None, length_prefix(_RAW_OUTPUT_CONTENTS, 0)))
        return cls(message.SerializeToString(), tuple(places), tuple(outputs))

    def fill(self, request_id: bytes, tensors: Sequence[memoryview]) -> bytes:
        """Return the serialised response, with the one copy of the outputs. `tensors`: all of the compiled model."""
        parts: list[bytes | memoryview] = [self.header]
        if request_id:
            parts += (length_prefix(REQUEST_ID, len(request_id)), request_id)
        for index, prefix in self.outputs:
            parts.append(prefix)
            if index is not None:
                parts += _pieces(tensors[index])
        return b"".join(parts)


def _pieces(content: memoryview) -> Sequence[bytes | memoryview]:
    """Return contents as they can be joined: a join of long ones lets other threads run only if all parts are bytes."""
    if len(content) <= AT_ONCE_BYTES:
        return (content,)
    pieces = []
    for at in range(0, len(content), STEP_BYTES):
        pieces.append(bytes(content[at : at + STEP_BYTES]))
        time.sleep(0)  # the loop has its turn: copying keeps the interpreter
    return pieces


def _say_where(output: pb.ModelInferResponse.InferOutputTensor, sink: RegionRange, size_bytes: int) -> None:
    output.parameters[REGION].string_param = sink.region
    if sink.offset:
        output.parameters[OFFSET].int64_param = sink.offset
    output.parameters[SIZE].int64_param = size_bytes


CLASSIFICATION = "classification"
NOT_CLASSIFIED = ("BYTES", "BOOL", "FP16", "BF16")
MAX_CLASSES = 2**31 - 1

OutputTensor = pb.ModelInferRequest.InferRequestedOutputTensor


@dataclass(frozen=True)
class Classes:
    """How many classes are wanted of an output, and what they are called, if they have names."""

    count: int
    labels: Sequence[str] = ()


AllClasses = Mapping[str, Classes]  # by output
NO_CLASSES: Final[AllClasses] = {}


STRING_BYTES = 32  # of one element, where nothing better is known
EMPTY_FRAME_BYTES = 64  # for an answer that nobody reads
MAX_TEMPLATES: Final = 64  # of one codec
_SPARE_RANK = 4  # of an output whose rank may be unknown
_NOTHING: Final = memoryview(b"")

HiddenInput = tuple[Tensor, Shape, bytes]  # one that goes with a request of a sequence: shape and contents


class StateMemory(Protocol):
    """The states of one sequence, from one request to the next. Used by one request at a time.

    They change only when a request has been answered.
    """

    @property
    def has_begun(self) -> bool:
        """Whether there is a state; not if the last `begin` has failed."""
        ...

    def begin(self) -> None:
        """Take the initial state, in place of any other. Raises RequestError (UNAVAILABLE) where there is no memory."""

    def inputs(self) -> Sequence[HiddenInput]:
        """Return the states that go with the request as other inputs do."""
        ...

    def tensors(self) -> ExternalTensors:
        """Return the states that have memory of their own. Raises RequestError (UNAVAILABLE) for lack of memory."""
        ...

    def keep(self, submission: Submission) -> None:
        """Take the states that an answered request has left. Raises RequestError (UNAVAILABLE) for lack of memory."""

    def close(self) -> None:
        """Give the memory back."""


@dataclass
class AnswerSize:
    """How many bytes to have ready for the answer: what the last one needed, if it was more than thought."""

    size_bytes: int


FramedAnswer = tuple[bytes, int, Sequence[FramePart], ResponseTemplate]


@dataclass
class Memo:
    """What was found out for the request before, which most often is true of the next one. For any threads.

    `layout` and what its frame begins with; of the answer what its frame began with, its size, where the outputs lay in
    it, and the response. Each is replaced as a whole.
    """

    layout: tuple[RequestLayout, bytes] | None = None
    answer: FramedAnswer | None = None


@dataclass(frozen=True, kw_only=True)
class ResponseForm:
    """The responses of a model to equal requests: which outputs they have, where these go, and which are classified."""

    model: ServedModel
    outputs: tuple[Tensor, ...]  # that are wanted, in this order
    sinks: Sinks = field(default_factory=dict)
    classes: AllClasses = field(default_factory=dict)
    _templates: Remembered[tuple[tuple[int, str, Shape, int], ...], ResponseTemplate] = field(
        init=False, default_factory=lambda: Remembered(MAX_TEMPLATES), compare=False
    )

    def response_of(self, request_id: bytes, given: Mapping[str, AnswerTensor], regions: Mapping[str, Region]) -> bytes:
        """Return the serialised response that has those of the outputs that are wanted. What is missing is left out.

        Raises RequestError if it would be too large to be sent, or for the regions where outputs shall be.
        """
        found = [(tensor, given[tensor.name]) for tensor in self.outputs if tensor.name in given]
        key = tuple([(tensor.index, each.datatype, each.shape, len(each.content)) for tensor, each in found])
        template = self._templates.known.get(key)
        if template is None:
            size_bytes = sum(size for _, _, _, size in key)
            if size_bytes > self.model.most_answer_bytes:
                raise self.too_large(size_bytes)
            described = [
                DescribedOutput(tensor, each.datatype, each.shape, len(each.content)) for tensor, each in found
            ]
            template = ResponseTemplate.of(self.model, described, self.sinks)
            self._templates.add(key, template)
        tensors = [_NOTHING] * len(self.model.outputs)
        for tensor, each in found:
            tensors[tensor.index] = each.content
        return self.filled(template, request_id, tensors, regions)

    def filled(
        self,
        template: ResponseTemplate,
        request_id: bytes,
        tensors: Sequence[memoryview],
        regions: Mapping[str, Region],
        delivered: Container[int] = (),
    ) -> bytes:
        """Return the response with these tensors, by their places in the model; write those that belong to regions.

        Raises RequestError if they cannot be written. `delivered`: those that need not be.
        """
        for place, sink in self.sinks.items():
            if place not in delivered:
                sink.within(regions).write(tensors[place])
        response = template.fill(request_id, tensors)
        return classified(response, self.classes, self.model.max_batch_size > 0) if self.classes else response

    def empty_response(self, request_id: bytes) -> bytes:
        """Return the serialised response that says that no other one follows."""
        return ResponseTemplate.of(self.model, (), {}).fill(request_id, ())

    def too_large(self, size_bytes: int) -> RequestError:
        """Return the error of an answer that cannot be sent."""
        model = self.model
        kind = "ensemble" if model.is_ensemble else "model"
        message = f"the answer of {kind} '{model.name}' has {size_bytes} bytes, {model.most_answer_bytes} are possible"
        return RequestError(StatusCode.RESOURCE_EXHAUSTED, message)


@dataclass(frozen=True, kw_only=True)
class Codec(ResponseForm):
    """How the tensors of equal requests travel: into shared memory, and out of it into the response. For any threads.

    Each input of a compiled model has a place of its own, and so has each output, unless the model has a tail. What has
    none lies in frames (`executor/frames.py`), one of the inputs and one of the outputs.
    """

    inputs: tuple[Tensor, ...]  # in the request's order, and behind them those that clients do not send
    shapes: tuple[Shape, ...]  # of these, as the model has them
    memory: RequestLayout | None = None  # the compiled model's; None: the inputs are in a frame
    answer_size: AnswerSize | None = None  # of the frame of the outputs; None: each has a place
    response: ResponseTemplate | None = None  # if it is known before
    is_empty: bool = False  # no rows: one of zeros is computed, so it waits and counts like others
    hidden: tuple[bytes, ...] = ()  # contents of the last inputs, which clients do not send
    states: StateMemory | None = None
    memo: Memo = field(init=False, default_factory=Memo, compare=False)

    @classmethod
    def framed(
        cls,
        model: ServedModel,
        shapes: Shapes,
        outputs: Sequence[Tensor],
        sinks: Sinks = NO_SINKS,
        classes: AllClasses = NO_CLASSES,
    ) -> Self:
        """Return how a request with inputs of these shapes is carried out in frames."""
        return cls(
            model=model,
            outputs=tuple(outputs),
            sinks=sinks,
            classes=classes,
            inputs=tuple(tensor for tensor, _ in shapes.inputs),
            shapes=tuple(tensor.model_shape(shape) for tensor, shape in shapes.inputs),
            answer_size=AnswerSize(expected_bytes(model, shapes)),
        )

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Where the inputs are in the model."""
        return tuple(tensor.index for tensor in self.inputs)

    @property
    def has_places(self) -> bool:
        """Whether all tensors have places of their own."""
        return self.answer_size is None and not self.is_empty

    def sequenced(
        self, hidden: Sequence[HiddenInput], answer_size: AnswerSize, states: StateMemory | None = None
    ) -> Self:
        """Return the codec with more inputs. `answer_size`: that of all of the model's answers in frames."""
        if self.answer_size is not None:
            answer_size.size_bytes = max(answer_size.size_bytes, self.answer_size.size_bytes)
        return replace(
            self,
            inputs=(*self.inputs, *(tensor for tensor, _, _ in hidden)),
            shapes=(*self.shapes, *(shape for _, shape, _ in hidden)),
            hidden=tuple(content for _, _, content in hidden),
            answer_size=answer_size if self.answer_size is not None else None,
            states=states,
        )

    # -- into shared memory

    def layout(self, contents: Contents) -> RequestLayout:
        """Return what memory a request with these contents needs, which are in the request's order."""
        return self.layout_of([len(content) for content in contents])

    def layout_of(self, sizes: Sequence[int]) -> RequestLayout:
        """Return the same for contents of so many bytes."""
        if self.answer_size is None:
            assert self.memory is not None, "inputs in a frame have answers in one"
            return self.memory
        if self.memory is not None:
            return self._remembered(self.answer_size.size_bytes, None, joins=True)
        tensors: list[tuple[Shape, int]] = [((), 0)] * len(self.model.all_inputs)
        hidden = map(len, self.hidden)
        for place, shape, size_bytes in zip(self.places, self.shapes, (*sizes, *hidden), strict=True):
            tensors[place] = (shape, size_bytes)
        return self._remembered(self.answer_size.size_bytes, tensors, self.model.joins)

    def _remembered(self, answer_bytes: int, tensors: Sequence[tuple[Shape, int]] | None, joins: bool) -> RequestLayout:
        """Return the layout for inputs of these (shape, bytes of contents); None: they have places of their own."""
        if self.memo.layout is not None:
            known, _ = self.memo.layout
            frame = known.frame
            same = frame is None or [(part.shape, part.size_bytes) for part in frame.parts] == tensors
            if same and known.answer_bytes == answer_bytes and known.joins == joins:
                return known
        if self.memory is not None:
            layout = replace(self.memory, output_bytes=(), answer_bytes=answer_bytes)
        else:
            assert tensors is not None, "of a frame"
            layout = RequestLayout(
                self.model.model_id, (), (), plan_frame(tensors), answer_bytes, joins, self.model.ragged
            )
        self.memo.layout = layout, header_of(layout.frame) if layout.frame is not None else b""
        return layout

    def write(self, submission: Submission, contents: Contents) -> None:
        """Copy the inputs into the request's memory, but those that are used where they are."""
        frame = submission.layout.frame
        if self.is_empty:
            for view in submission.inputs:
                view[:] = bytes(len(view))
        elif frame is not None:
            self._write_frame(submission, frame, self.places, (*contents, *self.hidden))
        else:
            for place, content in zip(self.places, (*contents, *self.hidden), strict=True):
                if place not in submission.external.inputs:
                    copy_content(content, submission.inputs[place])
        if self.answer_size is not None:
            forget_answer(submission)

    def _write_frame(self, submission: Submission, frame: Frame, places: Sequence[int], contents: Contents) -> None:
        self._begin_frame(submission, frame)
        for view, content in zip(_views(submission, places), contents, strict=True):
            copy_content(content, view)

    def _begin_frame(self, submission: Submission, frame: Frame) -> None:
        (view,) = submission.inputs
        known = self.memo.layout
        header = known[1] if known is not None and known[0].frame is frame else header_of(frame)
        view[: len(header)] = header

    def begin(self, submission: Submission) -> list[memoryview]:
        """Write all but the inputs that the client sends; return where these go. It is for requests with rows."""
        frame = submission.layout.frame
        if frame is not None:
            self._begin_frame(submission, frame)
        if self.answer_size is not None:
            forget_answer(submission)
        return _views(submission, self.places)

    def contents_in(self, submission: Submission) -> Contents:
        """Return copies of what `write` has written for the client; nothing of it may be external."""
        return list(map(bytes, _views(submission, self.places[: len(self.places) - len(self.hidden)])))

    # -- out of it

    def parts_in(self, view: memoryview) -> Sequence[FramePart] | None:
        """Return where the outputs lie in the block of the answer; None if there was too little room.

        The next attempt will have it. Raises RequestError if that would be too much to be sent.
        """
        needed, most = needed_bytes(view), self.model.most_answer_bytes
        if needed <= len(view):
            return read_frame(view).parts
        if needed > most:
            raise self.too_large(needed)
        assert self.answer_size is not None, "of a frame"
        self.answer_size.size_bytes = min(needed + needed // 8, most)  # other requests may need a bit more
        return None

    def answer(
        self, request_id: bytes, submission: Submission, regions: Mapping[str, Region] = NO_REGIONS
    ) -> bytes | None:
        """Return the serialised response; None if there was too little room, which another attempt will have.

        Outputs that belong to regions are written there, and states are kept. Raises RequestError if that cannot be,
        or if the response would be too large to be sent.
        """
        if self.response is not None:
            tensors = [submission.outputs[0][:0]] * MAX_TENSORS if self.is_empty else submission.outputs
            response = self.filled(self.response, request_id, tensors, regions, submission.external.delivered)
        else:
            (view,), known = submission.outputs, self.memo.answer
            if known is None or known[1] > len(view) or view[: len(known[0])] != known[0]:
                parts = self.parts_in(view)
                if parts is None:
                    return None
                known = self.memo.answer = self._framed_answer(Frame(tuple(parts), needed_bytes(view)))
            tensors = [view[part.offset : part.offset + part.size_bytes] for part in known[2]]
            response = self.filled(known[3], request_id, tensors, regions)
        if self.states is not None:
            self.states.keep(submission)
        return response

    def _framed_answer(self, frame: Frame) -> FramedAnswer:
        parts = frame.parts
        found = []
        for tensor in self.outputs:
            part = parts[tensor.index]
            found.append(DescribedOutput(tensor, tensor.datatype, tensor.client_shape(part.shape), part.size_bytes))
        return header_of(frame), frame.size_bytes, parts, ResponseTemplate.of(self.model, found, self.sinks)


def _views(submission: Submission, places: Sequence[int]) -> list[memoryview]:
    """Return where these inputs are in the request's memory."""
    frame = submission.layout.frame
    if frame is None:
        return [submission.inputs[place] for place in places]
    (view,), parts = submission.inputs, [frame.parts[place] for place in places]
    return [view[part.offset : part.offset + part.size_bytes] for part in parts]


def forget_answer(submission: Submission) -> None:
    """Let the block of the answer hold no frame: an answer of another request may have been there."""
    submission.outputs[0][:8] = bytes(8)


def codec_of(
    model: ServedModel,
    shapes: Shapes,
    outputs: Sequence[Tensor],
    sinks: Sinks = NO_SINKS,
    classes: AllClasses = NO_CLASSES,
) -> Codec:
    """Return how the model answers a request with inputs of these shapes: compiled, if it is for them.

    Raises RequestError (INTERNAL, as Triton does) if an output has no room where it shall be.
    """
    framed, compiled = Codec.framed(model, shapes, outputs, sinks, classes), model.compiled_for(shapes)
    if compiled is None:
        return framed
    if compiled.tail and not shapes.is_empty:
        return replace(framed, memory=compiled.layout)
    rows = 0 if shapes.is_empty else shapes.rows
    known = []
    for tensor in outputs:
        spec = compiled.outputs[tensor.index]
        shape = (rows, *(max(size, 0) for size in spec.shape[1:])) if model.batched else spec.shape
        known.append(DescribedOutput(tensor, tensor.datatype, tensor.client_shape(shape), rows * spec.row_bytes))
    return replace(
        framed,
        memory=compiled.layout,
        answer_size=AnswerSize(EMPTY_FRAME_BYTES) if compiled.tail else None,
        response=ResponseTemplate.of(model, known, sinks),
        sinks=NO_SINKS if shapes.is_empty else sinks,
        is_empty=shapes.is_empty,
    )


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


AT_ONCE_BYTES: Final = 1 << 20  # are copied at once; longer contents in steps, aside of the loop
STEP_BYTES: Final = 1 << 18


def copy_content(content: Content, view: memoryview) -> None:
    """Fill `view` with an input's contents, by one copy. Raises RequestError if its region has become too small."""
    if isinstance(content, RegionPart):
        content.read_into(view)
    elif len(view) <= AT_ONCE_BYTES:
        view[:] = content
    else:
        whole = memoryview(content)
        for at in range(0, len(view), STEP_BYTES):
            view[at : at + STEP_BYTES] = whole[at : at + STEP_BYTES]
            time.sleep(0)  # the loop has its turn: copying keeps the interpreter


def integer_of(content: Content, datatype: str) -> int:
    """Return the integer that an input's contents are. Raises RequestError if its region has become too small."""
    view = memoryview(bytearray(item_bytes(datatype)))
    copy_content(content, view)
    return int.from_bytes(view, "little", signed=datatype.startswith("INT"))


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
        refuse_classes(tensor.datatype, where)
    if REGION in output.parameters:
        invalid(f"{where}: a classification cannot be written to shared memory")
    return Classes(count, model.labels.get(tensor.name, ()))


def refuse_classes(datatype: str, where: str) -> NoReturn:
    """Refuse the classification of an output of this type."""
    invalid(f"class result not available for output due to unsupported type '{datatype}': {where}")


def classified(response: bytes, classes: AllClasses, batched: bool) -> bytes:
    """Return a serialised ModelInferResponse with these outputs classified. Raises RequestError if one cannot be."""
    message = pb.ModelInferResponse.FromString(response)
    for index, output in enumerate(message.outputs):
        if output.name in classes:
            if output.datatype in NOT_CLASSIFIED:  # a Python model may answer with another type than it says
                refuse_classes(output.datatype, f"output '{output.name}' for model '{message.model_name}'")
            has_rows = batched and len(output.shape) > 0
            rows, elements = output.shape[0] if has_rows else 1, math.prod(output.shape[has_rows:])
            wanted, content = classes[output.name], message.raw_output_contents[index]
            texts = texts_of(content, output.datatype, (rows, elements), wanted.count, wanted.labels)
            message.raw_output_contents[index] = join_strings([text for row in texts for text in row])
            output.datatype = "BYTES"
            output.shape[:] = [rows] * has_rows + [min(wanted.count, elements)]
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
