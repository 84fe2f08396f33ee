"""What of a model with sequences no client sees: inputs for controls and states, and what states begin with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gangway.artifact.files import file_beside, require_regular
from gangway.artifact.format import TensorSpec
from gangway.artifact.item_bytes import ITEM_BYTES
from gangway.executor.frames import join_strings, split_strings
from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.config_error import ConfigError, shortened
from gangway.server.sequence.settings import ANY, SequenceSettings, State, fits
from gangway.server.tensor import Tensor

FOLDER: Final = "initial_state"  # in the model's folder: what `data_file` names
MAX_STATE_BYTES: Final = 256 << 20  # as much as one message may have


@dataclass(frozen=True)
class StateTensor:
    """A state: the input, the place of the output in the model, and what a sequence begins with.

    `shape` is that of the beginning, as the model gets it. `initial` None: the file has gone.
    """

    tensor: Tensor
    output: int
    shape: tuple[int, ...]
    initial: bytes | None


@dataclass(frozen=True)
class SequenceTensors:
    """The hidden tensors of one model. `controls` are in the order of the settings', `control_shape` is their shape."""

    settings: SequenceSettings
    controls: tuple[Tensor, ...]
    control_shape: tuple[int, ...]
    states: tuple[StateTensor, ...]

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        files: Mapping[str, str],
    ) -> "SequenceTensors | None":
        """Return those of a model with this signature; None if it has no sequences. `files`: by input."""
        settings = SequenceSettings.of(config)
        if settings is None:
            return None
        batch = config.max_batch_size > 0
        places = {spec.name: index for index, spec in enumerate(inputs)}
        results = {spec.name: index for index, spec in enumerate(outputs)}
        controls = tuple(
            Tensor(control.name, control.datatype, _shape(batch, (1,)), places[control.name])
            for control in settings.controls
        )
        states = tuple(
            StateTensor(
                Tensor(state.input_name, state.datatype, _shape(batch, state.initial_dims), places[state.input_name]),
                results[state.output_name],
                (1, *state.initial_dims) if batch else state.initial_dims,
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
        if (dims := spec.shape[batch:]) not in ((1,), (ANY,)):
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


def _contents(state: State, file: str | None) -> bytes | None:
    """Return what a state begins with; None if its file cannot be used any more."""
    if file is not None:
        try:
            return _read(state, Path(file))
        except (OSError, ValueError):
            return None
    item_bytes = ITEM_BYTES[state.datatype]
    return bytes(state.initial_elements * item_bytes) if item_bytes else join_strings([b""] * state.initial_elements)


def _read(state: State, path: Path) -> bytes:
    """Return the contents in a file, which may be longer than the state, as in Triton. Raises OSError or ValueError."""
    require_regular(path)
    if path.stat().st_size > MAX_STATE_BYTES:
        raise ValueError(f"it has more than {MAX_STATE_BYTES} bytes")
    content = path.read_bytes()
    if state.datatype == "BYTES":
        split_strings(content, state.initial_elements)
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


def _check_dims(state: State, spec: TensorSpec, batch: bool, where: str) -> None:
    shape = spec.shape[batch:]
    if not fits(state.dims, shape):
        raise ConfigError(
            f"{where}: dims are {list(state.dims)}, but the ONNX model has {list(shape)}"
            " (with max_batch_size > 0 the batch dimension is left out of both)"
        )


def _shape(batch: bool, dims: tuple[int, ...]) -> tuple[int, ...]:
    return (ANY, *dims) if batch else dims
