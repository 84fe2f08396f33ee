"""Flags of what clients connect to: the gRPC server, the HTTP server, the port of the metrics."""

import argparse
import os
from argparse import ArgumentTypeError
from dataclasses import dataclass, field
from enum import StrEnum

from gangway.server.access import UNIX, Category, Restrictions, TlsError, TlsFiles, check_files, listen_target
from gangway.server.options.values import (
    FlagGroup,
    OptionError,
    add_flags,
    boolean,
    flag,
    integer,
    pattern,
    port,
    read_flags,
    readable_file,
    restriction,
    restrictions,
)

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

    time_ms: int = flag("--grpc-keepalive-time", 7_200_000, type=integer(1), metavar="MS",
        help="ping the client after this time without data (%(default)s)")  # fmt: skip
    timeout_ms: int = flag("--grpc-keepalive-timeout", 20_000, type=integer(1), metavar="MS",
        help="close the connection when a ping is not answered within this time (%(default)s)")  # fmt: skip
    permit_without_calls: bool = flag("--grpc-keepalive-permit-without-calls", False, type=boolean, metavar="BOOL",
        help="ping, and let clients ping, also when there is no call (false)")  # fmt: skip
    max_pings_without_data: int = flag("--grpc-http2-max-pings-without-data", 2, type=integer(0), metavar="N",
        help="pings without data in between, 0: any number (%(default)s)")  # fmt: skip
    min_recv_ping_interval_without_data_ms: int = flag("--grpc-http2-min-recv-ping-interval-without-data", 300_000,
        type=integer(0), metavar="MS",
        help="clients that ping more often than this without sending data get a strike (%(default)s)")  # fmt: skip
    max_ping_strikes: int = flag("--grpc-http2-max-ping-strikes", 2, type=integer(0), metavar="N",
        help="after more strikes the connection is closed, 0: never (%(default)s)")  # fmt: skip
    max_connection_age_ms: int | None = flag("--grpc-max-connection-age", None, type=integer(1), metavar="MS",
        help="ask clients to connect again after this time (never)")  # fmt: skip
    max_connection_age_grace_ms: int | None = flag("--grpc-max-connection-age-grace", None, type=integer(0),
        metavar="MS", help="how long calls may go on after that (for ever)")  # fmt: skip


def _compression(text: str) -> Compression:
    try:
        return Compression(text.lower())
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is none of {', '.join(Compression)}") from None


@dataclass(frozen=True)
class GrpcOptions:
    """Where to listen (port 0: any free one; "unix:PATH" has no port), for which clients, and the longest message both
    ways.
    """

    allowed: bool = flag("--allow-grpc", True, type=boolean, metavar="BOOL", help="serve gRPC (true)")
    port: int = flag("--grpc-port", 8001, type=port, metavar="PORT",
        help="port to listen on, 0 for any free one (%(default)s)")  # fmt: skip
    address: str = flag("--grpc-address", "0.0.0.0", metavar="HOST",
        help="address to listen on, or unix:PATH (%(default)s)")  # fmt: skip
    reuse_port: bool = flag("--reuse-grpc-port", False, type=boolean, metavar="BOOL",
        help="let several servers listen on the same port; the kernel shares out the connections (false)")  # fmt: skip
    max_message_bytes: int = flag("--grpc-max-message-bytes", MAX_MESSAGE_BYTES, type=integer(MIN_MESSAGE_BYTES),
        metavar="BYTES", help="longest request and answer, also after decompression (%(default)s)")  # fmt: skip
    header_forward_pattern: str = flag("--grpc-header-forward-pattern", "", type=pattern, metavar="REGEX",
        help="headers that are parameters of a call's requests, too, for Python models: those in whose name, in lower"
        " case, it finds a match (none)")  # fmt: skip
    compression: Compression = flag("--grpc-infer-response-compression-level", Compression.NONE, metavar="LEVEL",
        type=_compression, help="compress answers for clients that accept it: none, low, medium, high (none)",
    )  # fmt: skip
    restrictions: Restrictions = field(default_factory=Restrictions)
    tls: TlsFiles | None = None
    keepalive: KeepaliveOptions = field(default_factory=KeepaliveOptions)
    warnings: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        """What gRPC listens on: "host:port" or "unix:PATH"; nothing if it is not to be served."""
        if not self.allowed:
            return ""
        if self.address.startswith(UNIX):
            return self.address
        return listen_target(self.address, self.port)


def add_grpc_flags(parser: argparse._ArgumentGroup) -> None:
    """Define the flags."""
    add_flags(GrpcOptions, parser)
    add = parser.add_argument
    add("--grpc-restricted-protocol", type=restriction, action="append", default=[],
        metavar="CATEGORY,...:KEY=VALUE|@FILE",
        help="serve these methods only to clients that send the metadata triton-grpc-protocol-KEY: VALUE; may be given "
        f"several times, or be lines of a file; categories: {', '.join(Category)}")  # fmt: skip
    _add_tls_flags(parser, "grpc")
    add_flags(KeepaliveOptions, parser)


def read_grpc(arguments: argparse.Namespace) -> GrpcOptions:
    """Return the values. Raises OptionError."""
    address = arguments.grpc_address
    if address.startswith(UNIX) and not 0 < len(os.fsencode(address.removeprefix(UNIX))) <= MAX_UNIX_PATH_BYTES:
        raise OptionError("--grpc-address", f"the path of a socket has 1 to {MAX_UNIX_PATH_BYTES} bytes")
    tls, warnings = _tls(arguments, "grpc")
    return read_flags(
        GrpcOptions,
        arguments,
        tls=tls,
        keepalive=read_flags(KeepaliveOptions, arguments),
        restrictions=restrictions("--grpc-restricted-protocol", arguments.grpc_restricted_protocol),
        warnings=warnings,
    )


def _add_tls_flags(parser: argparse._ArgumentGroup, protocol: str) -> None:
    add = parser.add_argument
    add(f"--{protocol}-use-ssl", type=boolean, default=False, metavar="BOOL", help="speak TLS only (false)")
    add(f"--{protocol}-use-ssl-mutual", type=boolean, default=False, metavar="BOOL",
        help="speak TLS only, and only with clients whose certificate the root certificate signs (false)")  # fmt: skip
    add(f"--{protocol}-server-cert", type=readable_file, metavar="FILE", help="the server's certificate chain, PEM")
    add(f"--{protocol}-server-key", type=readable_file, metavar="FILE", help="its private key, PEM, not encrypted")
    add(f"--{protocol}-root-cert", type=readable_file, metavar="FILE",
        help="certificates that sign those of clients, PEM")  # fmt: skip


def _tls(arguments: argparse.Namespace, protocol: str) -> tuple[TlsFiles | None, tuple[str, ...]]:
    """Return the files of TLS, None without it, and what has no effect. Raises OptionError."""
    given = vars(arguments)
    wants, mutual = given[f"{protocol}_use_ssl"], given[f"{protocol}_use_ssl_mutual"]
    certificate, key, root = (given[f"{protocol}_{name}"] for name in ("server_cert", "server_key", "root_cert"))
    files = {"server-cert": certificate, "server-key": key, "root-cert": root}
    if not (wants or mutual):
        unused = [f"--{protocol}-{name}" for name, file in files.items() if file]
        return None, tuple(f"{flag} has no effect without --{protocol}-use-ssl=true" for flag in unused)
    for name, file in files.items():
        if file is None and (mutual or name != "root-cert"):
            why = f"--{protocol}-use-ssl-mutual" if mutual else f"--{protocol}-use-ssl"
            raise OptionError(f"--{protocol}-{name}", f"is needed for {why}")
    tls = TlsFiles(certificate, key, root if mutual else None, mutual)
    try:
        check_files(tls)
    except TlsError as error:
        which = "root-cert" if error.file == tls.root else "server-cert"
        raise OptionError(f"--{protocol}-{which}", str(error)) from None
    without_effect = f"--{protocol}-root-cert has no effect without --{protocol}-use-ssl-mutual=true"
    return tls, (without_effect,) if root and not mutual else ()


GRPC = FlagGroup("gRPC", add_grpc_flags, read_grpc)


MAX_BODY_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class HttpOptions:
    """Whether to serve HTTP, where to listen (port 0: any free one), the longest body, and which routes are restricted.

    `reuse_port`: other servers may listen on the same port. `page`: the server can be watched. `tls`: for HTTPS.
    """

    allowed: bool = flag("--allow-http", True, type=boolean, metavar="BOOL", help="serve HTTP (true)")
    port: int = flag("--http-port", 8000, type=port, metavar="PORT",
        help="port to listen on, 0 for any free one (%(default)s)")  # fmt: skip
    address: str = flag("--http-address", "0.0.0.0", metavar="HOST", help="address to listen on (%(default)s)")
    reuse_port: bool = flag("--reuse-http-port", False, type=boolean, metavar="BOOL",
        help="let several servers listen on the same port; the kernel shares out the connections (false)")  # fmt: skip
    page: bool = flag("--allow-page", True, type=boolean, metavar="BOOL",
        help="show cores, models and jobs: the page / and what `gangway top` reads (true)")  # fmt: skip
    header_forward_pattern: str = flag("--http-header-forward-pattern", "", type=pattern, metavar="REGEX",
        help="headers that are parameters of the request, too, for Python models: those in whose name, as the client"
        " writes it, it finds a match (none)")  # fmt: skip
    max_body_bytes: int = flag("--http-max-input-size", MAX_BODY_BYTES, type=integer(1), metavar="BYTES",
        help="longest body of a request, also when it is inflated (%(default)s)")  # fmt: skip
    restrictions: Restrictions = field(default_factory=Restrictions)
    tls: TlsFiles | None = None
    warnings: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        """What HTTP listens on: "host:port"; empty if it is not served."""
        return listen_target(self.address, self.port) if self.allowed else ""


def add_http_flags(parser: argparse._ArgumentGroup) -> None:
    """Define the flags."""
    add_flags(HttpOptions, parser)
    add = parser.add_argument
    add("--http-restricted-api", type=restriction, action="append", default=[],
        metavar="CATEGORY,...:KEY=VALUE|@FILE",
        help="serve these routes only to clients that send the header KEY: VALUE; may be given several times, or be "
        f"lines of a file; categories: {', '.join(Category)}")  # fmt: skip
    _add_tls_flags(parser, "http")


def read_http(arguments: argparse.Namespace) -> HttpOptions:
    """Return the values. Raises OptionError."""
    tls, warnings = _tls(arguments, "http")
    return read_flags(
        HttpOptions,
        arguments,
        restrictions=restrictions("--http-restricted-api", arguments.http_restricted_api),
        tls=tls,
        warnings=warnings,
    )


HTTP = FlagGroup("HTTP", add_http_flags, read_http)


COUNTERS, HISTOGRAMS = "counter_latencies", "histogram_latencies"
_SUMMARIES = ("summary_latencies", "summary_quantiles")
_NO_SUMMARIES = "summaries are not served: use the histograms gangway_*_duration_seconds, which add up over servers"


@dataclass(frozen=True)
class MetricsOptions:
    """Whether metrics are served, where (port 0: any free one), and which.

    `interval_ms`: least time that the machine's CPU utilization is a mean of. `cpu`: the machine's metrics.
    `counters`: Triton's sums of latencies. `histograms`: Triton's histogram of the time to the first response.
    `reuse_port`: several front ends have the port.
    """

    allow: bool = flag("--allow-metrics", True, type=boolean, metavar="BOOL", help="serve Prometheus metrics (true)")
    port: int = flag("--metrics-port", 8002, type=port, metavar="PORT",
        help="port of /metrics, 0 for any free one (%(default)s)")  # fmt: skip
    address: str = flag("--metrics-address", "0.0.0.0", unless_given="", metavar="HOST",
        help="address of /metrics (that of HTTP)")  # fmt: skip
    interval_ms: int = flag("--metrics-interval-ms", 2000, type=integer(1), metavar="MS",
        help="shortest time that nv_cpu_utilization is a mean of (%(default)s)")  # fmt: skip
    cpu: bool = flag("--allow-cpu-metrics", True, type=boolean, metavar="BOOL",
        help="serve CPU and memory of the machine (true)")  # fmt: skip
    counters: bool = True
    histograms: bool = False
    reuse_port: bool = False

    @property
    def target(self) -> str:
        """Where metrics are served: "host:port"; empty if nowhere."""
        return listen_target(self.address, self.port) if self.allow else ""


def add_metrics_flags(parser: argparse._ArgumentGroup) -> None:
    """Define the flags."""
    add_flags(MetricsOptions, parser)
    add = parser.add_argument
    add("--metrics-config", type=_setting, action="append", default=[], metavar="KEY=VALUE",
        help=f"{COUNTERS}=false: no sums of latencies; {HISTOGRAMS}=true: Triton's histogram, too")  # fmt: skip


def read_metrics(arguments: argparse.Namespace) -> MetricsOptions:
    """Return the values."""
    settings = dict(arguments.metrics_config)
    return read_flags(
        MetricsOptions,
        arguments,
        address=arguments.metrics_address or arguments.http_address,
        counters=settings.get(COUNTERS, MetricsOptions.counters),
        histograms=settings.get(HISTOGRAMS, MetricsOptions.histograms),
    )


def _setting(text: str) -> tuple[str, bool]:
    """Return a setting of --metrics-config and its value."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    if key in _SUMMARIES:
        if value.lower() == "false":
            return key, False
        raise ArgumentTypeError(f"{key}: {_NO_SUMMARIES}")
    if key not in (COUNTERS, HISTOGRAMS):
        raise ArgumentTypeError(f"unknown setting {key!r}: expected {COUNTERS} or {HISTOGRAMS}")
    return key, boolean(value)


METRICS = FlagGroup("metrics", add_metrics_flags, read_metrics)
