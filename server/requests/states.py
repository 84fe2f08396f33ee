"""What goes with a request of a sequence: inputs that the client does not send, and states that are kept."""

import threading
from collections.abc import Sequence

from gangway.executor.frames import read_frame
from gangway.server.errors import unavailable
from gangway.server.models.sequences import SequencePosition, SequenceTensors, StateTensor, control_contents
from gangway.server.requests.codecs import AnswerSize, Codec, HiddenInput
from gangway.server.requests.data_plane import (
    NO_EXTERNAL,
    DataPlane,
    ExternalTensors,
    HeldTensors,
    PoolExhaustedError,
    RequestLayout,
    Submission,
    TensorBlock,
    total_bytes,
)
from gangway.server.requests.python_codec import PythonCodec, sequenced_python


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


class HeldStates:
    """States of a compiled model, in two blocks of shared memory: a request reads one and writes the other, then they
    swap.

    So a request that fails, or is executed again because a worker has died, finds the state as it was. A block that
    ranks may still touch, because its request was given up while it ran, is not written again. It is dropped, and the
    data plane frees it when they have left.
    """

    def __init__(
        self, plane: DataPlane, budget: StateBudget, layout: RequestLayout, states: tuple[StateTensor, ...]
    ) -> None:
        """Make it for the layout of a model and its states; `begin` is to follow."""
        self._plane = plane
        self._budget = budget
        self._states = states
        self._sizes = [layout.input_bytes[state.tensor.index] for state in states]
        self._current: TensorBlock | None = None
        self._other: TensorBlock | None = None  # what the next request writes

    @property
    def has_begun(self) -> bool:
        """Whether there is a block to read."""
        return self._current is not None

    def begin(self) -> None:
        """Write the initial state into the block that the next request reads."""
        if self._current is None or self._current.holders > 1:
            self._drop(self._current)
            self._current = None
            self._current = self._hold()
        for state, place in zip(self._states, self._current.places(self._sizes), strict=True):
            self._plane.view(place)[:] = _initial(state)

    def inputs(self) -> Sequence[HiddenInput]:
        """None: they are where they are."""
        return ()

    def tensors(self) -> HeldTensors:
        """Return them: a request reads one block and writes the other."""
        assert self._current is not None, "begun"
        if self._other is not None and self._other.holders > 1:
            self._drop(self._other)
            self._other = None
        if self._other is None:
            self._other = self._hold()
        inputs, outputs = self._current.places(self._sizes), self._other.places(self._sizes)
        return HeldTensors(
            self._plane,
            {state.tensor.index: place for state, place in zip(self._states, inputs, strict=True)},
            {state.output: place for state, place in zip(self._states, outputs, strict=True)},
        )

    def keep(self, submission: Submission) -> None:
        """What was written is read next."""
        self._current, self._other = self._other, self._current

    def close(self) -> None:
        """Drop both blocks."""
        self._drop(self._current)
        self._drop(self._other)
        self._current = self._other = None

    def _hold(self) -> TensorBlock:
        size_bytes = total_bytes(self._sizes)
        try:
            self._budget.take(size_bytes)
            try:
                return self._plane.take(size_bytes)
            except PoolExhaustedError:
                self._budget.give_back(size_bytes)
                raise
        except PoolExhaustedError as error:
            unavailable(f"Exceeds maximum queue size: {error}")

    def _drop(self, block: TensorBlock | None) -> None:
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

    def tensors(self) -> ExternalTensors:
        """None: states are within the frames."""
        return NO_EXTERNAL

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
    if isinstance(codec, PythonCodec):
        return sequenced_python(codec, hidden, step)
    for state in tensors.states:
        if state.initial is None:
            raise ValueError(f"the file with the initial state of '{state.tensor.name}' cannot be read")
        hidden.append((state.tensor, state.shape, state.initial))
    return codec.sequenced(hidden, AnswerSize(0))
