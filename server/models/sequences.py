"""Sequences of a model: its `sequence_batching`, the inputs and states that no client sends, and a request's
parameters.
"""

import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Final

import msgspec

from gangway.artifact.format import ITEM_BYTES, TensorSpec
from gangway.base.files import file_beside, require_regular
from gangway.executor.frames import join_strings
from gangway.protos import grpc_service_pb2 as pb
from gangway.protos.model_config_pb2 import ModelConfig, ModelSequenceBatching
from gangway.python_backend.elements import split_texts
from gangway.server.errors import ConfigError, invalid, shortened
from gangway.server.models.config_table import concurrency_of
from gangway.server.models.tensors import Tensor, datatype_name

DEFAULT_IDLE_US: Final = 1_000_000
DEFAULT_INSTANCES: Final = 2  # as many as Triton has of an ONNX model on a CPU
MAX_SLOTS: Final = 100_000
CORRID_TYPES: Final = ("UINT64", "INT64", "UINT32", "INT32", "BYTES")
ANY: Final = -1


class ControlKind(IntEnum):
    """What a control input says, by its number in the configuration."""

    START = 0
    READY = 1
    END = 2
    CORRID = 3

    @property
    def text(self) -> str:
        """Return its name in the configuration."""
        return f"CONTROL_SEQUENCE_{self.name}"


class SequenceControl(msgspec.Struct, frozen=True):
    """An input that the server fills in. `no` and `yes` are its contents; empty for CORRID, which has the id."""

    name: str
    kind: ControlKind
    datatype: str
    no: bytes = b""
    yes: bytes = b""


class ImplicitState(msgspec.Struct, frozen=True):
    """An output that is an input of the sequence's next request.

    `dims` are without the batch dimension, -1 is any size; `initial_dims` are those that a sequence begins with.
    `data_file`: what it begins with, in the folder `initial_state` of the model; empty: zeros.
    """

    input_name: str
    output_name: str
    datatype: str
    dims: tuple[int, ...]
    initial_dims: tuple[int, ...]
    data_file: str = ""

    @property
    def initial_elements(self) -> int:
        """Return how many elements a sequence begins with."""
        return math.prod(self.initial_dims)


class SequenceSettings(msgspec.Struct, frozen=True):
    """`slots`: sequences that have a place at a time, others wait. `idle_us`: a silent sequence ends after that."""

    slots: int
    idle_us: int
    controls: tuple[SequenceControl, ...]
    states: tuple[ImplicitState, ...]

    @classmethod
    def of(cls, config: ModelConfig) -> "SequenceSettings | None":
        """Read a configuration; None if it says nothing of sequences. Raises ConfigError."""
        if not config.HasField("sequence_batching"):
            return None
        batching = config.sequence_batching
        if config.response_cache.enable:
            raise ConfigError("response_cache is not possible together with sequence_batching: answers depend on state")
        _check_strategy(batching, config.max_batch_size)
        settings = cls(
            slots=_slots(config),
            idle_us=batching.max_sequence_idle_microseconds or DEFAULT_IDLE_US,
            controls=tuple(_controls(batching)),
            states=tuple(map(_state, batching.state)),
        )
        _require_different(settings.input_names, "sequence_batching: input")
        _require_different([state.output_name for state in settings.states], "sequence_batching: state output")
        return settings

    @property
    def input_names(self) -> tuple[str, ...]:
        """Return the names of the inputs that clients do not send: controls, then states."""
        return (*(control.name for control in self.controls), *(state.input_name for state in self.states))


def complete_sequences(config: ModelConfig) -> None:
    """Fill in what Triton does of `sequence_batching`."""
    if not config.HasField("sequence_batching"):
        return
    batching = config.sequence_batching
    batching.max_sequence_idle_microseconds = batching.max_sequence_idle_microseconds or DEFAULT_IDLE_US
    if batching.HasField("oldest") and not batching.oldest.preferred_batch_size and config.max_batch_size:
        batching.oldest.preferred_batch_size.append(config.max_batch_size)


def hidden_inputs(config: ModelConfig) -> frozenset[str]:
    """Return the names of the inputs that clients do not send. Raises ConfigError."""
    settings = SequenceSettings.of(config)
    return frozenset(settings.input_names) if settings else frozenset()


def hidden_outputs(config: ModelConfig) -> frozenset[str]:
    """Return the names of the outputs that are states: clients get them if the configuration lists them as outputs."""
    settings = SequenceSettings.of(config)
    return frozenset(state.output_name for state in settings.states) if settings else frozenset()


def _slots(config: ModelConfig) -> int:
    batching = config.sequence_batching
    instances = sum(group.count for group in config.instance_group) or DEFAULT_INSTANCES
    each = batching.oldest.max_candidate_sequences or max(1, config.max_batch_size, concurrency_of(config))
    if instances * each > MAX_SLOTS:
        raise ConfigError(
            f"sequence_batching: {instances * each} sequences at a time, at most {MAX_SLOTS} are possible"
        )
    return instances * each


def _check_strategy(batching: ModelSequenceBatching, max_batch_size: int) -> None:
    oldest = batching.oldest
    if oldest.max_candidate_sequences < 0:
        count = oldest.max_candidate_sequences
        raise ConfigError(f"sequence_batching.oldest.max_candidate_sequences is {count}, expected 0 or more")
    for size in oldest.preferred_batch_size:
        if size <= 0 or (max_batch_size and size > max_batch_size):
            raise ConfigError(
                f"sequence_batching.oldest.preferred_batch_size: expected 1 to max_batch_size, got {size}"
            )


def _controls(batching: ModelSequenceBatching) -> Iterator[SequenceControl]:
    seen: set[ControlKind] = set()
    for given in batching.control_input:
        name = shortened(given.name)
        if not given.name or "\0" in given.name:
            raise ConfigError("sequence_batching: a control input has no name")
        if len(given.control) != 1:
            raise ConfigError(
                f"sequence_batching: control input '{name}' has {len(given.control)} controls, expected 1"
            )
        control = _control(given.name, given.control[0])
        if control.kind in seen:
            raise ConfigError(f"sequence_batching: more than one input for {control.kind.text}")
        seen.add(control.kind)
        yield control


def _control(name: str, given: ModelSequenceBatching.Control) -> SequenceControl:
    where = f"sequence_batching: control input '{shortened(name)}'"
    kind = ControlKind(given.kind)
    possible: tuple[tuple[str, str, str, tuple[float, ...]], ...] = (
        ("int32_false_true", "INT32", "<i", tuple(given.int32_false_true)),
        ("fp32_false_true", "FP32", "<f", tuple(given.fp32_false_true)),
        ("bool_false_true", "BOOL", "<?", tuple(given.bool_false_true)),
    )
    choices = [choice for choice in possible if choice[3]]
    if kind is ControlKind.CORRID:
        datatype = datatype_name(given.data_type)
        if choices:
            raise ConfigError(f"{where}: {choices[0][0]} is not for {kind.text}")
        if datatype not in CORRID_TYPES:
            raise ConfigError(f"{where}: data_type is TYPE_{datatype}, expected UINT64, INT64, UINT32, INT32 or STRING")
        return SequenceControl(name, kind, datatype)
    if len(choices) != 1:
        raise ConfigError(f"{where}: expected one of int32_false_true, fp32_false_true and bool_false_true")
    field, datatype, form, values = choices[0]
    if len(values) != 2:
        raise ConfigError(f"{where}: {field} has {len(values)} values, expected 2")
    return SequenceControl(name, kind, datatype, struct.pack(form, values[0]), struct.pack(form, values[1]))


def _state(given: ModelSequenceBatching.State) -> ImplicitState:
    where = f"sequence_batching: state '{shortened(given.input_name)}'"
    if not given.input_name or not given.output_name or "\0" in given.input_name + given.output_name:
        raise ConfigError(f"{where}: expected input_name and output_name")
    if not given.data_type:
        raise ConfigError(f"{where} has no data_type")
    dims = tuple(given.dims)
    if min(dims, default=1) < ANY or 0 in dims:
        raise ConfigError(f"{where}: dims are {list(dims)}, expected sizes, or -1 for any size")
    if len(given.initial_state) > 1:
        raise ConfigError(f"{where} has {len(given.initial_state)} initial states, expected one at most")
    initial_dims, data_file = tuple(1 if size == ANY else size for size in dims), ""
    for initial in given.initial_state:
        initial_dims, data_file = _initial(initial, dims, given.data_type, where)
    name = datatype_name(given.data_type)
    return ImplicitState(given.input_name, given.output_name, name, dims, initial_dims, data_file)


def _initial(
    given: ModelSequenceBatching.InitialState, dims: tuple[int, ...], data_type: int, where: str
) -> tuple[tuple[int, ...], str]:
    """Return dims and data file of an initial state."""
    own = tuple(given.dims)
    if not given.name:
        raise ConfigError(f"{where}: its initial_state has no name")
    if given.data_type != data_type:
        raise ConfigError(f"{where}: its initial_state has another data_type")
    if not fits(own, dims) or min(own, default=1) < 1:
        raise ConfigError(f"{where}: its initial_state has dims {list(own)}, which do not fit {list(dims)}")
    if given.WhichOneof("state_data") is None:
        raise ConfigError(f"{where}: its initial_state has neither zero_data nor data_file")
    if given.WhichOneof("state_data") == "data_file" and not given.data_file:
        raise ConfigError(f"{where}: its initial_state has an empty data_file")
    return own, given.data_file


def fits(dims: Sequence[int], pattern: Sequence[int]) -> bool:
    """Whether dims are of this pattern, in which -1 is any size."""
    return len(dims) == len(pattern) and all(
        expected in (ANY, size) for size, expected in zip(dims, pattern, strict=True)
    )


def _require_different(names: Iterable[str], what: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigError(f"{what} '{shortened(name)}' is named twice")
        seen.add(name)


FOLDER: Final = "initial_state"  # in the model's folder: what `data_file` names
MAX_STATE_BYTES: Final = 256 << 20  # as much as one message may have


class StateTensor(msgspec.Struct, frozen=True):
    """A state: the input, the place of the output in the model, and what a sequence begins with.

    `shape` is that of the beginning, as the model gets it. `initial` None: the file has gone.
    """

    tensor: Tensor
    output: int
    shape: tuple[int, ...]
    initial: bytes | None


class SequenceTensors(msgspec.Struct, frozen=True):
    """What of a model with sequences no client sees: inputs for controls and states, and what states begin with.

    `controls` are in the order of the settings', `control_shape` is their shape, but of scalars.
    """

    settings: SequenceSettings
    controls: tuple[Tensor, ...]
    control_shape: tuple[int, ...]
    states: tuple[StateTensor, ...]

    @classmethod
    def of(
        cls, config: ModelConfig, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], files: Mapping[str, str]
    ) -> "SequenceTensors | None":
        """Return those of a model with this signature; None if it has no sequences. `files`: by input."""
        settings = SequenceSettings.of(config)
        if settings is None:
            return None
        batch = config.max_batch_size > 0
        places = {spec.name: index for index, spec in enumerate(inputs)}
        results = {spec.name: index for index, spec in enumerate(outputs)}
        scalars = {spec.name for spec in inputs if not spec.shape}

        def tensor_of(name: str, datatype: str, dims: tuple[int, ...]) -> Tensor:
            shape = () if name in scalars else _shape(batch, dims)
            return Tensor(name, datatype, shape, places[name], own_shape=None if shape else ())

        controls = tuple(tensor_of(control.name, control.datatype, (1,)) for control in settings.controls)
        states = tuple(
            StateTensor(
                tensor_of(state.input_name, state.datatype, state.initial_dims),
                results[state.output_name],
                () if state.input_name in scalars else (1,) * batch + state.initial_dims,
                _contents(state, files.get(state.input_name)),
            )
            for state in settings.states
        )
        return cls(settings, controls, (1, 1) if batch else (1,), states)

    @property
    def hidden(self) -> tuple[Tensor, ...]:
        """Return all inputs that clients do not send."""
        return (*self.controls, *(state.tensor for state in self.states))


def check_hidden(config: ModelConfig, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
    """Compare controls and states with the model's signature. Raises ConfigError."""
    settings = SequenceSettings.of(config)
    if settings is None:
        return
    batch = config.max_batch_size > 0
    listed = {tensor.name for tensor in config.input}
    known, results = {spec.name: spec for spec in inputs}, {spec.name: spec for spec in outputs}
    for name in settings.input_names:
        if name in listed:
            raise ConfigError(f"input '{shortened(name)}' is one of sequence_batching, too: clients cannot send it")
    for control in settings.controls:
        where = f"sequence_batching: control input '{shortened(control.name)}'"
        spec = _find(known, control.name, control.datatype, where)
        if spec.shape and (dims := spec.shape[batch:]) not in ((1,), (ANY,)):
            raise ConfigError(f"{where} has dims {list(dims)} in the ONNX model, expected [1]")
    for state in settings.states:
        where = f"sequence_batching: state '{shortened(state.input_name)}'"
        _check_dims(state, _find(known, state.input_name, state.datatype, where), batch, where)
        where = f"sequence_batching: state '{shortened(state.output_name)}'"
        _check_dims(state, _find(results, state.output_name, state.datatype, where), batch, where)
    sizes = (state.initial_elements * (ITEM_BYTES[state.datatype] or 4) for state in settings.states)
    if sum(sizes) > MAX_STATE_BYTES:
        raise ConfigError(f"sequence_batching: the states of a sequence have more than {MAX_STATE_BYTES} bytes")


def initial_state_files(folder: Path, config: ModelConfig) -> dict[str, str]:
    """Return the file of each state that begins with one, by input; `folder` is the model's. Raises ConfigError."""
    settings = SequenceSettings.of(config)
    files = {}
    for state in settings.states if settings else ():
        if state.data_file:
            where = (
                f"sequence_batching: state '{shortened(state.input_name)}': data_file '{shortened(state.data_file)}'"
            )
            try:
                path = file_beside(folder / FOLDER, state.data_file)
                _read(state, path)
            except (OSError, ValueError) as error:
                raise ConfigError(f"{where} cannot be used: {error}") from error
            files[state.input_name] = str(path)
    return files


def _contents(state: ImplicitState, file: str | None) -> bytes | None:
    """Return what a state begins with; None if its file cannot be used any more."""
    if file is not None:
        try:
            return _read(state, Path(file))
        except (OSError, ValueError):
            return None
    item_bytes = ITEM_BYTES[state.datatype]
    return bytes(state.initial_elements * item_bytes) if item_bytes else join_strings([b""] * state.initial_elements)


def _read(state: ImplicitState, path: Path) -> bytes:
    """Return the contents in a file, which may be longer than the state, as in Triton. Raises OSError or ValueError."""
    require_regular(path)
    if path.stat().st_size > MAX_STATE_BYTES:
        raise ValueError(f"it has more than {MAX_STATE_BYTES} bytes")
    content = path.read_bytes()
    if state.datatype == "BYTES":
        split_texts(content, state.initial_elements)
        return content
    expected = state.initial_elements * ITEM_BYTES[state.datatype]
    if len(content) < expected:
        raise ValueError(f"expected {expected} bytes, got {len(content)}")
    return content[:expected]


def _find(specs: Mapping[str, TensorSpec], name: str, datatype: str, where: str) -> TensorSpec:
    spec = specs.get(name)
    if spec is None:
        raise ConfigError(f"{where} is not in the ONNX model, which has {', '.join(map(repr, specs))}")
    if spec.datatype != datatype:
        raise ConfigError(f"{where} is TYPE_{datatype}, but the ONNX model has TYPE_{spec.datatype}")
    return spec


def _check_dims(state: ImplicitState, spec: TensorSpec, batch: bool, where: str) -> None:
    shape = spec.shape[batch:]
    if not (fits(state.dims, shape) or (not spec.shape and set(state.dims) == {1})):
        raise ConfigError(
            f"{where}: dims are {list(state.dims)}, but the ONNX model has {list(shape)}"
            " (with max_batch_size > 0 the batch dimension is left out of both)"
        )


def _shape(batch: bool, dims: tuple[int, ...]) -> tuple[int, ...]:
    return (ANY, *dims) if batch else dims


SEQUENCE_PARAMETERS = ID, START, END = "sequence_id", "sequence_start", "sequence_end"
MAX_ID_BYTES: Final = 1024
ID_KINDS: Final = ("int64_param", "uint64_param", "string_param")
UINT64_MASK: Final = 2**64 - 1  # negative numbers are those that Triton takes them for
_CORRID_FORMS: Final = {"UINT64": "<Q", "INT64": "<q", "UINT32": "<I", "INT32": "<i"}


class SequencePosition(msgspec.Struct, frozen=True):
    """A request's place in its sequence. `timeout_us`: it waits no longer for a slot; 0: as long as it takes."""

    identity: int | str  # 0 and "" are none
    start: bool
    end: bool
    timeout_us: int = 0

    @property
    def is_unique(self) -> bool:
        """Whether no other request of the sequence is likely to say the same."""
        return self.start or self.end


def position_of(request: pb.ModelInferRequest, timeout_us: int) -> SequencePosition:
    """Read a request's parameters. Raises RequestError (INVALID_ARGUMENT)."""
    return SequencePosition(_identity(request), _flag(request, START), _flag(request, END), timeout_us)


def check_position(step: SequencePosition, settings: SequenceSettings, rows: int, model: str) -> None:
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


def control_contents(settings: SequenceSettings, step: SequencePosition) -> Iterator[bytes]:
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


def _check_corrid(identity: int | str, control: SequenceControl, model: str) -> None:
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
