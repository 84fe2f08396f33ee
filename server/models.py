"""The models a front end serves: what it was told by the supervisor, ready for looking up and for checking requests."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field

import grpc
from gangway.protos.model_config_pb2 import ModelConfig, ModelInput, ModelOutput
from gangway.server.data_plane import TensorLayout
from gangway.server.errors import RequestError, invalid, unavailable
from gangway.server.front_end_messages import ModelReady, ModelUnavailable
from gangway.server.model_config import datatype_name
from gangway.server.statistics import Statistics


@dataclass(frozen=True)
class Tensor:
    """An input or output as clients see it. `index` is its place in the compiled model, -1 in `shape` is any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    index: int
    row_bytes: int


@dataclass(frozen=True)
class ServedModel:
    """One version of a model that answers requests. `batched`: the first dimension of every tensor counts rows."""

    name: str
    version: int
    config: ModelConfig
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    layout: TensorLayout
    batched: bool
    max_batch_size: int
    max_rows: int
    statistics: Statistics = field(default_factory=Statistics)

    @classmethod
    def of(cls, message: ModelReady) -> "ServedModel":
        """Return the model that the supervisor has announced."""
        config = ModelConfig.FromString(base64.b64decode(message.config))
        inputs = {spec.name: (index, spec.row_bytes) for index, spec in enumerate(message.inputs)}
        outputs = {spec.name: (index, spec.row_bytes) for index, spec in enumerate(message.outputs)}
        return cls(
            message.name,
            message.version,
            config,
            {tensor.name: _tensor(tensor, config.max_batch_size > 0, *inputs[tensor.name]) for tensor in config.input},
            {
                tensor.name: _tensor(tensor, config.max_batch_size > 0, *outputs[tensor.name])
                for tensor in config.output
            },
            TensorLayout.of(message.model_id, message.inputs, message.outputs),
            any(spec.shape[:1] == (-1,) for spec in message.inputs),
            message.max_batch_size,
            message.max_rows,
        )


def _tensor(tensor: ModelInput | ModelOutput, add_batch: bool, index: int, row_bytes: int) -> Tensor:
    shape = (-1, *tensor.dims) if add_batch else tuple(tensor.dims)
    return Tensor(tensor.name, datatype_name(tensor.data_type), shape, index, row_bytes)


@dataclass(frozen=True)
class Models:
    """Everything the supervisor has said so far, by name and version; never changed, but replaced as a whole."""

    entries: Mapping[tuple[str, int], ServedModel | ModelUnavailable] = field(default_factory=dict)

    def updated(self, message: ModelReady | ModelUnavailable) -> "Models":
        """Return the set after one more message. News of a version ends what was said about the model as a whole."""
        entries = {key: entry for key, entry in self.entries.items() if key != (message.name, 0)}
        entries[message.name, message.version] = ServedModel.of(message) if isinstance(message, ModelReady) else message
        return Models(dict(sorted(entries.items())))

    @property
    def all_ready(self) -> bool:
        """Whether every model of the repository can be used."""
        return all(isinstance(entry, ServedModel) for entry in self.entries.values())

    def served(self, name: str = "") -> list[ServedModel]:
        """Return the usable versions of one model or of all, ascending."""
        found = [entry for entry in self.entries.values() if isinstance(entry, ServedModel)]
        return [model for model in found if name in ("", model.name)]

    def find(self, name: str, version: str) -> ServedModel:
        """Return the model; an empty version means the highest one that is usable.

        Raises RequestError: NOT_FOUND if there is no such model or version, UNAVAILABLE if it is not ready.
        """
        number = parse_version(version)
        known = {key[1]: entry for key, entry in self.entries.items() if key[0] == name}
        if not known:
            raise RequestError(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{name}' is not found")
        if number is None:
            usable = [entry for entry in known.values() if isinstance(entry, ServedModel)]
            entry = usable[-1] if usable else known[max(known)]
        elif number in known:
            entry = known[number]
        else:
            message = f"Request for unknown model: '{name}' version {number} is not found"
            raise RequestError(grpc.StatusCode.NOT_FOUND, message)
        if isinstance(entry, ModelUnavailable):
            unavailable(f"model '{name}' version {entry.version} is not at ready state: {entry.reason}")
        return entry


def parse_version(text: str) -> int | None:
    """Return the version a client asks for, None for the highest. Raises RequestError."""
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        invalid(f"failed to get model version from specified version string '{text}': expected a positive number")
    return int(text)
