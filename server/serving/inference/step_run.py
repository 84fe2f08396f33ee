"""One step of an ensemble that is handed to the scheduler: how it is opened, and what it leaves."""

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from gangway.executor.slots import SlotOutcome
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import RequestError, internal
from gangway.server.models.settings import Terms
from gangway.server.models.tensors import Shapes
from gangway.server.requests.codecs import AnswerTensor, Codec
from gangway.server.requests.data_plane import DataPlane, HeldTensors, Submission, TensorBlock, TensorPlace, total_bytes
from gangway.server.requests.ensemble_graphs import EnsembleStep
from gangway.server.requests.python_codec import Envelope, PythonAnswer, PythonCodec, PythonResponse
from gangway.server.requests.regions import Contents
from gangway.server.serving.inference.ensemble_tensors import EnsembleTensor, EnsembleTensors
from gangway.server.serving.inference.instance_turns import StepTurn
from gangway.server.serving.inference.model_run import ModelRun, RequestClock, ShapeWatch

Outputs: TypeAlias = Mapping[str, EnsembleTensor]  # of a step, by the names in its model


class OpenStep(NamedTuple):
    """A step that can be handed over. `block` has its outputs, and is held until these have been taken.

    `fallback`: executes it if the model's variant, whose codec it has, is gone.
    """

    submission: Submission
    block: TensorBlock
    codec: Codec
    fallback: Codec | None


class StepRun(ModelRun):
    """A step that has been handed over.

    `in_time`: whether it has ended before its clock's end. `answer`: what a Python model has answered, or why it has
    not. `turn`: in which it is handed over, if it waits for one.
    """

    in_time = True
    answer: PythonAnswer | PythonResponse | RequestError | None = None
    turn: StepTurn | None = None
    _outcome: SlotOutcome | None = None  # while it is closed
    _is_closed = False

    def __init__(
        self,
        step: EnsembleStep,
        shapes: Shapes,
        opened: OpenStep,
        clock: RequestClock,
        begin_ns: int,
        watch: ShapeWatch,
        queue: Terms,
    ) -> None:
        super().__init__(step.model, shapes, queue, clock, begin_ns, watch)
        self.step = step
        self.submission, self.block, self.codec, self.fallback = opened

    @property
    def most_apart(self) -> int:
        """How many requests to its model may be under way where they can wait for turns; 0: any number."""
        queue = self.queue
        if queue.max_queue or queue.queue_us or queue.rejects_late or not isinstance(self.codec, PythonCodec):
            return 0  # the scheduler sees to it
        return self.codec.most_apart

    def end_turn(self) -> None:
        """Let others of its model begin."""
        if self.turn is not None:
            self.turn.end()

    @property
    def compound_model(self) -> int:
        """The number of the model if the step may be a member of a compound task: one row, compiled; else -1."""
        if self.codec.memory is None or self.shapes.is_empty or self.shapes.rows != 1:
            return -1
        return self.submission.layout.model_id

    @property
    def slot(self) -> int | None:
        """The slot that it has; None: none any more."""
        return None if self._is_closed else self.submission.slot

    def ended(self) -> SlotOutcome:
        """Return how it has ended in its slot."""
        return self._outcome or self.submission.outcome()

    def leave_slot(self, plane: DataPlane) -> None:
        """Give slot and memory back, because an instance of a Python model has kept the request."""
        self._outcome, self.is_whole = self.submission.outcome(), False
        self.close(plane)

    def answered(self, outcome: SlotOutcome) -> None:
        """The instance has answered what it has kept, or it will not."""
        self._outcome, self.is_whole = outcome, False
        self.finished_ns = time.monotonic_ns()

    def close(self, plane: DataPlane) -> None:
        """Give slot and memory back. Calling it again does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self.submission.close()
            plane.drop(self.block)

    def outputs(self) -> Outputs | None:
        """Return what the step has left; None if there was too little room.

        Raises RequestError if it cannot be used.
        """
        if self.answer is not None:
            return self.python_outputs(self.answer)
        views, begins = self.submission.outputs, self.submission.external.outputs
        found = {}
        if self.codec.response is not None:
            for tensor, datatype, shape, size in self.codec.response.described:
                at = 0 if self.codec.is_empty else tensor.index
                found[tensor.name] = self._placed(AnswerTensor(datatype, shape, views[at][:size], begins[at]))
            return found
        try:
            parts = self.codec.parts_in(views[0])
        except ValueError as error:
            internal(f"model '{self.model.name}' has written an answer that cannot be read: {error}")
        if parts is None:
            return None
        for name, tensor in self.model.outputs.items():
            part = parts[tensor.index]
            content = views[0][part.offset : part.offset + part.size_bytes]
            shape, offset = tensor.client_shape(part.shape), begins[0] + part.offset
            found[name] = self._placed(AnswerTensor(tensor.datatype, shape, content, offset))
        return found

    def _placed(self, tensor: AnswerTensor) -> EnsembleTensor:
        """Return a tensor whose offset is that in the io segment, or None."""
        size_bytes = len(tensor.content)
        place = None if tensor.offset is None else TensorPlace(self.block, tensor.offset, size_bytes)
        return EnsembleTensor(tensor.datatype, tensor.shape, tensor.content, place)

    def python_outputs(self, answer: PythonAnswer | PythonResponse | RequestError) -> Outputs:
        """Return the outputs of an answer in one go, or those of the response after the step was kept.

        What the model leaves out is left out here: only who needs it fails.
        """
        if isinstance(answer, RequestError):
            raise answer.without_traceback()
        found = {}
        for name, tensor in answer.outputs.items():
            begin = None if tensor.offset is None else self.submission.external.outputs[0] + tensor.offset
            found[name] = self._placed(tensor._replace(offset=begin))
        return found


def open_step(
    plane: DataPlane,
    codec: Codec,
    fallback: Codec | None,
    rows: int,
    inputs: Sequence[EnsembleTensor],
    tensors: EnsembleTensors,
    envelope: Envelope,
) -> OpenStep:
    """Return a step that is ready to be handed over.

    A compiled model reads its inputs where they are. All others, and a request without rows, have a copy. Raises
    PoolExhaustedError and RequestError.
    """
    contents: Contents = [value.content for value in inputs]
    if isinstance(codec, PythonCodec):
        contents = codec.with_about(contents, envelope)
    layout, sources = codec.layout(contents), {}
    if codec.memory is not None and not codec.is_empty:
        for tensor, value in zip(codec.inputs, inputs, strict=True):
            place = sources[tensor.index] = tensors.placed(value)
            expected = rows * layout.input_bytes[tensor.index]
            if place.size_bytes != expected:
                given = f"input '{tensor.name}' for model '{codec.model.name}' has {place.size_bytes} bytes"
                internal(f"{given}, expected {expected}")
    sizes = layout.output_sizes(rows)
    block = plane.take(total_bytes(sizes))
    try:
        submission = plane.open(layout, rows, HeldTensors(plane, sources, dict(enumerate(block.places(sizes)))))
        try:
            codec.write(submission, contents)
        except BaseException:
            submission.close()
            raise
    except BaseException:
        plane.drop(block)
        raise
    return OpenStep(submission, block, codec, fallback)


def outputs_of(response: pb.ModelInferResponse) -> Outputs:
    """Return the outputs of a response."""
    contents = zip(response.outputs, response.raw_output_contents, strict=True)
    return {
        output.name: EnsembleTensor(output.datatype, tuple(output.shape), memoryview(content))
        for output, content in contents
    }
