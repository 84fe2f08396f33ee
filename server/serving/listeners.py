"""Sockets that listen, for every protocol: by TCP, over all families that an address has, or at a path."""

import os
import socket
import stat
from contextlib import suppress
from typing import Final

from gangway.server.access import UNIX, port_of, socket_address

BACKLOG: Final = 1024
PROBE_S: Final = 1.0  # until a server that has a path takes a connection
_WILDCARDS: Final = ("0.0.0.0", "::")


def listen(target: str, reuse_port: bool = False) -> tuple[list[socket.socket], str]:
    """Return sockets that listen at "host:port" or "unix:PATH", and the address with the port that it has got.

    A wildcard means both families, and so does a name that has addresses of both. `reuse_port`: several may listen at a
    port. Raises OSError.
    """
    if target.startswith(UNIX):
        return [_listen_at_path(target.removeprefix(UNIX))], target
    host, port, _ = socket_address(target)
    sockets: list[socket.socket] = []
    try:
        for family, address in _addresses(host, port):
            both = address == "::" and host in _WILDCARDS
            found = socket.create_server(
                (address, port), family=family, backlog=BACKLOG, reuse_port=reuse_port, dualstack_ipv6=both
            )
            sockets.append(found)
            found.setblocking(False)
            port = found.getsockname()[1]
    except OSError:
        for found in sockets:
            found.close()
        raise
    return sockets, port_of(target, port)


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    if host in _WILDCARDS:
        wide = socket.has_dualstack_ipv6()
        return [(socket.AF_INET6, "::")] if wide or host == "::" else [(socket.AF_INET, host)]
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((info[0], str(info[4][0])) for info in infos))


def _listen_at_path(path: str) -> socket.socket:
    """Listen at a path, in place of the socket of a server that has ended."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE_S)
        if probe.connect_ex(path) == 0:
            raise OSError("it is in use")
    with suppress(OSError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        found.bind(path)
        found.listen(BACKLOG)
    except OSError:
        found.close()
        raise
    found.setblocking(False)
    return found
