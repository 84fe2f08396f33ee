"""Flags of the metrics' port."""

import argparse
from dataclasses import dataclass

TITLE = "metrics"


@dataclass(frozen=True)
class MetricsOptions:
    """None yet."""


def add_flags(parser: argparse._ArgumentGroup) -> None:
    """Define the flags."""


def read(arguments: argparse.Namespace) -> MetricsOptions:
    """Return the values."""
    return MetricsOptions()
