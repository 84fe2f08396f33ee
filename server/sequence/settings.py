"""What a model's configuration says of sequences: `sequence_batching`, read and checked."""

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from gangway.protos.model_config_pb2 import ModelConfig, ModelSequenceBatching
from gangway.server.config_error import ConfigError, shortened
from gangway.server.model_config import datatype_name

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


@dataclass(frozen=True)
class Control:
    """An input that the server fills in. `no` and `yes` are its contents; empty for CORRID, which has the id."""

    name: str
    kind: ControlKind
    datatype: str
    no: bytes = b""
    yes: bytes = b""


@dataclass(frozen=True)
class State:
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


@dataclass(frozen=True)
class SequenceSettings:
    """`slots`: so many sequences have a place at a time, others wait. `idle_us`: a silent sequence ends after that."""

    slots: int
    idle_us: int
    controls: tuple[Control, ...]
    states: tuple[State, ...]

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
    each = batching.oldest.max_candidate_sequences or max(1, config.max_batch_size)
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


def _controls(batching: ModelSequenceBatching) -> Iterator[Control]:
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


def _control(name: str, given: ModelSequenceBatching.Control) -> Control:
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
        return Control(name, kind, datatype)
    if len(choices) != 1:
        raise ConfigError(f"{where}: expected one of int32_false_true, fp32_false_true and bool_false_true")
    field, datatype, form, values = choices[0]
    if len(values) != 2:
        raise ConfigError(f"{where}: {field} has {len(values)} values, expected 2")
    return Control(name, kind, datatype, struct.pack(form, values[0]), struct.pack(form, values[1]))


def _state(given: ModelSequenceBatching.State) -> State:
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
    return State(given.input_name, given.output_name, name, dims, initial_dims, data_file)


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
