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
    boolean,
    integer,
    port,
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
    """Where to listen (port 0: any free one; "unix:PATH" has no port), for which clients, and the longest message both
    ways.
    """

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


def add_grpc_flags(parser: argparse._ArgumentGroup) -> None:
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
        help="serve these methods only to clients that send the metadata triton-grpc-protocol-KEY: VALUE; may be given "
        f"several times, or be lines of a file; categories: {', '.join(Category)}")  # fmt: skip
    _add_tls_flags(parser, "grpc")
    _add_keepalive_flags(parser)


def read_grpc(arguments: argparse.Namespace) -> GrpcOptions:
    """Return the values. Raises OptionError."""
    address = arguments.grpc_address
    if address.startswith(UNIX) and not 0 < len(os.fsencode(address.removeprefix(UNIX))) <= MAX_UNIX_PATH_BYTES:
        raise OptionError("--grpc-address", f"the path of a socket has 1 to {MAX_UNIX_PATH_BYTES} bytes")
    tls, warnings = _tls(arguments, "grpc")
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


def _add_keepalive_flags(parser: argparse._ArgumentGroup) -> None:
    add = parser.add_argument
    add("--grpc-keepalive-time", type=integer(1), default=KeepaliveOptions.time_ms, metavar="MS",
        help="ping the client after this time without data (%(default)s)")  # fmt: skip
    add("--grpc-keepalive-timeout", type=integer(1), default=KeepaliveOptions.timeout_ms, metavar="MS",
        help="close the connection when a ping is not answered within this time (%(default)s)")  # fmt: skip
    add("--grpc-keepalive-permit-without-calls", type=boolean, default=False, metavar="BOOL",
        help="ping, and let clients ping, also when there is no call (false)")  # fmt: skip
    add("--grpc-http2-max-pings-without-data", type=integer(0), default=KeepaliveOptions.max_pings_without_data,
        metavar="N", help="pings without data in between, 0: any number (%(default)s)")  # fmt: skip
    add("--grpc-http2-min-recv-ping-interval-without-data", type=integer(0), metavar="MS",
        default=KeepaliveOptions.min_recv_ping_interval_without_data_ms,
        help="clients that ping more often than this without sending data get a strike (%(default)s)")  # fmt: skip
    add("--grpc-http2-max-ping-strikes", type=integer(0), default=KeepaliveOptions.max_ping_strikes, metavar="N",
        help="after more strikes the connection is closed, 0: never (%(default)s)")  # fmt: skip
    add("--grpc-max-connection-age", type=integer(1), metavar="MS",
        help="ask clients to connect again after this time (never)")  # fmt: skip
    add("--grpc-max-connection-age-grace", type=integer(0), metavar="MS",
        help="how long calls may go on after that (for ever)")  # fmt: skip


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


def _compression(text: str) -> Compression:
    try:
        return Compression(text.lower())
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(Compression)}") from None


GRPC = FlagGroup("gRPC", add_grpc_flags, read_grpc)


MAX_BODY_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class HttpOptions:
    """Whether to serve HTTP, where to listen (port 0: any free one), the longest body, and which routes are restricted.

    `reuse_port`: other servers may listen on the same port. `page`: the server can be watched. `tls`: for HTTPS.
    """

    allowed: bool = True
    address: str = "0.0.0.0"
    port: int = 8000
    reuse_port: bool = False
    page: bool = True
    max_body_bytes: int = MAX_BODY_BYTES
    restrictions: Restrictions = field(default_factory=Restrictions)
    tls: TlsFiles | None = None
    warnings: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        """What HTTP listens on: "host:port"; empty if it is not served."""
        return listen_target(self.address, self.port) if self.allowed else ""


def add_http_flags(parser: argparse._ArgumentGroup) -> None:
    """Define the flags."""
    add = parser.add_argument
    add("--allow-http", type=boolean, default=HttpOptions.allowed, metavar="BOOL", help="serve HTTP (true)")
    add("--http-port", type=port, default=HttpOptions.port, metavar="PORT",
        help="port to listen on, 0 for any free one (%(default)s)")  # fmt: skip
    add("--http-address", default=HttpOptions.address, metavar="HOST", help="address to listen on (%(default)s)")
    add("--reuse-http-port", type=boolean, default=False, metavar="BOOL",
        help="let several servers listen on the same port; the kernel shares out the connections (false)")  # fmt: skip
    add("--allow-page", type=boolean, default=HttpOptions.page, metavar="BOOL",
        help="show cores, models and jobs: the page / and what `gangway top` reads (true)")  # fmt: skip
    add("--http-max-input-size", type=integer(1), default=MAX_BODY_BYTES, metavar="BYTES",
        help="longest body of a request, also when it is inflated (%(default)s)")  # fmt: skip
    add("--http-restricted-api", type=restriction, action="append", default=[],
        metavar="CATEGORY,...:KEY=VALUE|@FILE",
        help="serve these routes only to clients that send the header KEY: VALUE; may be given several times, or be "
        f"lines of a file; categories: {', '.join(Category)}")  # fmt: skip
    _add_tls_flags(parser, "http")


def read_http(arguments: argparse.Namespace) -> HttpOptions:
    """Return the values. Raises OptionError."""
    tls, warnings = _tls(arguments, "http")
    return HttpOptions(
        allowed=arguments.allow_http,
        address=arguments.http_address,
        port=arguments.http_port,
        reuse_port=arguments.reuse_http_port,
        page=arguments.allow_page,
        max_body_bytes=arguments.http_max_input_size,
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

    allow: bool = True
    address: str = "0.0.0.0"
    port: int = 8002
    interval_ms: int = 2000
    cpu: bool = True
    counters: bool = True
    histograms: bool = False
    reuse_port: bool = False

    @property
    def target(self) -> str:
        """Where metrics are served: "host:port"; empty if nowhere."""
        return listen_target(self.address, self.port) if self.allow else ""


def add_metrics_flags(parser: argparse._ArgumentGroup) -> None:
    """Define the flags."""
    add = parser.add_argument
    add("--allow-metrics", type=boolean, default=MetricsOptions.allow, metavar="BOOL",
        help="serve Prometheus metrics (true)")  # fmt: skip
    add("--metrics-port", type=port, default=MetricsOptions.port, metavar="PORT",
        help="port of /metrics, 0 for any free one (%(default)s)")  # fmt: skip
    add("--metrics-address", default="", metavar="HOST", help="address of /metrics (that of HTTP)")
    add("--metrics-interval-ms", type=integer(1), default=MetricsOptions.interval_ms, metavar="MS",
        help="shortest time that nv_cpu_utilization is a mean of (%(default)s)")  # fmt: skip
    add("--allow-cpu-metrics", type=boolean, default=MetricsOptions.cpu, metavar="BOOL",
        help="serve CPU and memory of the machine (true)")  # fmt: skip
    add("--metrics-config", type=_setting, action="append", default=[], metavar="KEY=VALUE",
        help=f"{COUNTERS}=false: no sums of latencies; {HISTOGRAMS}=true: Triton's histogram, too")  # fmt: skip


def read_metrics(arguments: argparse.Namespace) -> MetricsOptions:
    """Return the values."""
    settings = dict(arguments.metrics_config)
    return MetricsOptions(
        allow=arguments.allow_metrics,
        address=arguments.metrics_address or arguments.http_address,
        port=arguments.metrics_port,
        interval_ms=arguments.metrics_interval_ms,
        cpu=arguments.allow_cpu_metrics,
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
