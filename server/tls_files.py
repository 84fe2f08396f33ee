"""The files of a server that speaks TLS: what they must be, and whether they have changed. No gRPC here."""

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn


class TlsError(ValueError):
    """A file cannot be used; the message says which one and why."""

    def __init__(self, file: Path, reason: str) -> None:
        super().__init__(f"{file} {reason}")
        self.file = file


@dataclass(frozen=True)
class TlsFiles:
    """PEM files. With `mutual` clients must show a certificate that one in `root` vouches for."""

    certificate: Path
    key: Path
    root: Path | None = None
    mutual: bool = False

    @property
    def all(self) -> tuple[Path, ...]:
        """Every file that is used."""
        return (self.certificate, self.key, *([self.root] if self.root else []))


def check_files(files: TlsFiles) -> None:
    """Return if a server can use them. Raises TlsError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def encrypted() -> NoReturn:
        raise TlsError(files.key, "is encrypted, and there is nobody to ask for a password")

    for path, block in ((files.certificate, b"CERTIFICATE-----"), (files.key, b"PRIVATE KEY-----")):
        if block not in _bytes_of(path):
            raise TlsError(path, f"has no PEM block {block.decode().rstrip('-')}")
    try:
        context.load_cert_chain(files.certificate, files.key, password=encrypted)
    except (ssl.SSLError, OSError) as error:
        raise TlsError(files.certificate, f"cannot be used with the key {files.key}: {_reason(error)}") from None
    if files.root is not None:
        try:
            context.load_verify_locations(files.root)
        except (ssl.SSLError, OSError) as error:
            raise TlsError(files.root, f"holds no certificates: {_reason(error)}") from None


def stamp(files: TlsFiles) -> tuple[tuple[int, int, int], ...]:
    """Return what differs when a file has been written or replaced. Raises OSError if one is not there."""
    return tuple((status.st_ino, status.st_mtime_ns, status.st_size) for status in map(os.stat, files.all))


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsError(path, f"cannot be read: {error.strerror}") from None


def _reason(error: OSError) -> str:
    """Return OpenSSL's word for it, such as "key values mismatch"."""
    reason = getattr(error, "reason", None) or error.strerror or str(error)
    return str(reason).replace("_", " ").lower()
