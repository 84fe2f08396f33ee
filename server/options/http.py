"""Flags of the HTTP server."""

import argparse
from dataclasses import dataclass

TITLE = "HTTP"


@dataclass(frozen=True)
class HttpOptions:
    """None yet."""


def add_flags(parser: argparse._ArgumentGroup) -> None:
    """Define the flags."""


def read(arguments: argparse.Namespace) -> HttpOptions:
    """Return the values."""
    return HttpOptions()
