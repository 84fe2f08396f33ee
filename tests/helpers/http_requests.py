"""One HTTP request over a connection of its own, and the answer."""

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class HttpAnswer:
    """What an HTTP server answered. Names of headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def content(self) -> Any:
        """The body's JSON, without the tensors that may follow it."""
        size = self.headers.get("inference-header-content-length")
        return json.loads(self.body if size is None else self.body[: int(size)])


HttpAsk = Callable[..., HttpAnswer]


def ask_http(
    address: str, verb: str, path: str, body: Any = b"", headers: Mapping[str, str] = MappingProxyType({})
) -> HttpAnswer:
    """Send one request over a connection of its own; a body that is no bytes is sent as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with closing(HTTPConnection(address, timeout=20)) as connection:
        connection.request(verb, path, content or None, dict(headers))
        response = connection.getresponse()
        names = {name.lower(): value for name, value in response.getheaders()}
        return HttpAnswer(response.status, names, response.read())
