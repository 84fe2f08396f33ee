"""What both servers are asked: tensors, requests, the ways in which they are sent, and cases made of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from tritonclient.utils import serialize_byte_tensor

Value = bool | int | float | str
DTYPES: Mapping[str, Any] = {
    "BOOL": np.bool_,
    **{f"{sign}INT{bits}": f"{sign.lower()}int{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)},
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    "BF16": bfloat16,
    "BYTES": np.object_,
}
# Over gRPC with raw and with typed contents; on a stream; over HTTP as JSON, and with binary tensors both ways.
GRPC, TYPED, STREAM, JSON, BINARY = "grpc", "typed", "stream", "json", "binary"
WAYS = (GRPC, TYPED, STREAM, JSON, BINARY)
FEW = (GRPC, STREAM, BINARY)
BOTH = (GRPC, JSON)
# How gRPC is reached, and clients that TLS does not let in.
TCP, TLS, MUTUAL, UNIX = TRANSPORTS = ("TCP", "TLS", "mutual TLS", "Unix socket")
NO_TLS, NO_CERTIFICATE, UNKNOWN_AUTHORITY = "without TLS", "without a certificate", "with a certificate of its own"
# How clients leave.
RESET, CONNECTION, DEADLINE = "call cancelled", "connection closed", "deadline"
STREAM_RESET, STREAM_DEADLINE, HALF_STREAM = "stream cancelled", "stream's deadline", "stream half closed"
HTTP, EVENTS, HALF = "HTTP closed", "events closed", "HTTP half closed"


@dataclass(frozen=True)
class Tensor:
    """An input of a request: elements are numbers, flags or bytes, in row-major order."""

    name: str
    datatype: str
    shape: Sequence[int]
    elements: Sequence[Any]

    @property
    def content(self) -> bytes:
        """As the protocols have it."""
        array = np.empty(len(self.elements), DTYPES[self.datatype])
        array[:] = self.elements
        if self.datatype != "BYTES":
            return array.tobytes()
        return bytes(serialize_byte_tensor(array).item()) if array.size else b""


def floats(name: str, *elements: float, shape: Sequence[int] | None = None) -> Tensor:
    """Return a tensor of FP32."""
    return Tensor(name, "FP32", (len(elements),) if shape is None else shape, elements)


def integers(name: str, *elements: int, shape: Sequence[int] | None = None) -> Tensor:
    """Return a tensor of INT32."""
    return Tensor(name, "INT32", (len(elements),) if shape is None else shape, elements)


def texts(name: str, *elements: str | bytes, shape: Sequence[int] | None = None) -> Tensor:
    """Return a tensor of BYTES."""
    found = [each.encode() if isinstance(each, str) else each for each in elements]
    return Tensor(name, "BYTES", (len(found),) if shape is None else shape, found)


@dataclass(frozen=True)
class Request:
    """A request for inference. `outputs`: the names of those that are wanted; none: all."""

    model: str
    inputs: Sequence[Tensor] = ()
    outputs: Sequence[str] = ()
    id: str = ""
    parameters: Mapping[str, Value] = field(default_factory=dict)
    version: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    output_parameters: Mapping[str, Value] = field(default_factory=dict)


def doing(model: str, *what: str | bytes, wanted: Sequence[str] = (), rows: bool = False, **more: Any) -> Request:
    """Return a request whose one input says what the model shall do. `more`: further fields of the request."""
    return Request(model, [texts("do", *what, shape=(1, 1) if rows else None)], wanted, **more)


@dataclass(frozen=True)
class Infer:
    """A request, sent in one of the ways."""

    request: Request
    way: str


@dataclass(frozen=True)
class OnStream:
    """Several requests on one stream, each sent when the one before has its last answer, unless `at_once`."""

    requests: Sequence[Request]
    at_once: bool = False


@dataclass(frozen=True)
class Together:
    """Requests that are sent at the same time. Their answers have the order of the requests."""

    requests: Sequence[Request]
    way: str = GRPC


@dataclass(frozen=True)
class Behind:
    """Requests that are sent, one after the other, while the first one is computed. Answers have that order."""

    first: Request
    then: Sequence[Request]
    way: str = GRPC


@dataclass(frozen=True)
class Http:
    """A request over HTTP, written out. A body that is no bytes is sent as JSON."""

    verb: str
    path: str
    body: Any = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Rpc:
    """A method of gRPC, with the fields of its message."""

    method: str
    message: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scrape:
    """The lines of the metrics that begin with one of these names."""

    names: Sequence[str]


@dataclass(frozen=True)
class Wait:
    """The request is repeated until its answer has this text, for some seconds at most: only the last answer counts."""

    step: "Infer | Http | Rpc | Scrape"
    text: str


@dataclass(frozen=True)
class Shared:
    """Steps with a segment of shared memory: its contents before, and its name is SEGMENT in what is sent.

    The last answer is what the segment holds then.
    """

    content: bytes
    steps: "Sequence[Http | Rpc | Wait]"


@dataclass(frozen=True)
class Departs:
    """A request whose client leaves while the model computes, in one of the ways of DEPARTURES.

    `tellers`: so many executions tell what they see. `beside`: a request of another client, which waits for its answer.
    `behind`: the request waits behind an equal one, whose client stays.
    """

    model: str
    way: str
    tellers: int = 1
    beside: Request | None = None
    behind: bool = False


@dataclass(frozen=True)
class Stranger:
    """A client that TLS does not let in, one of those of its transport. The answer is the code of its call."""

    who: str


Step = Infer | OnStream | Together | Behind | Http | Rpc | Scrape | Wait | Shared | Departs | Stranger
SEGMENT = "SEGMENT"


@dataclass(frozen=True)
class Case:
    """Steps, one after the other. `name`: its kind, and what is asked."""

    name: str
    steps: Sequence[Step]

    @property
    def kind(self) -> str:
        """What the name begins with."""
        return self.name.partition(":")[0]

    @property
    def transport(self) -> str:
        """How the server is reached."""
        return self.kind if self.kind in TRANSPORTS else TCP


def by(kind: str, what: str, request: Request, ways: Sequence[str] = BOTH) -> Iterator[Case]:
    """Yield a case for each way of one request."""
    for way in ways:
        yield Case(f"{kind}: {what}, {way}", [Infer(request, way)])


def generate(kind: str, what: str, model: str, body: Mapping[str, Any]) -> Iterator[Case]:
    """Yield the cases of both routes of the generate extension."""
    for route in ("generate", "generate_stream"):
        yield Case(f"{kind}: {what}, {route}", [Http("POST", f"/v2/models/{model}/{route}", body)])
