"""Flags of the model repository."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from gangway.server.options.values import folder

TITLE = "model repository"


@dataclass(frozen=True)
class RepositoryOptions:
    """`folders` hold one folder per model."""

    folders: tuple[Path, ...] = ()


def add_flags(parser: argparse._ArgumentGroup) -> None:
    """Define the flags."""
    parser.add_argument("--model-repository", "--model-store", action="append", required=True, type=folder,
        metavar="DIR", help="folder of models; may be given several times")  # fmt: skip


def read(arguments: argparse.Namespace) -> RepositoryOptions:
    """Return the values."""
    return RepositoryOptions(folders=tuple(arguments.model_repository))
