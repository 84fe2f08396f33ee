"""Flags of the log."""

import argparse
import logging
from dataclasses import dataclass

from gangway.server.options.values import integer

TITLE = "log"


@dataclass(frozen=True)
class LogOptions:
    """`verbose` 0: events; 1 and more: details."""

    verbose: int = 0


def add_flags(parser: argparse._ArgumentGroup) -> None:
    """Define the flags."""
    parser.add_argument("--log-verbose", type=integer(0), default=LogOptions.verbose, metavar="LEVEL",
        help="0: events; 1 and more: details (%(default)s)")  # fmt: skip


def read(arguments: argparse.Namespace) -> LogOptions:
    """Return the values."""
    return LogOptions(verbose=arguments.log_verbose)


def log_level(options: LogOptions) -> int:
    """Return the standard library's level."""
    return logging.DEBUG if options.verbose > 0 else logging.INFO
