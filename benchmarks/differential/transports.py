"""How clients of gRPC reach a server: TCP, TLS, TLS with certificates of clients, a Unix socket."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from benchmarks.differential.asked import NO_CERTIFICATE, NO_TLS, TCP, TLS, UNIX, UNKNOWN_AUTHORITY
from benchmarks.other_clients.programs import secrets_of


@dataclass(frozen=True)
class Transport:
    """What a server is told, and clients need. `path`: of the Unix socket. `strangers`: clients to be refused."""

    flags: Sequence[str] = ()
    credentials: grpc.ChannelCredentials | None = None
    path: str = ""
    strangers: Mapping[str, grpc.ChannelCredentials | None] = field(default_factory=dict)


@contextmanager
def transport(name: str) -> Iterator[Transport]:
    """Return one of the transports, whose files are there until the block ends. Raises FetchError without openssl."""
    with tempfile.TemporaryDirectory() as folder:
        if name == TCP:
            yield Transport()
        elif name == UNIX:
            yield Transport(path=f"{folder}/grpc")
        else:
            yield _tls(Path(folder), name)


def _tls(folder: Path, name: str) -> Transport:
    secrets = secrets_of(folder)
    (folder / "other").mkdir()
    other = secrets_of(folder / "other")
    root, certificate, key = (
        path.read_bytes() for path in (secrets.root, secrets.client_certificate, secrets.client_key)
    )
    flags = [f"--grpc-server-cert={secrets.certificate}", f"--grpc-server-key={secrets.key}"]
    if name == TLS:
        strangers: dict[str, grpc.ChannelCredentials | None] = {NO_TLS: None}
        return Transport(["--grpc-use-ssl=true", *flags], grpc.ssl_channel_credentials(root), strangers=strangers)
    own = (other.client_key.read_bytes(), other.client_certificate.read_bytes())
    strangers = {
        NO_TLS: None,
        NO_CERTIFICATE: grpc.ssl_channel_credentials(root),
        UNKNOWN_AUTHORITY: grpc.ssl_channel_credentials(root, *own),
    }
    flags = ["--grpc-use-ssl-mutual=true", *flags, f"--grpc-root-cert={secrets.root}"]
    return Transport(flags, grpc.ssl_channel_credentials(root, key, certificate), strangers=strangers)
