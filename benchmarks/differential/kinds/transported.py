"""The same over TLS and a Unix socket, and clients that TLS refuses."""

from collections.abc import Iterator

from benchmarks.differential.asked import (
    CONNECTION,
    GRPC,
    JSON,
    MUTUAL,
    NO_CERTIFICATE,
    NO_TLS,
    RESET,
    STREAM,
    STREAM_RESET,
    TLS,
    TYPED,
    UNIX,
    UNKNOWN_AUTHORITY,
    Case,
    Departs,
    Infer,
    OnStream,
    Request,
    Rpc,
    Stranger,
    doing,
    floats,
    texts,
)
from benchmarks.differential.models import Model

MODELS: tuple[Model, ...] = ()
LARGE = 1 << 18  # elements: many frames of HTTP/2, many records of TLS


def cases() -> Iterator[Case]:
    """Yield the cases."""
    requests = {
        "adds": Request("adds", [floats("x", 1, 2)], id="i"),
        "large": Request("adds", [floats("x", *range(LARGE))]),
        "bytes": Request("lengths", [texts("x", b"\xff\xd8", b"")]),
        "ensemble": Request("chain", [floats("x", 1, 2)]),
        "raises": doing("raises", "value error"),
        "unknown": Request("unheard_of", [floats("x", 1)]),
        "headers": Request("sees", [floats("a", 1)], headers={"x-user": "me"}),
    }
    streamed = [
        doing("streams", name, id=name, parameters={"triton_enable_empty_final_response": True})
        for name in ("five", "an error in the middle", "one")
    ]
    for kind in (TLS, MUTUAL, UNIX):
        for what, request in requests.items():
            for way in (GRPC, TYPED, STREAM, JSON) if what in ("adds", "raises") else (GRPC, STREAM):
                yield Case(f"{kind}: {what}, {way}", [Infer(request, way)])
        yield Case(f"{kind}: a stream", [OnStream(streamed)])
        yield Case(f"{kind}: metadata", [Rpc("ModelMetadata", {"name": "adds"}), Rpc("ServerLive")])
        for model, way in (("watches", RESET), ("watches", CONNECTION), ("watches_stream", STREAM_RESET)):
            yield Case(f"{kind}: {model}, {way}", [Departs(model, way)])
    for kind, who in ((TLS, NO_TLS), (MUTUAL, NO_TLS), (MUTUAL, NO_CERTIFICATE), (MUTUAL, UNKNOWN_AUTHORITY)):
        yield Case(f"{kind}: a client {who}", [Stranger(who), Rpc("ServerLive")])
