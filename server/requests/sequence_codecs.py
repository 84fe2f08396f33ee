"""How a request of a sequence is carried out: with inputs that the client does not send, and states to be kept."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from gangway.artifact.format import ALIGNMENT_BYTES
from gangway.executor.frames import read_frame
from gangway.server.errors import unavailable
from gangway.server.models.sequences import SequencePosition, SequenceTensors, StateTensor, control_contents
from gangway.server.requests.codecs import (
    AnswerSize,
    ClassifyingCodec,
    Codec,
    FrameCodec,
    HiddenInput,
    TailCodec,
    TensorCodec,
)
from gangway.server.requests.data_plane import (
    DataPlane,
    HeldBlock,
    HeldLayout,
    Layout,
    PoolExhaustedError,
    Submission,
    TensorLayout,
)
from gangway.server.requests.python_codec import python_in, sequenced_python
from gangway.server.requests.regions import NO_REGIONS, Contents, Region


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

    def layout(self, layout: Layout) -> Layout:
        """Return the layout of the request with the states in their own memory. Raises PoolExhaustedError."""
        ...

    def keep(self, submission: Submission) -> None:
        """Take the states that an answered request has left. Raises RequestError (UNAVAILABLE) for lack of memory."""

    def close(self) -> None:
        """Give the memory back."""


class StateBudget:
    """How many bytes all states may have. Safe for threads."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self.taken_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Take some. Raises PoolExhaustedError."""
        with self._lock:
            if self.taken_bytes + size_bytes > self._limit_bytes:
                raise PoolExhaustedError(f"the states of sequences may have {self._limit_bytes} bytes in all")
            self.taken_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Give some back."""
        with self._lock:
            self.taken_bytes -= size_bytes


@dataclass(frozen=True)
class HeldPlaces:
    """Where the states of a compiled model lie within a block. `base`: its layout, without bytes for states."""

    states: tuple[StateTensor, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    block_bytes: int
    base: TensorLayout

    @classmethod
    def of(cls, layout: TensorLayout, states: tuple[StateTensor, ...]) -> "HeldPlaces":
        """Return them for the layout of a model and its states."""
        sizes = tuple(layout.input_bytes[state.tensor.index] for state in states)
        offsets, end = [], 0
        for size in sizes:
            offsets.append(end)
            end += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        inputs, outputs = list(layout.input_bytes), list(layout.output_bytes)
        for state in states:
            inputs[state.tensor.index] = outputs[state.output] = 0
        base = replace(layout, input_bytes=tuple(inputs), output_bytes=tuple(outputs))
        return cls(states, sizes, tuple(offsets), end, base)


class HeldStates:
    """States of a compiled model, in two blocks of shared memory: a request reads one and writes the other, then they
    swap.

    So a request that fails, or is executed again because a worker has died, finds the state as it was. A block that
    ranks may still touch, because its request was given up while it ran, is not written again. It is dropped, and the
    data plane frees it when they have left.
    """

    def __init__(self, plane: DataPlane, budget: StateBudget, places: HeldPlaces) -> None:
        self._plane = plane
        self._budget = budget
        self._places = places
        self._current: HeldBlock | None = None
        self._other: HeldBlock | None = None  # what the next request writes

    @property
    def has_begun(self) -> bool:
        """Whether there is a block to read."""
        return self._current is not None

    def begin(self) -> None:
        """Write the initial state into the block that the next request reads."""
        if self._current is None or self._current.uses:
            self._drop(self._current)
            self._current = None
            self._current = self._hold_or_refuse()
        places = self._places
        for state, size, offset in zip(places.states, places.sizes, places.offsets, strict=True):
            at = self._current.offset + offset
            self._plane.io.view[at : at + size] = _initial(state)

    def inputs(self) -> Sequence[HiddenInput]:
        """None: they are where they are."""
        return ()

    def layout(self, layout: Layout) -> HeldLayout:
        """Return a layout that reads one block and writes the other."""
        assert self._current is not None, "begun"
        if self._other is not None and self._other.uses:
            self._drop(self._other)
            self._other = None
        if self._other is None:
            self._other = self._hold()
        places = self._places
        sources = {
            state.tensor.index: (self._current.offset + offset, size)
            for state, size, offset in zip(places.states, places.sizes, places.offsets, strict=True)
        }
        results = {
            state.output: (self._other.offset + offset, size)
            for state, size, offset in zip(places.states, places.sizes, places.offsets, strict=True)
        }
        return HeldLayout(places.base, sources, results, (self._current, self._other))

    def keep(self, submission: Submission) -> None:
        """What was written is read next."""
        self._current, self._other = self._other, self._current

    def close(self) -> None:
        """Drop both blocks."""
        self._drop(self._current)
        self._drop(self._other)
        self._current = self._other = None

    def _hold_or_refuse(self) -> HeldBlock:
        try:
            return self._hold()
        except PoolExhaustedError as error:
            unavailable(f"Exceeds maximum queue size: {error}")

    def _hold(self) -> HeldBlock:
        self._budget.take(self._places.block_bytes)
        try:
            return self._plane.hold(self._places.block_bytes)
        except PoolExhaustedError:
            self._budget.give_back(self._places.block_bytes)
            raise

    def _drop(self, block: HeldBlock | None) -> None:
        if block is not None:
            self._plane.drop(block)
            self._budget.give_back(block.size_bytes)


class CopiedStates:
    """States of a model that answers by frames, copied from answer to request: shapes and sizes may differ."""

    def __init__(self, budget: StateBudget, states: tuple[StateTensor, ...]) -> None:
        self._budget = budget
        self._states = states
        self._values: list[tuple[tuple[int, ...], bytes]] = []
        self._taken_bytes = 0

    @property
    def has_begun(self) -> bool:
        """Whether there are values."""
        return bool(self._values)

    def begin(self) -> None:
        """Take copies of the initial state."""
        self._replace([])
        self._replace([(state.shape, _initial(state)) for state in self._states])

    def inputs(self) -> Sequence[HiddenInput]:
        """Return all of them."""
        return [
            (state.tensor, shape, content) for state, (shape, content) in zip(self._states, self._values, strict=True)
        ]

    def layout(self, layout: Layout) -> Layout:
        """Return the same: states are within the frames."""
        return layout

    def keep(self, submission: Submission) -> None:
        """Copy the states out of the answer's frame."""
        (view,) = submission.outputs
        parts = read_frame(view).parts
        found = [parts[state.output] for state in self._states]
        self._replace([(part.shape, bytes(view[part.offset : part.offset + part.size_bytes])) for part in found])

    def close(self) -> None:
        """Forget them."""
        self._replace([])

    def _replace(self, values: list[tuple[tuple[int, ...], bytes]]) -> None:
        size_bytes = sum(len(content) for _, content in values)
        try:
            self._budget.take(size_bytes)
        except PoolExhaustedError as error:
            unavailable(f"Exceeds maximum queue size: {error}")
        self._budget.give_back(self._taken_bytes)
        self._values, self._taken_bytes = values, size_bytes


def _initial(state: StateTensor) -> bytes:
    if state.initial is None:
        unavailable(f"the file with the initial state of '{state.tensor.name}' cannot be read any more")
    return state.initial


@dataclass(frozen=True)
class SequencedCodec:
    """One request's. `codec` knows the hidden inputs; `hidden` are their contents, behind those of the client."""

    codec: Codec
    hidden: tuple[bytes, ...]
    memory: StateMemory | None = None

    def layout(self, contents: Contents) -> Layout:
        """Return what the other codec needs, with states in memory of their own. Raises PoolExhaustedError."""
        layout = self.codec.layout((*contents, *self.hidden))
        return layout if self.memory is None else self.memory.layout(layout)

    def write(self, submission: Submission, contents: Contents) -> None:
        """Write all inputs."""
        self.codec.write(submission, (*contents, *self.hidden))

    def answer(
        self, request_id: bytes, submission: Submission, regions: Mapping[str, Region] = NO_REGIONS
    ) -> bytes | None:
        """Return the response and keep the states; None if there was too little room."""
        response = self.codec.answer(request_id, submission, regions)
        if response is not None and self.memory is not None:
            self.memory.keep(submission)
        return response


def sequenced_codec(
    codec: Codec, hidden: Sequence[HiddenInput], answer_size: AnswerSize, memory: StateMemory | None = None
) -> SequencedCodec:
    """Return a plan's codec with more inputs. `answer_size`: that of the model's answers, if onnxruntime gives them."""
    return SequencedCodec(_with_inputs(codec, hidden, answer_size), tuple(content for _, _, content in hidden), memory)


def _with_inputs(codec: Codec, hidden: Sequence[HiddenInput], answer_size: AnswerSize) -> Codec:
    match codec:
        case ClassifyingCodec():
            return replace(codec, codec=_with_inputs(codec.codec, hidden, answer_size))
        case TensorCodec():
            return replace(codec, places=(*codec.places, *(tensor.index for tensor, _, _ in hidden)))
        case TailCodec():
            answer_size.size_bytes = max(answer_size.size_bytes, codec.answer_size.size_bytes)
            places = (*codec.places, *(tensor.index for tensor, _, _ in hidden))
            return replace(codec, places=places, answer_size=answer_size)
        case FrameCodec():
            answer_size.size_bytes = max(answer_size.size_bytes, codec.answer_size.size_bytes)
            inputs = (*codec.inputs, *(tensor for tensor, _, _ in hidden))
            return replace(
                codec,
                inputs=inputs,
                shapes=(*codec.shapes, *(shape for _, shape, _ in hidden)),
                answer_size=answer_size,
            )
        case _:
            raise TypeError(f"{type(codec).__name__} takes no further inputs")


def control_inputs(tensors: SequenceTensors, step: SequencePosition) -> list[HiddenInput]:
    """Return the control inputs of a request."""
    contents = control_contents(tensors.settings, step)
    return [
        (tensor, tensors.control_shape if tensor.shape else (), content)
        for tensor, content in zip(tensors.controls, contents, strict=True)
    ]


def standalone_codec(codec: Codec, tensors: SequenceTensors, step: SequencePosition) -> Codec:
    """Return the codec of a request that is no part of any sequence: it begins with the initial state, and keeps none.

    Raises ValueError if there is no such state.
    """
    hidden = control_inputs(tensors, step)
    if python_in(codec) is not None:
        return sequenced_python(codec, hidden, step)
    for state in tensors.states:
        if state.initial is None:
            raise ValueError(f"the file with the initial state of '{state.tensor.name}' cannot be read")
        hidden.append((state.tensor, state.shape, state.initial))
    return sequenced_codec(codec, hidden, AnswerSize(0))
