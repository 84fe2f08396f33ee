"""The ports that several front ends share by SO_REUSEPORT. The supervisor holds them, and so keeps others out.

Whoever else has SO_REUSEPORT and our user could join in and get a part of the connections without a word. So the
supervisor takes each port first, as if it were to listen on it alone, and lets only then share. It has a socket there
as long as it runs, on which nobody can connect: the ports stay ours also while no front end lives.
"""

import os
import socket
from dataclasses import replace

from gangway.server.listen_address import port_of, socket_address
from gangway.server.options.serve_options import ServeOptions


class BindError(Exception):
    """An address cannot be listened on; the message says why."""


def share_ports(options: ServeOptions) -> tuple[ServeOptions, tuple[socket.socket, ...]]:
    """Take the ports of gRPC, HTTP and metrics; return options with which front ends share them, and what holds them.

    Ports that are 0 become those that the system has chosen. Raises BindError.
    """
    held = []
    try:
        if target := options.grpc.target:
            held.append(_reserve(target, "cannot listen on {}", options.grpc.reuse_port))
            options = replace(options, grpc=replace(options.grpc, port=_port(held[-1]), reuse_port=True))
        if target := options.http.target:
            held.append(_reserve(target, "cannot listen on {} for HTTP", options.http.reuse_port))
            options = replace(options, http=replace(options.http, port=_port(held[-1]), reuse_port=True))
        if target := options.metrics.target:
            held.append(_reserve(target, "cannot serve metrics on {}"))
            options = replace(options, metrics=replace(options.metrics, port=_port(held[-1]), reuse_port=True))
    except BaseException:
        for other in held:
            other.close()
        raise
    return options, tuple(held)


def _port(held: socket.socket) -> int:
    return int(held.getsockname()[1])


def _reserve(target: str, failure: str, shared: bool = False) -> socket.socket:
    """Take a port ("host:port"); `shared`: other servers may have it, too."""
    host, port, family = socket_address(target)
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier server may linger
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
        if host == "::":
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.bind((host, port))
        if not shared and port:
            # Two that have only bound the port do not see each other; of two that listen the second one fails. From
            # then on SO_REUSEADDR alone is no way in any more.
            held.listen(1)
            held.shutdown(socket.SHUT_RDWR)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError as error:
        held.close()
        reason = os.strerror(error.errno) if error.errno else error
        raise BindError(f"{failure.format(port_of(target, port))}: {reason}") from None
    return held
