"""Who can reach the server: addresses to listen on, the files of TLS, and groups of methods that need a key.

An address is "host:port", an IPv6 host in brackets, and for gRPC also "unix:PATH". Nothing here imports gRPC.
"""

import hmac
import os
import re
import socket
import ssl
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Final, NoReturn

import msgspec


class TlsError(ValueError):
    """A file cannot be used; the message says which one and why."""

    def __init__(self, file: Path, reason: str) -> None:
        super().__init__(f"{file} {reason}")
        self.file = file


class TlsFiles(msgspec.Struct, frozen=True):
    """PEM files of a server that speaks TLS. With `mutual` clients must show a certificate that one in `root` signs."""

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
        raise TlsError(files.key, "is encrypted: the server needs a key without a password")

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


def stamp(files: TlsFiles) -> tuple[tuple[int, ...], ...]:
    """Return a value that changes when a file is written, replaced, removed, or may be read by others than before."""
    return tuple(map(_stamp, files.all))


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsError(path, f"cannot be read: {error.strerror}") from None


def _reason(error: OSError) -> str:
    """Return OpenSSL's word for it, such as "key values mismatch"."""
    reason = getattr(error, "reason", None) or error.strerror or str(error)
    return str(reason).replace("_", " ").lower()


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


def why_not_bound(error: OSError) -> str:
    """Return the words of the system, or of its resolver, for why nobody can listen at an address."""
    return (error.strerror or str(error)).partition(" (while attempting ")[0]  # which `create_server` adds


def remove_socket(target: str) -> None:
    """Remove the file of a "unix:PATH" that nobody listens on."""
    if target.startswith(UNIX):
        with suppress(OSError):
            os.unlink(target.removeprefix(UNIX))


GRPC_KEY_PREFIX = "triton-grpc-protocol-"  # what Triton's clients put before the key in gRPC's metadata
MAX_KEY_CHARACTERS = 256
_KEY = re.compile(r"[a-z0-9_.-]+")
_VALUE = re.compile(r"[\x20-\x7e]+")


class Category(StrEnum):
    """What can be restricted, by the name that it has on the command line."""

    HEALTH = "health"
    METADATA = "metadata"
    INFERENCE = "inference"
    SHARED_MEMORY = "shared-memory"
    MODEL_CONFIG = "model-config"
    MODEL_REPOSITORY = "model-repository"
    STATISTICS = "statistics"
    TRACE = "trace"
    LOGGING = "logging"


# By the method's name in the service; a route of HTTP has the category of the method it stands for.
CATEGORY_OF_METHOD: Mapping[str, Category] = {
    "ServerLive": Category.HEALTH, "ServerReady": Category.HEALTH, "ModelReady": Category.HEALTH,
    "Check": Category.HEALTH, "Watch": Category.HEALTH, "ServerMetadata": Category.METADATA,
    "ModelMetadata": Category.METADATA, "ModelInfer": Category.INFERENCE, "ModelStreamInfer": Category.INFERENCE,
    "SystemSharedMemoryStatus": Category.SHARED_MEMORY, "SystemSharedMemoryRegister": Category.SHARED_MEMORY,
    "SystemSharedMemoryUnregister": Category.SHARED_MEMORY, "CudaSharedMemoryStatus": Category.SHARED_MEMORY,
    "CudaSharedMemoryRegister": Category.SHARED_MEMORY, "CudaSharedMemoryUnregister": Category.SHARED_MEMORY,
    "ModelConfig": Category.MODEL_CONFIG, "RepositoryIndex": Category.MODEL_REPOSITORY,
    "RepositoryModelLoad": Category.MODEL_REPOSITORY, "RepositoryModelUnload": Category.MODEL_REPOSITORY,
    "ModelStatistics": Category.STATISTICS, "TraceSetting": Category.TRACE, "LogSettings": Category.LOGGING,
}  # fmt: skip


class Restriction(msgspec.Struct, frozen=True):
    """A caller of a method of these categories must send the header `key` (lower case) with this value."""

    categories: tuple[Category, ...]
    key: str
    value: str

    def admits(self, given: Iterable[str | bytes]) -> bool:
        """Say whether one of the values that came under the key is the right one.

        The time this takes depends neither on how much of a value is right, nor on the right one's length.
        """
        wanted = _digest(self.value)
        return sum(hmac.compare_digest(_digest(value), wanted) for value in given) > 0


class Restrictions(msgspec.Struct, frozen=True):
    """All restrictions of one protocol; each category is in one of them at most.

    `is_visible`: values of some stand on the server's command line.
    """

    groups: tuple[Restriction, ...] = ()
    is_visible: bool = False

    def of(self, category: Category) -> Restriction | None:
        """Return what a caller of this category must satisfy, if anything."""
        return next((group for group in self.groups if category in group.categories), None)

    @property
    def categories(self) -> frozenset[Category]:
        """All that is restricted."""
        return frozenset(category for group in self.groups for category in group.categories)

    def duplicate(self) -> Category | None:
        """Return a category that is named more than once, if any."""
        named = [category for group in self.groups for category in group.categories]
        return next((category for category in named if named.count(category) > 1), None)


def parse_restriction(text: str) -> Restriction:
    """Return the restriction in "CATEGORY,...:KEY=VALUE". Raises ValueError."""
    names, colon, pair = text.partition(":")
    key, equals, value = pair.partition("=")
    if not (names and colon and key and equals and value):
        raise ValueError("expected CATEGORY,...:KEY=VALUE")  # without the text, which may hold a secret
    key = key.lower()  # names of headers are the same in any case
    if not _KEY.fullmatch(key) or len(key) > MAX_KEY_CHARACTERS:
        raise ValueError(f"{key!r} cannot be a header's name")
    if not _VALUE.fullmatch(value) or value != value.strip():
        raise ValueError(f"the value of {key!r} cannot be a header's")
    known = [category.value for category in Category]
    for name in names.split(","):
        if name not in known:
            raise ValueError(f"unknown category {name!r}; known: {', '.join(known)}")
    return Restriction(tuple(map(Category, names.split(","))), key, value)


def _digest(value: str | bytes) -> bytes:
    return sha256(value.encode() if isinstance(value, str) else value).digest()


HTTP2_PREFACE: Final = b"PRI * HTTP/2.0\r\n"  # how every client of HTTP/2 begins, and so of gRPC


@dataclass
class Ports:
    """Where a front end listens, and where metrics are: "host:port" or "unix:PATH"; empty as long as it does not."""

    grpc: str = ""
    http: str = ""
    metrics: str = ""

    @property
    def text(self) -> str:
        """What clients at the wrong port are told, such as "HTTP is on port 8000, gRPC on port 8001"."""
        known = {"HTTP": self.http, "gRPC": self.grpc}
        places = [f"{name} is {_place(address)}" for name, address in known.items() if address]
        return " and ".join(places) or "no other port is served"

    @property
    def metrics_text(self) -> str:
        """What a scraper at the port of HTTP is told, such as "metrics are on port 8002"."""
        return f"metrics are {_place(self.metrics)}" if self.metrics else "metrics are not served"


def _place(address: str) -> str:
    return f"at {address}" if address.startswith(UNIX) else f"on port {address.rpartition(':')[2]}"
