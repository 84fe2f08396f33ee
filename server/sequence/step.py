"""What a request says of its sequence, and what its control inputs are then."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from gangway.executor.frames import join_strings
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import invalid
from gangway.server.sequence.settings import Control, ControlKind, SequenceSettings

ID, START, END = "sequence_id", "sequence_start", "sequence_end"
MAX_ID_BYTES: Final = 1024
ID_KINDS: Final = ("int64_param", "uint64_param", "string_param")
UINT64_MASK: Final = 2**64 - 1  # negative numbers are those that Triton takes them for
_CORRID_FORMS: Final = {"UINT64": "<Q", "INT64": "<q", "UINT32": "<I", "INT32": "<i"}


@dataclass(frozen=True)
class SequenceStep:
    """A request's place in its sequence. `timeout_us`: it waits no longer for a slot; 0: as long as it takes."""

    identity: int | str  # 0 and "" are none
    start: bool
    end: bool
    timeout_us: int = 0

    @property
    def is_unique(self) -> bool:
        """Whether no other request of the sequence is likely to say the same."""
        return self.start or self.end


def step_of(request: pb.ModelInferRequest, timeout_us: int) -> SequenceStep:
    """Read a request's parameters. Raises RequestError (INVALID_ARGUMENT)."""
    return SequenceStep(_identity(request), _flag(request, START), _flag(request, END), timeout_us)


def check_step(step: SequenceStep, settings: SequenceSettings, rows: int, model: str) -> None:
    """Raise RequestError (INVALID_ARGUMENT) if a model with sequences cannot execute such a request."""
    if rows > 1:
        invalid(
            f"inference request to model '{model}' must specify batch-size 1 due to requirements of sequence batcher"
        )
    if not step.identity:
        invalid(f"inference request to model '{model}' must specify a non-zero or non-empty correlation ID")
    for control in settings.controls:
        if control.kind is ControlKind.CORRID:
            _check_corrid(step.identity, control, model)


def control_contents(settings: SequenceSettings, step: SequenceStep) -> Iterator[bytes]:
    """Yield the contents of each control input, in the order of the settings'."""
    said = {ControlKind.START: step.start, ControlKind.END: step.end, ControlKind.READY: True}
    for control in settings.controls:
        if control.kind is not ControlKind.CORRID:
            yield control.yes if said[control.kind] else control.no
        elif control.datatype == "BYTES":
            yield join_strings([str(step.identity)])
        else:
            yield struct.pack(_CORRID_FORMS[control.datatype], step.identity)


def _identity(request: pb.ModelInferRequest) -> int | str:
    """Return the id; 0 without one."""
    if ID not in request.parameters:
        return 0
    choice = request.parameters[ID].WhichOneof("parameter_choice")
    if choice not in ID_KINDS:
        invalid("invalid value type for 'sequence_id' parameter, expected int64_param or string_param.")
    found: int | str = getattr(request.parameters[ID], choice)
    if isinstance(found, int):
        return found & UINT64_MASK
    if len(found.encode()) > MAX_ID_BYTES:
        invalid(f"parameter 'sequence_id' has more than {MAX_ID_BYTES} bytes")
    return found


def _flag(request: pb.ModelInferRequest, name: str) -> bool:
    if name not in request.parameters:
        return False
    if request.parameters[name].WhichOneof("parameter_choice") != "bool_param":
        invalid(f"invalid value type for '{name}' parameter, expected bool_param.")
    return request.parameters[name].bool_param


def _check_corrid(identity: int | str, control: Control, model: str) -> None:
    """Two sequences shall not look the same to the model, so an id is never cut off."""
    if control.datatype == "BYTES":
        return
    where = f"sequence id '{identity}' for model '{model}'"
    if isinstance(identity, str):
        invalid(f"{where} is a string, but control input '{control.name}' is TYPE_{control.datatype}")
    try:
        struct.pack(_CORRID_FORMS[control.datatype], identity)
    except struct.error:
        invalid(f"{where} is too large for control input '{control.name}', which is TYPE_{control.datatype}")
