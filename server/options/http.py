"""Flags of the HTTP server."""

import argparse
from dataclasses import dataclass

from gangway.server.options.values import boolean, port

TITLE = "HTTP"


@dataclass(frozen=True)
class HttpOptions:
    """Whether to serve HTTP, and where to listen (port 0: any free one)."""

    allowed: bool = True
    address: str = "0.0.0.0"
    port: int = 8000

    @property
    def target(self) -> str:
        """What HTTP listens on: "host:port"; empty if it is not served."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}" if self.allowed else ""


def add_flags(parser: argparse._ArgumentGroup) -> None:
    """Define the flags."""
    add = parser.add_argument
    add("--allow-http", type=boolean, default=HttpOptions.allowed, metavar="BOOL", help="serve HTTP (true)")
    add("--http-port", type=port, default=HttpOptions.port, metavar="PORT",
        help="port to listen on, 0 for any free one (%(default)s)")  # fmt: skip
    add("--http-address", default=HttpOptions.address, metavar="HOST", help="address to listen on (%(default)s)")


def read(arguments: argparse.Namespace) -> HttpOptions:
    """Return the values."""
    return HttpOptions(arguments.allow_http, arguments.http_address, arguments.http_port)
