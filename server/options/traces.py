"""Flags of traces of requests."""

import argparse

from gangway.server.options.values import OptionError
from gangway.server.tracing.settings import TraceConfig, trace_config_of

TITLE = "traces"


def add_flags(parser: argparse._ArgumentGroup) -> None:
    """Define the flags."""
    parser.add_argument("--trace-config", action="append", default=[], metavar="[MODE,]SETTING=VALUE",
        help="which requests are traced, may be given several times: level=TIMESTAMPS, rate=N, count=N, mode=MODE;"
        " triton,file=FILE; triton,log-frequency=N; opentelemetry,url=URL; opentelemetry,resource=KEY=VALUE;"
        " opentelemetry,bsp_max_queue_size=N and others (none)")  # fmt: skip


def read(arguments: argparse.Namespace) -> TraceConfig:
    """Return the values. Raises OptionError for what makes no sense or cannot be done."""
    try:
        return trace_config_of(arguments.trace_config)
    except ValueError as error:
        raise OptionError("--trace-config", str(error)) from None
