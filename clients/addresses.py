"""Addresses of servers: HOST:PORT as commands take it, and the ports of a server on this machine."""

import argparse
import os
from typing import Final

USUAL_HTTP_PORT: Final = 8000
USUAL_GRPC_PORT: Final = 8001
GRPC_SCHEMES: Final = ("unix:", "dns:", "ipv4:", "ipv6:")


def http_address(text: str) -> tuple[str, int]:
    """Read HOST or HOST:PORT of a server's HTTP. Raises argparse.ArgumentTypeError."""
    host, port = _parts(text, USUAL_HTTP_PORT)
    return host.strip("[]"), int(port)


def grpc_address(text: str) -> str:
    """Read HOST or HOST:PORT of a server's gRPC; return it with a port. Names of gRPC's, as unix:PATH, stay.

    Raises argparse.ArgumentTypeError.
    """
    if text.startswith(GRPC_SCHEMES):
        return text
    host, port = _parts(text, USUAL_GRPC_PORT, f"; gRPC has no scheme, and is usually on port {USUAL_GRPC_PORT}")
    return f"{host}:{port}"


def _parts(text: str, usual_port: int, hint: str = "") -> tuple[str, str]:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(usual_port)
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16) or "/" in host or not host:
        raise argparse.ArgumentTypeError(f"expected HOST or HOST:PORT, got {text!r}{hint}")
    return host, port


def host_and_port(url: str) -> tuple[str, int]:
    """Read HOST:PORT of a server's gRPC. Raises ValueError."""
    host, _, port = url.rpartition(":")
    return host.strip("[]"), int(port)


def http_port() -> int:
    """Return the port of HTTP: what the variable of `gangway serve` says, else the usual one."""
    return _port("GANGWAY_HTTP_PORT", USUAL_HTTP_PORT)


def grpc_url() -> str:
    """Return HOST:PORT of gRPC, whose port is found likewise."""
    return f"127.0.0.1:{_port('GANGWAY_GRPC_PORT', USUAL_GRPC_PORT)}"


def _port(variable: str, usual: int) -> int:
    """Return what a variable says, unless that is no port, or 0, which lets the server choose."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() and int(text) else usual
