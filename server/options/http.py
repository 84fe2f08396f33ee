"""Flags of the HTTP server."""

import argparse
from dataclasses import dataclass, field

from gangway.server.addresses import listen_target
from gangway.server.options.values import boolean, integer, port, restriction, restrictions
from gangway.server.restriction import Category, Restrictions

TITLE = "HTTP"
MAX_BODY_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class HttpOptions:
    """Whether to serve HTTP, where to listen (port 0: any free one), the longest body, and who may ask for what.

    `reuse_port`: other servers may listen on the same port.
    """

    allowed: bool = True
    address: str = "0.0.0.0"
    port: int = 8000
    reuse_port: bool = False
    max_body_bytes: int = MAX_BODY_BYTES
    restrictions: Restrictions = field(default_factory=Restrictions)

    @property
    def target(self) -> str:
        """What HTTP listens on: "host:port"; empty if it is not served."""
        return listen_target(self.address, self.port) if self.allowed else ""


def add_flags(parser: argparse._ArgumentGroup) -> None:
    """Define the flags."""
    add = parser.add_argument
    add("--allow-http", type=boolean, default=HttpOptions.allowed, metavar="BOOL", help="serve HTTP (true)")
    add("--http-port", type=port, default=HttpOptions.port, metavar="PORT",
        help="port to listen on, 0 for any free one (%(default)s)")  # fmt: skip
    add("--http-address", default=HttpOptions.address, metavar="HOST", help="address to listen on (%(default)s)")
    add("--reuse-http-port", type=boolean, default=False, metavar="BOOL",
        help="let several servers listen on the same port; the kernel shares out the connections (false)")  # fmt: skip
    add("--http-max-input-size", type=integer(1), default=MAX_BODY_BYTES, metavar="BYTES",
        help="longest body of a request, also when it is inflated (%(default)s)")  # fmt: skip
    add("--http-restricted-api", type=restriction, action="append", default=[],
        metavar="CATEGORY,...:KEY=VALUE|@FILE",
        help="serve these routes only to who sends the header KEY: VALUE; may be given several times, or be lines of a "
        f"file; categories: {', '.join(Category)}")  # fmt: skip


def read(arguments: argparse.Namespace) -> HttpOptions:
    """Return the values. Raises OptionError."""
    return HttpOptions(
        allowed=arguments.allow_http,
        address=arguments.http_address,
        port=arguments.http_port,
        reuse_port=arguments.reuse_http_port,
        max_body_bytes=arguments.http_max_input_size,
        restrictions=restrictions("--http-restricted-api", arguments.http_restricted_api),
    )
