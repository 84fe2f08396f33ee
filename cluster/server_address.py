"""Where a server is: its host and its three ports, as `--server` names them."""

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from gangway.base.numbers import seconds
from gangway.clients.errors import InputError
from gangway.clients.tls import Tls

GRPC_PORT, HTTP_PORT, METRICS_PORT = 8001, 8000, 8002
FORM = "[NAME=]HOST[:GRPC_PORT[,HTTP_PORT[,METRICS_PORT]]]"
SPEAKING = {"grpc": ("grpc",), "http": ("http",), "both": ("grpc", "http")}  # by --server-tls
_HOST = r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+"
_ADDRESS = re.compile(rf"(?:(?P<name>[^=]*)=)?(?P<host>{_HOST})(?::(?P<ports>\d+(?:,\d+){{0,2}}))?")
_NAME = re.compile(r"[A-Za-z0-9_.:-]+")  # what HAProxy takes


@dataclass(frozen=True)
class ServerAddress:
    """One server. `host`: an IPv6 address stands without brackets. `name`: unique, as tables and HAProxy show it."""

    name: str
    host: str
    grpc_port: int = GRPC_PORT
    http_port: int = HTTP_PORT
    metrics_port: int = METRICS_PORT

    @property
    def url(self) -> str:
        """Return where the server speaks gRPC."""
        return f"{self.bracketed}:{self.grpc_port}"

    @property
    def bracketed(self) -> str:
        """Return the host as URLs and HAProxy write it."""
        return f"[{self.host}]" if ":" in self.host else self.host


def parse_server(text: str) -> ServerAddress:
    """Read `[NAME=]HOST[:GRPC_PORT[,HTTP_PORT[,METRICS_PORT]]]`. Raises ArgumentTypeError that says what is wrong."""
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not {FORM}")
    ports = [int(port) for port in (match["ports"] or "").split(",") if port]
    if not all(0 < port < 65536 for port in ports):
        raise argparse.ArgumentTypeError(f"{text!r}: a port is a number from 1 to 65535")
    host = match["host"].strip("[]")
    name = match["name"] if match["name"] is not None else f"{host}:{ports[0]}" if ports else host
    if not _NAME.fullmatch(name):
        raise argparse.ArgumentTypeError(f"{text!r}: a name consists of letters, digits and _ . : -")
    usual = (GRPC_PORT, HTTP_PORT, METRICS_PORT)
    return ServerAddress(name, host, *ports, *usual[len(ports) :])


def add_servers(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that `servers_of` and `tls_of` read."""
    add = parser.add_argument
    add("--server", action="append", type=parse_server, required=True, metavar=FORM, dest="servers",
        help=f"a server; several times ({GRPC_PORT}, {HTTP_PORT}, {METRICS_PORT}; the host is its name)")  # fmt: skip
    add("--server-root-certificates", type=Path, metavar="FILE",
        help="the servers speak TLS; PEM: authorities to trust")  # fmt: skip
    add("--server-tls", choices=tuple(SPEAKING), default="grpc", help="what the servers speak TLS for (grpc)")
    add("--server-certificate", type=Path, metavar="FILE",
        help="shown to servers that know their clients; PEM: certificate chain and key in one file")  # fmt: skip
    add("--timeout", type=seconds, default=5.0, metavar="SECONDS", help="of a server's answers (5)")


def servers_of(options: argparse.Namespace) -> tuple[ServerAddress, ...]:
    """Return the servers. Raises InputError if two have one name or one address."""
    servers: tuple[ServerAddress, ...] = tuple(options.servers)
    for what, values in (("name", [s.name for s in servers]), ("address", [s.url for s in servers])):
        if twice := sorted({value for value in values if values.count(value) > 1}):
            raise InputError(f"--server: two servers have the {what} {twice[0]}")
    return servers


def tls_of(options: argparse.Namespace) -> Tls | None:
    """Return how the servers' gRPC is trusted, None without TLS. Raises InputError for wrong flags and files."""
    roots, own = options.server_root_certificates, options.server_certificate
    if roots is None:
        if own is not None or options.server_tls != "grpc":
            raise InputError("--server-tls and --server-certificate are for TLS: give --server-root-certificates, too")
        return None
    tls = Tls(roots, own, own)
    tls.context()  # which names an unusable file
    return tls if "grpc" in SPEAKING[options.server_tls] else None
