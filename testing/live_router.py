"""A real `gangway route` in front of real servers: started, waited for, stopped."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from testing.fetch.haproxy import with_haproxy
from testing.live_server import LiveServer, reserved_port, stop, wait_until_ready
from testing.repository import GANGWAY


@dataclass(frozen=True)
class LiveRouter:
    """Where the router listens, and its folder."""

    url: str
    http_url: str
    folder: Path
    process: "subprocess.Popen[bytes]"


def server_flag(name: str, server: LiveServer) -> str:
    """Return what `--server` says of a server."""
    metrics_port = server.metrics_url.removesuffix("/metrics").rpartition(":")[2]
    http_port = server.http_url.rpartition(":")[2]
    return f"--server={name}={server.url},{http_port},{metrics_port}"


@contextmanager
def live_router(
    folder: Path, servers: Sequence[str], *flags: str, credentials: grpc.ChannelCredentials | None = None
) -> Iterator[LiveRouter]:
    """Route calls to the servers, given as flags, until the block ends; it must end well."""
    with ExitStack() as stack:
        port, http_port = (stack.enter_context(reserved_port()) for _ in range(2))
        command = [
            *GANGWAY,
            "route",
            *servers,
            "--address=127.0.0.1",
            f"--grpc-port={port}",
            f"--http-port={http_port}",
        ]
        command += ["--check-ms=100", f"--output={folder}", *flags]
        log = stack.enter_context((folder / "route.log").open("wb"))
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=with_haproxy())
        try:
            wait_until_ready(f"127.0.0.1:{port}", process, folder / "route.log", credentials)
            yield LiveRouter(f"127.0.0.1:{port}", f"127.0.0.1:{http_port}", folder, process)
        finally:
            status = stop(process)
        assert status == 0, (folder / "route.log").read_text()
