"""What the supervisor and a front end say to each other: one JSON object per SOCK_SEQPACKET message.

The supervisor first tells a front end every model it knows (`ModelReady` or `ModelUnavailable`); `AllKnown` ends that,
and the front end listens. `InitialLoadDone` follows once each model has loaded or failed. Later come changes (also
`ModelRemoved`, `ModelPresence`, `ModelIdleness`, `ModelTarget`, `VariantReady`, `VariantGone`, `JobsUnderWay`,
`StartUnderWay`),
answers to `RepositoryCall`, `InstanceAttended`, and at the end `Leave` and `Drain`.
A front end sends `Listening` or `BindFailed` once, then `ShapeWanted`, `FirstAnswer`, `RepositoryCall` and
`ModelRetired`. A later message about the same (name, version) replaces what was known.

Regions of shared memory and settings of log and traces change in all front ends (`supervisor/front_ends.py`). The one
that is asked for a change proposes it to the supervisor. The supervisor has all of them make the change, and settles it
with the one that asked. A successor gets agreed changes before anything else.
"""

import socket
import zlib
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from gangway.artifact.format import Engine, TensorSpec, open_symbols
from gangway.base import json_codec
from gangway.base.logs import LogLevels
from gangway.base.peer import Peer
from gangway.server.tracing.settings import TraceOverrides

OK = "OK"  # the name of a gRPC status
UNLOADED = "unloaded"  # the reason, or its beginning, for a model that is not there on purpose
DUPLICATE = "model appears in two or more repositories"  # Triton's words, on which clients may depend
WHOLE_MODEL = -1  # in place of a version: what is said concerns the model, which has no usable version at all
PACKED_BYTES: Final = 32 * 1024
MAX_TEXT_BYTES: Final = 16 << 20  # of one message

MAX_VERSION = (1 << 63) - 1  # as in Triton
FORMATS: Final = ("default", "ISO8601", "json")  # of the log's lines
MAX_VERBOSE: Final = 2**31 - 1
CallKind = Literal["index", "load", "unload"]
Compounds = tuple[tuple[int, tuple[int, ...]], ...]  # (number of a schedule, models by stream)


@dataclass(frozen=True)
class ModelReady:
    """This version of the model answers requests from now on.

    `config` is the serialised ModelConfig. `inputs`, `outputs` and `engine` are the manifest's. `batched`: the
    first dimension of every tensor counts rows (`counts_rows` in `repository/loader.py`).
    `max_batch_size` is the config's (0: shapes have no batch dimension of Triton's); `max_rows` is how many rows one
    request may hold. `qos_us` is the resolved latency target. `load_seconds`: compiling and measuring included.
    `weights_bytes`: those that all workers map. `labels`: (output, file with the names of its classes). `isolated_us`:
    first task to last of one row, alone on all cores; 0: not known. An ensemble has a `model_id` that only supervisor
    and front end know. `statistics_row`: where it is counted (`statistics.py`); -1: in each front end's own memory.
    `initial_states`: (input, file with what it has at the start of a sequence). `tail`: the manifest's. `compounds`:
    groups of an ensemble's steps that run by a schedule. `chooses_precision`: requests may be computed in fp32 or in
    bf16, and responses say which. `tokenizer`: the file of a model that gives embeddings of texts. `has_is_ready`:
    model.py says whether the model is ready.
    """

    model_id: int
    name: str
    version: int
    config: bytes
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int
    max_rows: int
    batched: bool
    engine: Engine = Engine.NATIVE
    qos_us: float | None = None
    load_seconds: float = 0.0
    weights_bytes: int = 0
    labels: tuple[tuple[str, str], ...] = ()
    isolated_us: float = 0.0
    initial_states: tuple[tuple[str, str], ...] = ()
    statistics_row: int = -1
    tail: bool = False
    compounds: Compounds = ()
    chooses_precision: bool = False
    tokenizer: str = ""
    has_is_ready: bool = False

    @property
    def symbols(self) -> tuple[str, ...]:
        """The names of its symbolic dimensions, see `open_symbols`."""
        return open_symbols(self.inputs, self.batched)


class ModelUnavailable(msgspec.Struct, frozen=True, tag=True):
    """This version of the model answers no requests. `version` may be WHOLE_MODEL.

    UNKNOWN: the repository has it, and no client has asked for it. `at_fault`: its requests ended worker processes.
    """

    name: str
    version: int
    reason: str
    state: Literal["LOADING", "UNLOADING", "UNAVAILABLE", "UNKNOWN"] = "UNAVAILABLE"
    at_fault: bool = False

    @property
    def is_missed(self) -> bool:
        """Whether it should be ready: it is wanted, not unloaded, and the only one of its name."""
        wanted = self.reason != DUPLICATE and not self.reason.startswith(UNLOADED)
        return self.state == "LOADING" or (self.state == "UNAVAILABLE" and wanted)


class ModelRemoved(msgspec.Struct, frozen=True, tag=True):
    """The repository does not have this entry any more (WHOLE_MODEL: the one that stood for no version)."""

    name: str
    version: int


def is_of_use(message: ModelReady | ModelUnavailable | ModelRemoved) -> bool:
    """Whether news are of a version that is served, or should be: they end what was said about the model as a whole."""
    is_wanted = isinstance(message, ModelReady) or (isinstance(message, ModelUnavailable) and message.is_missed)
    return is_wanted and message.version != WHOLE_MODEL


class ModelPresence(msgspec.Struct, frozen=True, tag=True):
    """Whether anybody can answer for a Python model with this number. `reason`: why not; empty: somebody can.

    It is told when that changes, and stays READY in all other respects.
    """

    model_id: int
    reason: str


class ModelIdleness(msgspec.Struct, frozen=True, tag=True):
    """Whether workers have given back the memory of the model with this number, until its next request.

    It is told when that changes, and stays READY.
    """

    model_id: int
    is_idle: bool


class InstanceAttended(msgspec.Struct, frozen=True, tag=True):
    """The front end is to execute what the model of the instance at this address asks for while it has no request."""

    address: str


class ModelRetired(msgspec.Struct, frozen=True, tag=True):
    """From a front end: no request uses this number any more, in the place of which it serves another one, or none."""

    model_id: int


class ModelTarget(msgspec.Struct, frozen=True, tag=True):
    """A model that is READY has another latency target from now on. All fields are as in ModelReady."""

    model_id: int
    name: str
    version: int
    config: bytes
    qos_us: float | None
    isolated_us: float


class VariantSizes(msgspec.Struct, frozen=True):
    """One of the sizes for which a variant is compiled, and the shapes of inputs and outputs then."""

    sizes: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]


class VariantReady(msgspec.Struct, frozen=True, tag=True):
    """A model that is READY is compiled for these sizes of its symbolic dimensions, under a number of its own.

    `inputs`, `outputs` and `tail` are those of the compiled model, which computes up to `max_rows` rows. `sizes` are in
    the order of `ModelReady.symbols`. `qos_us`: the latency target of these sizes; None: the model's. `instances`: all
    sizes for which it is compiled, in the artifact's order; empty: only these.
    """

    model_id: int
    name: str
    version: int
    sizes: tuple[int, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_rows: int
    qos_us: float | None = None
    tail: bool = False
    instances: tuple[VariantSizes, ...] = ()


class VariantGone(msgspec.Struct, frozen=True, tag=True):
    """The variant that was announced with these sizes is there no more."""

    name: str
    version: int
    sizes: tuple[int, ...]


class ShapeWanted(msgspec.Struct, frozen=True, tag=True):
    """From a front end: a request of these sizes was answered by onnxruntime. `oldest`: variants, by last use."""

    name: str
    version: int
    sizes: tuple[int, ...]
    oldest: tuple[tuple[int, ...], ...]


class FirstAnswer(msgspec.Struct, frozen=True, tag=True):
    """From a front end: a request was answered by a model whose `isolated_us` is not known.

    `row_us`: first task to last, divided by the rows that were computed together.
    """

    model_id: int
    name: str
    version: int
    row_us: float


class InitialLoadDone(msgspec.Struct, frozen=True, tag=True):
    """Every model that is to be served from the start has been loaded or has failed: ServerReady may answer true.

    It does so only while every model is ready, if readiness is strict.
    """

    strict_readiness: bool = True


class RepositoryCall(msgspec.Struct, frozen=True, tag=True):
    """From a front end: what a client asks of the repository. Answered by a RepositoryAnswer with this number.

    `path`: a file with the client's message (RepositoryModelLoadRequest), there until the answer has come; empty: there
    is nothing but the name. `dependents`: unload what was loaded along with the model, too.
    """

    number: int
    kind: CallKind
    name: str
    path: str
    dependents: bool = False


class RepositoryAnswer(msgspec.Struct, frozen=True, tag=True):
    """`code` is the name of a gRPC status. What has been announced before the answer is known before it."""

    number: int
    code: str = "OK"
    message: str = ""


class ReadinessAsked(msgspec.Struct, frozen=True, tag=True):
    """From a front end: whether the instances of a Python model with `has_is_ready` say that it is ready."""

    number: int
    model_id: int


class ReadinessTold(msgspec.Struct, frozen=True, tag=True):
    """The answer to a ReadinessAsked with this number. `code`: OK, or UNAVAILABLE: it is not ready."""

    number: int
    code: str = "OK"
    message: str = ""


class RegionChange(msgspec.Struct, frozen=True, tag=True):
    """What a client wants of its shared memory: register a region, or unregister it (`name` empty: all of them).

    `file` is the number (inode) of the file that `key` meant when the client asked; 0: not known.
    """

    kind: Literal["register", "unregister"]
    name: str
    key: str = ""
    offset: int = 0
    size_bytes: int = 0
    file: int = 0


class LogSettings(msgspec.Struct, frozen=True, tag=True):
    """All of them; also a message between supervisor and front end, in both directions, when they have changed.

    `file` empty: standard error. Which lines are written is a matter of `info`, `warning`, `error` and
    `verbose_level` (0: no details), each by itself.
    """

    file: str = ""
    info: bool = True
    warning: bool = True
    error: bool = True
    verbose_level: int = 0
    format: str = "default"

    @property
    def levels(self) -> LogLevels:
        """Which lines are wanted."""
        return LogLevels(self.info, self.warning, self.error, self.verbose_level)


Change = RegionChange | TraceOverrides | LogSettings


class Proposed(msgspec.Struct, frozen=True, tag=True):
    """From a front end: all are to make this change. Answered by Settled with this number."""

    number: int
    change: Change


class Agreed(msgspec.Struct, frozen=True, tag=True):
    """To every front end: make this change (None: just answer), and say Applied with this number (0: say nothing)."""

    number: int
    change: Change | None = None


class Applied(msgspec.Struct, frozen=True, tag=True):
    """From a front end: it has made a change, or why it could not. `code` is the name of a gRPC status."""

    number: int
    code: str = OK
    message: str = ""


class Settled(msgspec.Struct, frozen=True, tag=True):
    """To a front end: what it proposed has been done by all, or by none, and why. `code` as in Applied."""

    number: int
    code: str = OK
    message: str = ""


class BackgroundJob(msgspec.Struct, frozen=True):
    """What the supervisor has others do in the background, and `done` of `total` steps of its phase.

    `phase` empty: none is known. `since_s`: since 1970.
    """

    kind: Literal["compile", "profile"]
    model: str
    since_s: float
    phase: str = ""
    done: int = 0
    total: int = 0


class JobsUnderWay(msgspec.Struct, frozen=True, tag=True):
    """To a front end: these are all jobs at the moment, in the order of their begin."""

    jobs: tuple[BackgroundJob, ...]


class StartUnderWay(msgspec.Struct, frozen=True, tag=True):
    """To a front end: so many of the models have been tried that are served from the start; InitialLoadDone ends it.

    `kernels`: of models that are being compiled. `left_s`: about how long the rest takes; None: that is not known.
    `text`: all of it in words.
    """

    models_done: int
    models: int
    kernels_done: int
    kernels: int
    left_s: float | None
    text: str


class AllKnown(msgspec.Struct, frozen=True, tag=True):
    """To a front end, once: it has been told all there is, so clients may come."""


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Say that neither server nor models are ready, but serve: whoever distributes calls shall send none here."""


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Refuse new requests, finish the running ones, then exit with 0."""


@dataclass(frozen=True)
class Listening:
    """The front end accepts connections at `address` ("host:port", the port as bound).

    `metrics_address`, `http_address`: where metrics and HTTP are served, in the same way; empty if nowhere.
    """

    address: str
    metrics_address: str = ""
    http_address: str = ""


class BindFailed(msgspec.Struct, frozen=True, tag=True):
    """The front end could not listen and is about to exit with 1."""

    reason: str


FrontEndMessage = (
    ModelReady | ModelUnavailable | ModelRemoved | ModelPresence | ModelIdleness | InstanceAttended | ModelRetired
    | ModelTarget | VariantReady | VariantGone | ShapeWanted | FirstAnswer | InitialLoadDone | RepositoryCall
    | RepositoryAnswer | ReadinessAsked | ReadinessTold | Leave | Drain | Listening | BindFailed | LogSettings
    | TraceOverrides | RegionChange | Proposed | Agreed | Applied | Settled | JobsUnderWay | StartUnderWay | AllKnown
)  # fmt: skip


def to_json(message: FrontEndMessage) -> bytes:
    """Encode a message for one send() on the socket; a long one, as of a model with many tensors, is packed."""
    text = json_codec.encode_tagged(message)
    return text if len(text) < PACKED_BYTES else zlib.compress(text, level=1)


def from_json(data: bytes) -> FrontEndMessage:
    """Decode what to_json made. Raises ValueError for anything else."""
    try:
        text = data if data[:1] == b"{" else _unpacked(data)
        message: FrontEndMessage = json_codec.decode_tagged(FrontEndMessage, text, "message")
    except ValueError as error:
        raise ValueError(f"not a front-end message: {data[:200]!r} ({error})") from error
    return message


def _unpacked(data: bytes) -> bytes:
    unpacking = zlib.decompressobj()
    try:
        text = unpacking.decompress(data, MAX_TEXT_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not unpacking.eof:
        raise ValueError(f"cut off, or more than {MAX_TEXT_BYTES} bytes")
    return text


def front_end_peer(end: socket.socket) -> Peer[FrontEndMessage]:
    """Return one end of a socket that carries these messages."""
    return Peer(end, to_json, from_json)
