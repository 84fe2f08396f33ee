"""Flags of the gRPC server."""

import argparse
import os
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from gangway.server.addresses import UNIX, TlsError, TlsFiles, check_files, listen_target
from gangway.server.options.values import (
    OptionError,
    boolean,
    integer,
    port,
    readable_file,
    restriction,
    restrictions,
)
from gangway.server.restriction import Category, Restrictions

TITLE = "gRPC"
MAX_MESSAGE_BYTES = 256 * 1024 * 1024  # 445 float images of 3x224x224; Triton's own clients allow 2 GiB
MIN_MESSAGE_BYTES = 1024
MAX_UNIX_PATH_BYTES = 107


class Compression(StrEnum):
    """How hard to compress answers, for clients that accept it."""

    NONE = "none"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


@dataclass(frozen=True)
class KeepaliveOptions:
    """When connections are probed, how often clients may probe, how old connections get. None: for ever."""

    time_ms: int = 7_200_000
    timeout_ms: int = 20_000
    permit_without_calls: bool = False
    max_pings_without_data: int = 2
    min_recv_ping_interval_without_data_ms: int = 300_000
    max_ping_strikes: int = 2
    max_connection_age_ms: int | None = None
    max_connection_age_grace_ms: int | None = None


@dataclass(frozen=True)
class GrpcOptions:
    """Where to listen (port 0: any free one; "unix:PATH" has no port), to whom, and the longest message both ways."""

    allowed: bool = True
    address: str = "0.0.0.0"
    port: int = 8001
    reuse_port: bool = False
    tls: TlsFiles | None = None
    keepalive: KeepaliveOptions = field(default_factory=KeepaliveOptions)
    restrictions: Restrictions = field(default_factory=Restrictions)
    compression: Compression = Compression.NONE
    max_message_bytes: int = MAX_MESSAGE_BYTES
    warnings: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        """What gRPC listens on: "host:port" or "unix:PATH"; nothing if it is not to be served."""
        if not self.allowed:
            return ""
        if self.address.startswith(UNIX):
            return self.address
        return listen_target(self.address, self.port)


def add_flags(parser: argparse._ArgumentGroup) -> None:
    """Define the flags."""
    add = parser.add_argument
    add("--allow-grpc", type=boolean, default=True, metavar="BOOL", help="serve gRPC (true)")
    add("--grpc-port", type=port, default=GrpcOptions.port, metavar="PORT",
        help="port to listen on, 0 for any free one (%(default)s)")  # fmt: skip
    add("--grpc-address", default=GrpcOptions.address, metavar="HOST",
        help="address to listen on, or unix:PATH (%(default)s)")  # fmt: skip
    add("--reuse-grpc-port", type=boolean, default=False, metavar="BOOL",
        help="let several servers listen on the same port; the kernel shares out the connections (false)")  # fmt: skip
    add("--grpc-max-message-bytes", type=integer(MIN_MESSAGE_BYTES), default=MAX_MESSAGE_BYTES, metavar="BYTES",
        help="longest request and answer, also after decompression (%(default)s)")  # fmt: skip
    add("--grpc-infer-response-compression-level", type=_compression, default=Compression.NONE, metavar="LEVEL",
        help="compress answers for clients that accept it: none, low, medium, high (none)")  # fmt: skip
    add("--grpc-restricted-protocol", type=restriction, action="append", default=[],
        metavar="CATEGORY,...:KEY=VALUE|@FILE",
        help="serve these methods only to who sends the metadata triton-grpc-protocol-KEY: VALUE; may be given several "
        f"times, or be lines of a file; categories: {', '.join(Category)}")  # fmt: skip
    _add_tls_flags(parser)
    _add_keepalive_flags(parser)


def read(arguments: argparse.Namespace) -> GrpcOptions:
    """Return the values. Raises OptionError."""
    address = arguments.grpc_address
    if address.startswith(UNIX) and not 0 < len(os.fsencode(address.removeprefix(UNIX))) <= MAX_UNIX_PATH_BYTES:
        raise OptionError("--grpc-address", f"the path of a socket has 1 to {MAX_UNIX_PATH_BYTES} bytes")
    tls = _tls(arguments)
    unused = [flag for flag in ("server-cert", "server-key", "root-cert") if _value(arguments, flag) and tls is None]
    warnings = [f"--grpc-{flag} has no effect without --grpc-use-ssl=true" for flag in unused]
    if tls is not None and not tls.mutual and arguments.grpc_root_cert:
        warnings.append("--grpc-root-cert has no effect without --grpc-use-ssl-mutual=true")
    return GrpcOptions(
        allowed=arguments.allow_grpc,
        address=address,
        port=arguments.grpc_port,
        reuse_port=arguments.reuse_grpc_port,
        tls=tls,
        keepalive=KeepaliveOptions(
            time_ms=arguments.grpc_keepalive_time,
            timeout_ms=arguments.grpc_keepalive_timeout,
            permit_without_calls=arguments.grpc_keepalive_permit_without_calls,
            max_pings_without_data=arguments.grpc_http2_max_pings_without_data,
            min_recv_ping_interval_without_data_ms=arguments.grpc_http2_min_recv_ping_interval_without_data,
            max_ping_strikes=arguments.grpc_http2_max_ping_strikes,
            max_connection_age_ms=arguments.grpc_max_connection_age,
            max_connection_age_grace_ms=arguments.grpc_max_connection_age_grace,
        ),
        restrictions=restrictions("--grpc-restricted-protocol", arguments.grpc_restricted_protocol),
        compression=arguments.grpc_infer_response_compression_level,
        max_message_bytes=arguments.grpc_max_message_bytes,
        warnings=tuple(warnings),
    )


def _add_tls_flags(parser: argparse._ArgumentGroup) -> None:
    add = parser.add_argument
    add("--grpc-use-ssl", type=boolean, default=False, metavar="BOOL", help="speak TLS only (false)")
    add("--grpc-use-ssl-mutual", type=boolean, default=False, metavar="BOOL",
        help="speak TLS only, and only with clients that the root certificate vouches for (false)")  # fmt: skip
    add("--grpc-server-cert", type=readable_file, metavar="FILE", help="the server's certificate chain, PEM")
    add("--grpc-server-key", type=readable_file, metavar="FILE", help="its private key, PEM, not encrypted")
    add("--grpc-root-cert", type=readable_file, metavar="FILE", help="certificates that vouch for clients, PEM")


def _add_keepalive_flags(parser: argparse._ArgumentGroup) -> None:
    add = parser.add_argument
    add("--grpc-keepalive-time", type=integer(1), default=KeepaliveOptions.time_ms, metavar="MS",
        help="after so long without a sign of life ask the client for one (%(default)s)")  # fmt: skip
    add("--grpc-keepalive-timeout", type=integer(1), default=KeepaliveOptions.timeout_ms, metavar="MS",
        help="so long it may take to answer, else the connection is closed (%(default)s)")  # fmt: skip
    add("--grpc-keepalive-permit-without-calls", type=boolean, default=False, metavar="BOOL",
        help="ask, and let clients ask, also when there is no call (false)")  # fmt: skip
    add("--grpc-http2-max-pings-without-data", type=integer(0), default=KeepaliveOptions.max_pings_without_data,
        metavar="N", help="ask so often without data in between, 0: any number (%(default)s)")  # fmt: skip
    add("--grpc-http2-min-recv-ping-interval-without-data", type=integer(0), metavar="MS",
        default=KeepaliveOptions.min_recv_ping_interval_without_data_ms,
        help="clients that ask more often than this without sending data get a strike (%(default)s)")  # fmt: skip
    add("--grpc-http2-max-ping-strikes", type=integer(0), default=KeepaliveOptions.max_ping_strikes, metavar="N",
        help="after more strikes the connection is closed, 0: never (%(default)s)")  # fmt: skip
    add("--grpc-max-connection-age", type=integer(1), metavar="MS",
        help="ask clients to connect anew after so long (never)")  # fmt: skip
    add("--grpc-max-connection-age-grace", type=integer(0), metavar="MS",
        help="so long calls may go on after that (for ever)")  # fmt: skip


def _tls(arguments: argparse.Namespace) -> TlsFiles | None:
    mutual = arguments.grpc_use_ssl_mutual
    if not (arguments.grpc_use_ssl or mutual):
        return None
    needed = ["server-cert", "server-key", *["root-cert"] * mutual]
    for flag in needed:
        if _value(arguments, flag) is None:
            why = "--grpc-use-ssl-mutual" if mutual else "--grpc-use-ssl"
            raise OptionError(f"--grpc-{flag}", f"is needed for {why}")
    root: Path | None = arguments.grpc_root_cert if mutual else None
    files = TlsFiles(arguments.grpc_server_cert, arguments.grpc_server_key, root, mutual)
    try:
        check_files(files)
    except TlsError as error:
        raise OptionError("--grpc-root-cert" if error.file == root else "--grpc-server-cert", str(error)) from None
    return files


def _value(arguments: argparse.Namespace, flag: str) -> Path | None:
    value: Path | None = getattr(arguments, f"grpc_{flag.replace('-', '_')}")
    return value


def _compression(text: str) -> Compression:
    try:
        return Compression(text.lower())
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(Compression)}") from None
