"""What the supervisor and a front end say to each other: one JSON object per SOCK_SEQPACKET message.

Supervisor to front end: first every model it knows (`ModelReady` or `ModelUnavailable`), `InitialLoadDone` once each of
them has loaded or failed, changes as they happen (also `VariantReady` and `VariantGone`), and `Drain` at the end. Front
end to supervisor: `Listening` or `BindFailed`, once, and `ShapeWanted`. A later message about the same (name, version)
replaces what was known.
"""

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from gangway.artifact.format import Engine, TensorSpec

MAX_MESSAGE_BYTES = 128 * 1024


@dataclass(frozen=True)
class ModelReady:
    """This version of the model answers requests from now on.

    `config` is the serialised ModelConfig, base64. `inputs`, `outputs`, `batched` and `engine` are the manifest's.
    `max_batch_size` is the config's (0: shapes have no batch dimension of Triton's); `max_rows` is how many rows one
    request may hold. `qos_us` is the resolved latency target. `load_seconds`: compiling and measuring included.
    `weights_bytes`: 0 if onnxruntime has them.
    """

    model_id: int
    name: str
    version: int
    config: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int
    max_rows: int
    batched: bool
    engine: Engine = Engine.NATIVE
    qos_us: float | None = None
    load_seconds: float = 0.0
    weights_bytes: int = 0


@dataclass(frozen=True)
class ModelUnavailable:
    """This version of the model answers no requests. `version` is 0 when the entry has no usable version at all."""

    name: str
    version: int
    reason: str
    state: Literal["LOADING", "UNLOADING", "UNAVAILABLE"] = "UNAVAILABLE"


@dataclass(frozen=True)
class VariantReady:
    """A model that is READY is compiled for these sizes of its symbolic dimensions, under a number of its own.

    `inputs` and `outputs` are those of the compiled model. `sizes` are in the order of `models.open_symbols`.
    """

    model_id: int
    name: str
    version: int
    sizes: tuple[int, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class VariantGone:
    """It is not compiled for these sizes any more."""

    name: str
    version: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class ShapeWanted:
    """From a front end: a request of these sizes was answered by onnxruntime. `oldest`: compiled ones, by last use."""

    name: str
    version: int
    sizes: tuple[int, ...]
    oldest: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class InitialLoadDone:
    """Every model of the repository has been loaded or has failed: ServerReady may answer true."""


@dataclass(frozen=True)
class Drain:
    """Refuse new requests, finish the running ones, then exit with 0."""


@dataclass(frozen=True)
class Listening:
    """The front end accepts connections at `address` ("host:port", the port as bound).

    `metrics_address`: where metrics are served, in the same way; empty if nowhere.
    """

    address: str
    metrics_address: str = ""


@dataclass(frozen=True)
class BindFailed:
    """The front end could not listen and is about to exit with 1."""

    reason: str


FrontEndMessage = (
    ModelReady
    | ModelUnavailable
    | VariantReady
    | VariantGone
    | ShapeWanted
    | InitialLoadDone
    | Drain
    | Listening
    | BindFailed
)
_TYPES: dict[str, type[FrontEndMessage]] = {kind.__name__: kind for kind in FrontEndMessage.__args__}


def to_json(message: FrontEndMessage) -> bytes:
    """Encode a message for one send() on the socket."""
    return json.dumps({"type": type(message).__name__, **asdict(message)}, separators=(",", ":")).encode()


def from_json(data: bytes) -> FrontEndMessage:
    """Decode what to_json made. Raises ValueError for anything else."""
    try:
        content: dict[str, Any] = json.loads(data)
        kind = _TYPES[content.pop("type")]
        for group in {"inputs", "outputs"} & content.keys():
            content[group] = tuple(_tensor(item) for item in content[group])
        for group in {"sizes", "oldest"} & content.keys():
            content[group] = _tuples(content[group])
        if "engine" in content:
            content["engine"] = Engine(content["engine"])
        if content.keys() - {field.name for field in fields(kind)}:
            raise ValueError("unknown fields")
        return kind(**content)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"not a front-end message: {data[:200]!r} ({error})") from error


def _tensor(content: dict[str, Any]) -> TensorSpec:
    return TensorSpec(**{**content, "shape": tuple(content["shape"]), "symbols": tuple(content["symbols"])})


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
