"""Flags of the log."""

import argparse
from pathlib import Path

from gangway.server.log_settings import FORMATS, LogSettings
from gangway.server.options.values import OptionError, boolean, integer

TITLE = "log"


def add_flags(parser: argparse._ArgumentGroup) -> None:
    """Define the flags."""
    add = parser.add_argument
    for name, what in (("info", "events"), ("warning", "warnings"), ("error", "errors")):
        add(f"--log-{name}", type=boolean, default=True, metavar="BOOLEAN", help=f"log {what} (true)")
    add("--log-verbose", type=_verbose, default=0, metavar="LEVEL", help="log details: 0 none, 1 and more all (0)")
    add("--log-format", choices=FORMATS, default="default",
        help="form of a line of the log; json: an object per line (default)")  # fmt: skip
    add("--log-file", default="", metavar="FILE",
        help="write the log there instead of to standard error; opened again when it has been moved away")  # fmt: skip


def read(arguments: argparse.Namespace) -> LogSettings:
    """Return the values. Raises OptionError if the file cannot be written."""
    if arguments.log_file:
        try:
            Path(arguments.log_file).open("ab").close()
        except OSError as error:
            raise OptionError("--log-file", f"{arguments.log_file}: {error.strerror}") from None
    return LogSettings(
        file=arguments.log_file,
        info=arguments.log_info,
        warning=arguments.log_warning,
        error=arguments.log_error,
        verbose_level=arguments.log_verbose,
        format=arguments.log_format,
    )


def _verbose(text: str) -> int:
    return int(boolean(text)) if text.lower() in ("true", "false") else integer(0)(text)
