"""How a request of a sequence is carried out: with inputs that the client does not send, and states to be kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gangway.server.calls import Call, Contents, FrameCall, Room, TensorCall
from gangway.server.classification import ClassifyingCall
from gangway.server.data_plane import Request
from gangway.server.layouts import Layout
from gangway.server.regions import NO_REGIONS, Region
from gangway.server.sequence.memory import Sent, StateMemory
from gangway.server.sequence.step import SequenceStep, control_contents
from gangway.server.sequence.tensors import SequenceTensors


@dataclass(frozen=True)
class SequencedCall:
    """One request's. `call` knows the hidden inputs; `hidden` are their contents, behind those of the client."""

    call: Call
    hidden: tuple[bytes, ...]
    memory: StateMemory | None = None

    def layout(self, contents: Contents) -> Layout:
        """Return what the other call needs, with states in memory of their own. Raises PoolExhaustedError."""
        layout = self.call.layout((*contents, *self.hidden))
        return layout if self.memory is None else self.memory.layout(layout)

    def write(self, request: Request, contents: Contents) -> None:
        """Write all inputs."""
        self.call.write(request, (*contents, *self.hidden))

    def answer(self, request_id: bytes, request: Request, regions: Mapping[str, Region] = NO_REGIONS) -> bytes | None:
        """Return the response and keep the states; None if there was too little room."""
        response = self.call.answer(request_id, request, regions)
        if response is not None and self.memory is not None:
            self.memory.keep(request)
        return response


def sequenced(call: Call, hidden: Sequence[Sent], room: Room, memory: StateMemory | None = None) -> SequencedCall:
    """Return a plan's call with more inputs. `room`: that of the model's answers, if onnxruntime gives them."""
    return SequencedCall(_with_inputs(call, hidden, room), tuple(content for _, _, content in hidden), memory)


def _with_inputs(call: Call, hidden: Sequence[Sent], room: Room) -> Call:
    match call:
        case ClassifyingCall():
            return replace(call, call=_with_inputs(call.call, hidden, room))
        case TensorCall():
            return replace(call, places=(*call.places, *(tensor.index for tensor, _, _ in hidden)))
        case FrameCall():
            room.size_bytes = max(room.size_bytes, call.room.size_bytes)
            inputs = (*call.inputs, *(tensor for tensor, _, _ in hidden))
            return replace(call, inputs=inputs, shapes=(*call.shapes, *(shape for _, shape, _ in hidden)), room=room)
        case _:
            raise TypeError(f"{type(call).__name__} takes no further inputs")


def controls(tensors: SequenceTensors, step: SequenceStep) -> list[Sent]:
    """Return the control inputs of a request."""
    contents = control_contents(tensors.settings, step)
    return [
        (tensor, tensors.control_shape, content) for tensor, content in zip(tensors.controls, contents, strict=True)
    ]


def alone(call: Call, tensors: SequenceTensors, step: SequenceStep) -> SequencedCall:
    """Return the call of a request that is no part of any sequence: it begins with the initial state, and keeps none.

    Raises ValueError if there is no such state.
    """
    hidden = controls(tensors, step)
    for state in tensors.states:
        if state.initial is None:
            raise ValueError(f"the file with the initial state of '{state.tensor.name}' cannot be read")
        hidden.append((state.tensor, state.shape, state.initial))
    return sequenced(call, hidden, Room(0))
