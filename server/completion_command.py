"""`gangway completion SHELL`: a script that makes a shell complete commands, flags, their choices and files."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from gangway.base.command_line import CommandParser, parser_of
from gangway.base.commands import COMMANDS

SHELLS = ("bash", "zsh", "fish")
EPILOG = """to have it in every shell:
  gangway completion bash > ~/.bash_completion.d/gangway   # and source it
  gangway completion zsh > ~/.zfunc/_gangway               # a folder of $fpath
  gangway completion fish > ~/.config/fish/completions/gangway.fish"""
FILES = ("FILE", "PATH", "MODELS", "NAME=FILE.npy")  # names of arguments that are files or folders
FOLDERS = ("DIR",)


def main(argv: list[str]) -> int:
    """Print the script; return the exit status."""
    parser = CommandParser(
        prog="gangway completion",
        description="Print a script that makes a shell complete the commands and flags of gangway.",
        epilog=EPILOG,
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    shell = parser.parse_args(argv).shell
    import shtab  # noqa: PLC0415 - an extra

    sys.stdout.write(shtab.complete(whole_parser(), shell))
    return 0


def whole_parser() -> argparse.ArgumentParser:
    """Return a parser of all commands that can be imported, whose files and folders are marked as shtab has it."""
    whole = argparse.ArgumentParser("gangway")
    whole.add_argument("--version", action="store_true", help="show the version")
    subparsers = whole.add_subparsers()
    for name, parser in _parsers():
        subparsers.add_parser(name, help=COMMANDS[name].summary, add_help=False, parents=[parser])
    return whole


def _parsers() -> Iterator[tuple[str, CommandParser]]:
    for name in COMMANDS:
        try:
            parser = parser_of(name)
        except ModuleNotFoundError as error:  # of an extra: without it the command does nothing but say so
            print(f"gangway completion: {name} is left out, it needs {error.name}", file=sys.stderr)
            continue
        for action in parser._actions:
            if (complete := _completion(action)) is not None:
                action.complete = complete  # type: ignore[attr-defined]
        yield name, parser


def _completion(action: argparse.Action) -> object:
    import shtab  # noqa: PLC0415 - an extra

    if action.metavar in FOLDERS:
        return shtab.DIRECTORY
    is_file = action.type is Path or (isinstance(action.metavar, str) and action.metavar in FILES)
    return shtab.FILE if is_file else None
