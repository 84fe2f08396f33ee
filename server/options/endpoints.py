"""Flags of what clients connect to: the gRPC server, the HTTP server, the port of the metrics."""

import argparse
import os
from argparse import ArgumentTypeError
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from gangway.base.flags import OptionError, flag, from_flags, nested
from gangway.base.numbers import integer
from gangway.server.access import UNIX, Category, Restrictions, TlsError, TlsFiles, check_files, listen_target
from gangway.server.options.values import boolean, pattern, port, readable_file, restriction, restrictions

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


def _grpc_address(address: str) -> str:
    if address.startswith(UNIX) and not 0 < len(os.fsencode(address.removeprefix(UNIX))) <= MAX_UNIX_PATH_BYTES:
        raise ValueError(f"the path of a socket has 1 to {MAX_UNIX_PATH_BYTES} bytes")
    return address


def _add_tls_flags(protocol: str, parser: argparse._ArgumentGroup) -> None:
    add = parser.add_argument
    add(f"--{protocol}-use-ssl", type=boolean, default=False, metavar="BOOL", help="speak TLS only (false)")
    add(f"--{protocol}-use-ssl-mutual", type=boolean, default=False, metavar="BOOL",
        help="speak TLS only, and only with clients whose certificate the root certificate signs (false)")  # fmt: skip
    add(f"--{protocol}-server-cert", type=readable_file, metavar="FILE", help="the server's certificate chain, PEM")
    add(f"--{protocol}-server-key", type=readable_file, metavar="FILE", help="its private key, PEM, not encrypted")
    add(f"--{protocol}-root-cert", type=readable_file, metavar="FILE",
        help="certificates that sign those of clients, PEM")  # fmt: skip


def _tls(protocol: str, arguments: argparse.Namespace) -> TlsFiles | None:
    """Return the files of TLS, None without it. Raises OptionError."""
    mutual, files = _tls_flags(protocol, arguments)
    if mutual is None:
        return None
    for name, file in files.items():
        if file is None and (mutual or name != "root-cert"):
            why = f"--{protocol}-use-ssl-mutual" if mutual else f"--{protocol}-use-ssl"
            raise OptionError(f"--{protocol}-{name}", f"is needed for {why}")
    certificate, key, root = files.values()
    tls = TlsFiles(certificate, key, root if mutual else None, mutual)
    try:
        check_files(tls)
    except TlsError as error:
        which = "root-cert" if error.file == tls.root else "server-cert"
        raise OptionError(f"--{protocol}-{which}", str(error)) from None
    return tls


def _tls_warnings(protocol: str, arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return what is said of files that have no effect."""
    mutual, files = _tls_flags(protocol, arguments)
    if mutual:
        return ()
    needed = f"--{protocol}-use-ssl" if mutual is None else f"--{protocol}-use-ssl-mutual"
    unused = [name for name, file in files.items() if file and (mutual is None or name == "root-cert")]
    return tuple(f"--{protocol}-{name} has no effect without {needed}=true" for name in unused)


def _tls_flags(protocol: str, arguments: argparse.Namespace) -> tuple[bool | None, dict[str, Any]]:
    """Return whether clients need a certificate (None: no TLS), and the files by the ends of their flags' names."""
    given = vars(arguments)
    mutual = given[f"{protocol}_use_ssl_mutual"]
    files = {name: given[f"{protocol}_{name.replace('-', '_')}"] for name in ("server-cert", "server-key", "root-cert")}
    return mutual or (False if given[f"{protocol}_use_ssl"] else None), files


@dataclass(frozen=True)
class GrpcOptions:
    """Where to listen (port 0: any free one; "unix:PATH" has no port), for which clients, and the longest message both
    ways.
    """

    allowed: bool = flag("--allow-grpc", True, type=boolean, metavar="BOOL", help="serve gRPC (true)")
    port: int = flag("--grpc-port", 8001, type=port, metavar="PORT",
        is_common=True, help="port to listen on, 0 for any free one (%(default)s)")  # fmt: skip
    address: str = flag("--grpc-address", "0.0.0.0", metavar="HOST", read=_grpc_address, is_common=True,
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
    restrictions: Restrictions = flag("--grpc-restricted-protocol", Restrictions(), type=restriction, action="append",
        unless_given=[], read=restrictions, metavar="CATEGORY,...:KEY=VALUE|@FILE",
        help="serve these methods only to clients that send the metadata triton-grpc-protocol-KEY: VALUE; may be given "
        f"several times, or be lines of a file; categories: {', '.join(Category)}")  # fmt: skip
    tls: TlsFiles | None = from_flags("", partial(_tls, "grpc"), partial(_add_tls_flags, "grpc"), default=None)
    keepalive: KeepaliveOptions = nested(KeepaliveOptions)
    warnings: tuple[str, ...] = from_flags("", partial(_tls_warnings, "grpc"), default=())

    @property
    def target(self) -> str:
        """What gRPC listens on: "host:port" or "unix:PATH"; nothing if it is not to be served."""
        if not self.allowed:
            return ""
        if self.address.startswith(UNIX):
            return self.address
        return listen_target(self.address, self.port)


MAX_BODY_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class HttpOptions:
    """Whether to serve HTTP, where to listen (port 0: any free one), the longest body, and which routes are restricted.

    `reuse_port`: other servers may listen on the same port. `page`: the server can be watched. `tls`: for HTTPS.
    """

    allowed: bool = flag("--allow-http", True, type=boolean, metavar="BOOL", help="serve HTTP (true)")
    port: int = flag("--http-port", 8000, type=port, metavar="PORT",
        is_common=True, help="port to listen on, 0 for any free one (%(default)s)")  # fmt: skip
    address: str = flag("--http-address", "0.0.0.0", metavar="HOST", is_common=True,
        help="address to listen on (%(default)s)")  # fmt: skip
    reuse_port: bool = flag("--reuse-http-port", False, type=boolean, metavar="BOOL",
        help="let several servers listen on the same port; the kernel shares out the connections (false)")  # fmt: skip
    page: bool = flag("--allow-page", True, type=boolean, metavar="BOOL",
        help="show cores, models and jobs: the page / and what `gangway top` reads (true)")  # fmt: skip
    header_forward_pattern: str = flag("--http-header-forward-pattern", "", type=pattern, metavar="REGEX",
        help="headers that are parameters of the request, too, for Python models: those in whose name, as the client"
        " writes it, it finds a match (none)")  # fmt: skip
    max_body_bytes: int = flag("--http-max-input-size", MAX_BODY_BYTES, type=integer(1), metavar="BYTES",
        help="longest body of a request, also when it is inflated (%(default)s)")  # fmt: skip
    restrictions: Restrictions = flag("--http-restricted-api", Restrictions(), type=restriction, action="append",
        unless_given=[], read=restrictions, metavar="CATEGORY,...:KEY=VALUE|@FILE",
        help="serve these routes only to clients that send the header KEY: VALUE; may be given several times, or be "
        f"lines of a file; categories: {', '.join(Category)}")  # fmt: skip
    tls: TlsFiles | None = from_flags("", partial(_tls, "http"), partial(_add_tls_flags, "http"), default=None)
    warnings: tuple[str, ...] = from_flags("", partial(_tls_warnings, "http"), default=())

    @property
    def target(self) -> str:
        """What HTTP listens on: "host:port"; empty if it is not served."""
        return listen_target(self.address, self.port) if self.allowed else ""


COUNTERS, HISTOGRAMS = "counter_latencies", "histogram_latencies"
_SUMMARIES = ("summary_latencies", "summary_quantiles")
_NO_SUMMARIES = "summaries are not served: use the histograms gangway_*_duration_seconds, which add up over servers"


def _add_metrics_address(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--metrics-address", default="", metavar="HOST", help="address of /metrics (that of HTTP)")


def _add_metrics_config(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--metrics-config", type=_setting, action="append", default=[], metavar="KEY=VALUE",
        help=f"{COUNTERS}=false: no sums of latencies; {HISTOGRAMS}=true: Triton's histogram, too")  # fmt: skip


def _metrics_setting(key: str, default: bool, arguments: argparse.Namespace) -> bool:
    return bool(dict(arguments.metrics_config).get(key, default))


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


@dataclass(frozen=True)
class MetricsOptions:
    """Whether metrics are served, where (port 0: any free one), and which.

    `interval_ms`: least time that the machine's CPU utilization is a mean of. `cpu`: the machine's metrics.
    `counters`: Triton's sums of latencies. `histograms`: Triton's histogram of the time to the first response.
    `reuse_port`: several front ends have the port.
    """

    allow: bool = flag("--allow-metrics", True, type=boolean, metavar="BOOL", help="serve Prometheus metrics (true)")
    port: int = flag("--metrics-port", 8002, type=port, metavar="PORT",
        is_common=True, help="port of /metrics, 0 for any free one (%(default)s)")  # fmt: skip
    address: str = from_flags("--metrics-address", lambda given: given.metrics_address or given.http_address,
        _add_metrics_address, default="0.0.0.0")  # fmt: skip
    interval_ms: int = flag("--metrics-interval-ms", 2000, type=integer(1), metavar="MS",
        help="shortest time that nv_cpu_utilization is a mean of (%(default)s)")  # fmt: skip
    cpu: bool = flag("--allow-cpu-metrics", True, type=boolean, metavar="BOOL",
        help="serve CPU and memory of the machine (true)")  # fmt: skip
    counters: bool = from_flags("", partial(_metrics_setting, COUNTERS, True), _add_metrics_config, default=True)
    histograms: bool = from_flags("", partial(_metrics_setting, HISTOGRAMS, False), default=False)
    reuse_port: bool = False

    @property
    def target(self) -> str:
        """Where metrics are served: "host:port"; empty if nowhere."""
        return listen_target(self.address, self.port) if self.allow else ""
