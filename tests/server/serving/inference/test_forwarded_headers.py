"""Which headers of a call become parameters, and what they are then."""

from collections.abc import Iterable, Mapping

import pytest

from gangway.server.errors import RequestError
from gangway.server.serving.call import Call
from gangway.server.serving.inference.forwarded_headers import MAX_NAME_CHARACTERS, ForwardedHeaders
from gangway.server.tracing.record import GRPC, HTTP

Headers = list[tuple[str, str | bytes]]


class Script(Call):
    """A call with these headers."""

    def __init__(self, front_end: str, headers: Headers) -> None:
        self.front_end, self._headers = front_end, headers

    def time_remaining(self) -> None:
        return None

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]]:
        return self._headers

    def answer(self, result: bytes | RequestError) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("pattern", "headers", "expected"),
    [
        ("", [("x-user", "me")], {}),
        ("x-.*", [("x-user", "me"), ("host", "h"), ("max-age", "1")], {"x-user": "me", "max-age": "1"}),
        ("^x-", [("x-user", "me"), ("max-age", "1")], {"x-user": "me"}),
        ("user", [("x-user", "one"), ("x-user", "two")], {"x-user": "two"}),
        ("(?i)^X-USER$", [("x-user", "me"), ("X-User", "you")], {"x-user": "me", "X-User": "you"}),
        ("-bin$", [("x-bin", b"\x00\xff")], {"x-bin": "\x00\ufffd"}),
        ("user", [("user", "ä".encode().decode("latin-1"))], {"user": "ä"}),
        ("a", [("a" * MAX_NAME_CHARACTERS, "fits"), ("a" * (MAX_NAME_CHARACTERS + 1), "not")], {"a" * 256: "fits"}),
    ],
)
@pytest.mark.parametrize("front_end", [GRPC, HTTP])
def test_headers(pattern: str, headers: Headers, expected: Mapping[str, str], front_end: str) -> None:
    patterns = {GRPC: "", HTTP: ""} | {front_end: pattern}
    forwarded = ForwardedHeaders(patterns[GRPC], patterns[HTTP])
    for _ in range(2):
        assert forwarded.of(Script(front_end, headers)) == expected
    assert forwarded.of(Script(HTTP if front_end == GRPC else GRPC, headers)) == {}
