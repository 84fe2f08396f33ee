"""Requests to Python models: frames as for onnxruntime, and one tensor more, in JSON (`executor/python_program.py`)."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, NamedTuple

from gangway.executor.frames import FramePart, FrameReader, is_absent, needed_bytes, plan_frame
from gangway.executor.python_program import STATUS_BYTES
from gangway.protos import StatusCode
from gangway.protos import grpc_service_pb2 as pb
from gangway.python_backend.cancellations import NEVER_CANCELLED, Flag
from gangway.python_backend.messages import ERROR_CODES, Described
from gangway.server.errors import RequestError, internal, unsupported
from gangway.server.models.python_settings import PythonSettings
from gangway.server.models.sequences import SEQUENCE_PARAMETERS, SequencePosition, position_of
from gangway.server.models.served import ServedModel
from gangway.server.models.tensors import Shapes, Tensor
from gangway.server.requests.codecs import (
    NO_CLASSES,
    NO_SINKS,
    AllClasses,
    AnswerSize,
    AnswerTensor,
    Codec,
    HiddenInput,
    Shape,
    Sinks,
    codec_of,
    expected_bytes,
    forget_answer,
)
from gangway.server.requests.data_plane import RequestLayout, Submission
from gangway.server.requests.regions import NO_REGIONS, Contents, Region
from gangway.server.requests.remembered import Remembered

STATUS: Final[Mapping[str, StatusCode]] = {
    "UNKNOWN": StatusCode.UNKNOWN,
    "INTERNAL": StatusCode.INTERNAL,
    "NOT_FOUND": StatusCode.NOT_FOUND,
    "INVALID_ARG": StatusCode.INVALID_ARGUMENT,
    "UNAVAILABLE": StatusCode.UNAVAILABLE,
    "UNSUPPORTED": StatusCode.UNIMPLEMENTED,
    "ALREADY_EXISTS": StatusCode.ALREADY_EXISTS,
    "CANCELLED": StatusCode.CANCELLED,
    "RESOURCE_EXHAUSTED": StatusCode.RESOURCE_EXHAUSTED,  # an answer that is too large: no code of Triton's
}
CODES: Final[Mapping[StatusCode, str]] = {STATUS[name]: name for name in ERROR_CODES}
ANY_INSTANCE: Final = -1
MAX_INT64: Final = 2**63 - 1
MOST_ROOM_BYTES: Final = 1 << 20  # of an answer's block: to fetch a longer one costs little beside copying it
MAX_LAYOUTS: Final = 64  # are remembered of requests of one form: those with other sizes of strings, ids, headers
_NOTHING: Final = ((), 0)


class PythonAnswer(NamedTuple):
    """What a model has answered in one go."""

    outputs: Mapping[str, AnswerTensor]
    parameters: Mapping[str, Any]


class PythonResponse(NamedTuple):
    """One response to a request that an instance has kept. `error`: why it has no outputs.

    `is_final`: no other one follows; then it may have no outputs.
    """

    outputs: Mapping[str, AnswerTensor]
    parameters: Mapping[str, Any]
    is_final: bool
    is_empty: bool
    error: RequestError | None = None


class Envelope(NamedTuple):
    """What Python models are told of one request beside what equal requests have in common.

    `headers`: those of the client's call that are parameters, too (`serving/inference/forwarded_headers.py`). `flag`:
    tells when the call is over.
    """

    request_id: bytes = b""
    headers: Mapping[str, str] = {}
    flag: Flag = NEVER_CANCELLED


PLAIN: Final = Envelope()


class KeptRequest(NamedTuple):
    """A request that an instance has kept: where to ask for its responses.

    `pids`: the instance's process and those that it has started, if the execution has begun and waits for something,
    without a core. `is_begun`: the model has begun to execute it; else it waits for the instance. `goes_on`: it
    computes, and has lost the core to others.
    """

    address: str
    execution: int
    request: int
    pids: Sequence[int] = ()
    is_begun: bool = False
    goes_on: bool = False


class Waiting(NamedTuple):
    """An execution that has had a core: its processes, if it waits for one; none: it has ended, or will ask.

    `goes_on`: it computes, and has lost the core to others.
    """

    pids: Sequence[int] = ()
    goes_on: bool = False


@dataclass(frozen=True, kw_only=True)
class PythonCodec(Codec):
    """How a Python model answers requests of one form. `about`: what the instance is told of each of them."""

    about: Mapping[str, Any] = field(default_factory=dict)
    instance: int = ANY_INSTANCE  # that executes it
    wants_empty_final: bool = False  # of a decoupled model: the client is told that there is no further response
    _reader: FrameReader = field(init=False, default_factory=FrameReader, compare=False)
    _layouts: Remembered[tuple[int, ...], tuple[RequestLayout, bytes]] = field(
        init=False, default_factory=lambda: Remembered(MAX_LAYOUTS), compare=False
    )

    def with_about(self, contents: Contents, envelope: Envelope = PLAIN) -> Contents:
        """Return the contents of a request with what the instance is told of it."""
        own = b'{"cancellation":[%6d,%12d]' % envelope.flag  # of equal length for most, so that they share a layout
        if envelope.request_id or envelope.headers:
            more: dict[str, Any] = {}
            if envelope.request_id:
                more["id"] = envelope.request_id.decode(errors="replace")
            if envelope.headers:
                more["parameters"] = {**self.about.get("parameters", {}), **envelope.headers}
            own += b"," + json.dumps(more, separators=(",", ":")).encode()[1:-1]
        return [*contents, *self.hidden, b"%b}\n%b" % (own, self._common_line)]

    @cached_property
    def _request(self) -> Mapping[str, Any]:
        wanted = [tensor.name for tensor in self.outputs]
        order = {} if list(self.places) == sorted(self.places) else {"order": self.places}
        return {**self.about, **order, "wanted": wanted, "most_bytes": self.model.most_answer_bytes}

    @cached_property
    def _common_line(self) -> bytes:
        return self._encoded({"request": self._request})

    def resume_contents(self, kept: KeptRequest, patience_ms: int) -> Contents:
        """Return the contents of a request that gives an execution a core until it computes little for so long."""
        return [b"{}\n" + self._encoded({"resume": (kept.address, kept.execution), "patience_ms": patience_ms})]

    @cached_property
    def _common(self) -> Mapping[str, Any]:
        settings = PythonSettings.of(self.model.config)
        return {
            "instances": len(settings.kinds),
            "timeout_s": settings.timeout_s,
            "instance": self.instance,
            "takes_any": settings.is_decoupled,  # number of requests at a time
        }

    @cached_property
    def most_apart(self) -> int:
        """How many requests its instances execute at a time, each of them by itself; 0: any number, or batches."""
        config = self.model.config
        has_batches = config.HasField("dynamic_batching") and config.max_batch_size > 1
        return 0 if has_batches else PythonSettings.of(config).most_executions

    def _encoded(self, about: Mapping[str, Any]) -> bytes:
        return json.dumps({**about, **self._common}, separators=(",", ":")).encode()

    def layout(self, contents: Contents) -> RequestLayout:
        """Return the sizes of both frames; of one without inputs if there are no contents but the last."""
        assert self.answer_size is not None, "of a frame"
        sizes = (self.answer_size.size_bytes, *map(len, contents))
        known = self._layouts.known.get(sizes)
        if known is None:
            self._make_layout(*sizes)
            known = self.memo.layout
            assert known is not None, "made"
            self._layouts.add(sizes, known)
        self.memo.layout = known
        return known[0]

    def _make_layout(self, answer_bytes: int, *sizes: int) -> None:
        tensors: list[tuple[Shape, int]] = [_NOTHING] * (len(self.model.all_inputs) + 1)
        is_resumed = len(sizes) == 1 and len(self.inputs) > 0
        if not is_resumed:
            for place, shape, size_bytes in zip(self.places, self.shapes, sizes[:-1], strict=True):
                tensors[place] = (shape, size_bytes)
        tensors[-1] = ((), sizes[-1])
        self._remembered(answer_bytes, tensors, self.model.joins and not is_resumed)

    def write(self, submission: Submission, contents: Contents) -> None:
        """Write the frame of the inputs, and of what the instance is told."""
        assert submission.layout.frame is not None, "made by this codec"
        places = self.places if len(contents) > 1 else ()
        self._write_frame(submission, submission.layout.frame, (*places, -1), contents)
        forget_answer(submission)

    def _read(self, view: memoryview) -> tuple[Sequence[FramePart], Mapping[str, Any]]:
        """Return the places of the outputs, with that of the status, and the status."""
        if not 0 < needed_bytes(view) <= len(view):
            raise RequestError(StatusCode.INTERNAL, f"model '{self.model.name}' has written no answer")
        parts = self._reader.read(view).parts
        last = parts[-1]
        text = bytes(view[last.offset : last.offset + last.size_bytes])
        return parts, {} if text == b"{}" else json.loads(text)  # most say nothing

    def read(self, view: memoryview) -> PythonAnswer | KeptRequest:
        """Return what is in the block of an answer, or where it will be.

        Raises RequestError for what the model says in place of them.
        """
        parts, status = self._read(view)
        if "error" in status:
            raise error_of(*status["error"])
        if "left" in status:
            return KeptRequest(*status["left"])
        outputs, types = {}, status.get("types", {})
        for name, tensor in self.model.outputs.items():
            part = parts[tensor.index]
            if not is_absent(part):
                content = view[part.offset : part.offset + part.size_bytes]
                outputs[name] = self._answered(
                    tensor, types.get(name, tensor.datatype), part.shape, content, part.offset
                )
        return PythonAnswer(outputs, status.get("parameters", {}))

    def expect(self, described: Sequence[Described]) -> None:
        """Have room for an answer like this in the block of the next request, unless it is long."""
        assert self.answer_size is not None, "of a frame"
        frame_bytes = plan_frame([(shape, size_bytes) for _, _, shape, size_bytes in described]).size_bytes
        needed_bytes = frame_bytes + frame_bytes // 8 + STATUS_BYTES  # other answers may need a bit more
        if self.answer_size.size_bytes < needed_bytes <= MOST_ROOM_BYTES:
            self.answer_size.size_bytes = needed_bytes

    def waiting(self, view: memoryview) -> Waiting:
        """Return what has become of an execution that has had a core. Raises RequestError."""
        status = self._read(view)[1]
        if "error" in status:
            raise error_of(*status["error"])
        return Waiting(tuple(status.get("waits", ())), status.get("goes_on", False))

    def outputs_in(self, described: Sequence[Described], payload: memoryview) -> Mapping[str, AnswerTensor]:
        """Return the outputs of a response that an instance has sent (`python_backend/messages.py`)."""
        ends = itertools.accumulate(size for _, _, _, size in described)
        return {
            name: self._answered(self.model.outputs[name], datatype, shape, payload[end - size : end])
            for (name, datatype, shape, size), end in zip(described, ends, strict=True)
        }

    @staticmethod
    def _answered(
        tensor: Tensor, datatype: str, shape: Sequence[int], content: memoryview, offset: int | None = None
    ) -> AnswerTensor:
        """Return an output as clients have it; one that is not of the model's shape keeps its own."""
        own = tuple(shape)
        if tensor.own_shape is not None and len(tensor.own_shape) == len(own):
            shown = tensor.client_shape(own)
            if math.prod(shown) == math.prod(own):
                own = shown
        return AnswerTensor(datatype, own, content, offset)

    def answer(self, request_id: bytes, submission: Submission, regions: Mapping[str, Region] = NO_REGIONS) -> bytes:
        """Return the response to a request that the model has answered in one go. Raises RequestError."""
        found = self.read(submission.outputs[0])
        if isinstance(found, KeptRequest):
            unsupported(f"model '{self.model.name}' waits for other models, which only a client's request can have")
        return self.response_of(request_id, found.outputs, regions) + parameters_text(found.parameters)


def parameters_text(parameters: Mapping[str, Any]) -> bytes:
    """Return the parameters of a response, to append to a serialised one.

    Raises RequestError (INTERNAL) for what cannot be sent.
    """
    if not parameters:
        return b""
    more = pb.ModelInferResponse()
    try:
        for key, value in parameters.items():
            set_parameter(more.parameters[key], value)
    except ValueError as error:
        internal(f"the parameters of a response cannot be sent: {error}")
    return more.SerializeToString()


def set_parameter(parameter: pb.InferParameter, value: Any) -> None:
    """Set a parameter to a flag, number or text.

    Raises ValueError for a number of more than 64 bits, and for a text that is not UTF-8.
    """
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int):
        if value > MAX_INT64:
            parameter.uint64_param = value
        else:
            parameter.int64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    else:
        parameter.string_param = str(value)


def values_of(parameters: Mapping[str, pb.InferParameter]) -> dict[str, Any]:
    """Return flags, numbers and texts; one without a value is an empty text."""
    return {
        key: getattr(value, value.WhichOneof("parameter_choice") or "string_param") for key, value in parameters.items()
    }


def error_of(code: str, message: str) -> RequestError:
    """Return the error that a model answers with. Half characters, which Python's texts may hold, are escaped."""
    text = message.encode(errors="backslashreplace").decode()
    return RequestError(STATUS.get(code, StatusCode.INTERNAL), text)


def codecs_of(
    model: ServedModel,
    shapes: Shapes,
    outputs: Sequence[Tensor],
    sinks: Sinks = NO_SINKS,
    classes: AllClasses = NO_CLASSES,
    about: Mapping[str, Any] | None = None,
    wants_empty_final: bool = False,
) -> tuple[Codec, Codec | None]:
    """Return how a model answers requests with inputs of these shapes, and another way if that one may go.

    `about`, `wants_empty_final`: of a Python model. Raises RequestError (INTERNAL) as `codec_of` does.
    """
    if not model.is_python:
        codec = codec_of(model, shapes, outputs, sinks, classes)
        may_go = bool(model.symbols) and codec.memory is not None
        return codec, Codec.framed(model, shapes, outputs, sinks, classes) if may_go else None
    size_bytes = min(expected_bytes(model, shapes) + STATUS_BYTES, model.most_answer_bytes)
    return replace(
        PythonCodec.framed(model, shapes, outputs, sinks, classes),
        answer_size=AnswerSize(size_bytes),
        about=about or {},
        wants_empty_final=wants_empty_final,
    ), None


def sequenced_python(
    codec: PythonCodec, hidden: Sequence[HiddenInput], step: SequencePosition, instance: int = ANY_INSTANCE
) -> PythonCodec:
    """Return how a Python model answers a request of a sequence, which an instance of that number executes.

    `hidden`: inputs that go with the request.
    """
    about = {**codec.about, "correlation_id": step.identity, "flags": step.start | step.end << 1}
    return replace(codec.sequenced(hidden, AnswerSize(0)), about=about, instance=instance)


def about_of(request: pb.ModelInferRequest) -> Mapping[str, Any]:
    """Return what Python models are told of a request: its parameters, and those that have a meaning."""
    about: dict[str, Any] = {}
    parameters = {
        key: value
        for key, value in values_of(request.parameters).items()
        if not key.startswith("triton_") and key not in SEQUENCE_PARAMETERS
    }
    for name in ("timeout", "priority"):
        if name in parameters:
            about[name] = parameters.pop(name)
    if any(key in request.parameters for key in SEQUENCE_PARAMETERS):
        step = position_of(request, 0)
        about.update(correlation_id=step.identity, flags=step.start | step.end << 1)
    if parameters:
        about["parameters"] = parameters
    return about
