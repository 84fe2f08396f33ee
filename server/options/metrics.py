"""Flags of the metrics' port."""

import argparse
from argparse import ArgumentTypeError
from dataclasses import dataclass

from gangway.server.addresses import listen_target
from gangway.server.options.values import boolean, integer, port

TITLE = "metrics"
COUNTERS, HISTOGRAMS = "counter_latencies", "histogram_latencies"
_SUMMARIES = ("summary_latencies", "summary_quantiles")
_NO_SUMMARIES = "summaries are not served: use the histograms gangway_*_duration_seconds, which add up over servers"


@dataclass(frozen=True)
class MetricsOptions:
    """Whether metrics are served, where (port 0: any free one), and which.

    `interval_ms`: over so long at least the machine's CPU utilization is a mean. `cpu`: the machine's metrics.
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


def add_flags(parser: argparse._ArgumentGroup) -> None:
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


def read(arguments: argparse.Namespace) -> MetricsOptions:
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
