"""Flags of the model repository, and of what in it is loaded."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gangway.server.options.values import OptionError, boolean, folder, seconds

TITLE = "model repository"
ALL_MODELS = "*"


@dataclass(frozen=True)
class RepositoryOptions:
    """`folders` hold one folder per model. `mode`: who decides what is loaded after the start.

    `load_models` (explicit only): names to load at the start; ALL_MODELS alone means every one. `complete_configs`:
    what a configuration leaves out is taken from the model. Times are in seconds, 0: never.
    """

    folders: tuple[Path, ...] = ()
    mode: Literal["none", "poll", "explicit"] = "none"
    poll_seconds: float = 15.0
    load_models: tuple[str, ...] = ()
    strict_readiness: bool = True
    exit_on_error: bool = False
    complete_configs: bool = True


def add_flags(parser: argparse._ArgumentGroup) -> None:
    """Define the flags."""
    add = parser.add_argument
    add("--model-repository", "--model-store", action="append", required=True, type=folder,
        metavar="DIR", help="folder of models; may be given several times")  # fmt: skip
    add("--model-control-mode", choices=("none", "poll", "explicit"), default=RepositoryOptions.mode,
        help="none: load every model at the start; poll: follow changes of the repository; "
        "explicit: load and unload what clients ask for (none)")  # fmt: skip
    add("--repository-poll-secs", type=seconds, default=RepositoryOptions.poll_seconds, metavar="SECONDS",
        help="poll: how often to look for changes, 0: never (15)")  # fmt: skip
    add("--load-model", action="append", default=[], metavar="NAME",
        help="explicit: load this model at the start; may be given several times; `*` alone: every one")  # fmt: skip
    add("--strict-readiness", type=boolean, default=RepositoryOptions.strict_readiness, metavar="BOOL",
        help="the server is ready only while every model is (true)")  # fmt: skip
    add("--exit-on-error", type=boolean, default=RepositoryOptions.exit_on_error, metavar="BOOL",
        help="end when a model cannot be loaded at the start; otherwise the others are served (false)")  # fmt: skip
    add("--disable-auto-complete-config", action="store_true",
        help="refuse a model whose config.pbtxt does not say everything, instead of asking the model")  # fmt: skip


def read(arguments: argparse.Namespace) -> RepositoryOptions:
    """Return the values."""
    names = tuple(dict.fromkeys(arguments.load_model))
    if names and arguments.model_control_mode != "explicit":
        raise OptionError("--load-model", "only with --model-control-mode=explicit")
    if ALL_MODELS in names and len(names) > 1:
        raise OptionError("--load-model", f"{ALL_MODELS} is possible only alone")
    return RepositoryOptions(
        folders=tuple(arguments.model_repository),
        mode=arguments.model_control_mode,
        poll_seconds=arguments.repository_poll_secs,
        load_models=names,
        strict_readiness=arguments.strict_readiness,
        exit_on_error=arguments.exit_on_error,
        complete_configs=not arguments.disable_auto_complete_config,
    )
