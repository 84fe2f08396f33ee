"""Flags of how models are executed: response cache, rate limiter, back ends."""

import argparse
from dataclasses import dataclass

TITLE = "models"


@dataclass(frozen=True)
class ModelOptions:
    """None yet."""


def add_flags(parser: argparse._ArgumentGroup) -> None:
    """Define the flags."""


def read(arguments: argparse.Namespace) -> ModelOptions:
    """Return the values."""
    return ModelOptions()
