"""Addresses to listen on: "host:port", an IPv6 host in brackets; for gRPC also "unix:PATH"."""

import os
import socket
from contextlib import suppress

UNIX = "unix:"


def listen_target(address: str, port: int) -> str:
    """Return "host:port" for the address of a flag, with or without brackets, and as gRPC spells it ("ipv6:...")."""
    host = address.removeprefix("ipv4:").removeprefix("ipv6:").removeprefix("[").removesuffix("]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def socket_address(target: str) -> tuple[str, int, socket.AddressFamily]:
    """Return host (without brackets), port and family of "host:port"."""
    host, _, port = target.rpartition(":")
    return host.strip("[]"), int(port), socket.AF_INET6 if ":" in host else socket.AF_INET


def port_of(target: str, port: int) -> str:
    """Return "host:port" with another port."""
    return f"{target.rpartition(':')[0]}:{port}"


def why_not_listening(target: str) -> str:
    """Say why an address cannot be had, by trying again in a way that tells; gRPC does not say."""
    try:
        if target.startswith(UNIX):
            return f"cannot listen on {target}" + ": it is in use" * is_taken(target)
        host, port, family = socket_address(target)
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        return f"cannot listen on {target}: {error.strerror or error}"
    return f"cannot listen on {target}"


def is_taken(target: str, reuse_port: bool = False) -> bool:
    """Say whether an address cannot be had, before gRPC tries. `reuse_port`: others that say so may have it, too.

    It would take a "unix:PATH" away from whoever listens there, and write about a port to standard error. Nobody can
    connect to the port meanwhile: it is only bound.
    """
    if not target.startswith(UNIX):
        host, port, family = socket_address(target)
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, reuse_port)
            try:
                trial.bind((host, port))
            except OSError:
                return True
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(target.removeprefix(UNIX)) == 0


def forget(target: str) -> None:
    """Remove the file of a "unix:PATH" when nobody listens on it any more."""
    if target.startswith(UNIX):
        with suppress(OSError):
            os.unlink(target.removeprefix(UNIX))
