"""Flags of traces of requests."""

import argparse
from dataclasses import dataclass

TITLE = "traces"


@dataclass(frozen=True)
class TraceOptions:
    """None yet."""


def add_flags(parser: argparse._ArgumentGroup) -> None:
    """Define the flags."""


def read(arguments: argparse.Namespace) -> TraceOptions:
    """Return the values."""
    return TraceOptions()
