"""`gangway`: one command line, a module per command, imported only when it is asked for."""

import importlib
import io
import os
import sys
from importlib.metadata import version

from gangway.base.commands import COMMANDS
from gangway.base.extras import EXTRAS, install_command
from gangway.base.suggestion import did_you_mean
from gangway.server.system import drop_unwritable

HELP = """usage: gangway COMMAND [OPTIONS]

Gangway serves ONNX models on CPUs that many models share. It speaks Triton's protocols.

commands:
{commands}

options:
  -h, --help   show this text; `gangway COMMAND --help` explains a command
  --version    show the version

three commands to start with:
  gangway zoo models
  gangway serve models
  gangway client mlp
"""


def help_text() -> str:
    """Return what `gangway --help` prints."""
    return HELP.format(commands="\n".join(f"  {name:<10}  {command.summary}" for name, command in COMMANDS.items()))


def main(argv: list[str] | None = None) -> int:
    """Run one command; return the exit status: 0 well, 1 failed, 2 wrong usage, 130 interrupted."""
    _open_streams()
    try:
        return _main(sys.argv[1:] if argv is None else argv)
    except OSError:  # of printing: nobody reads the output
        return 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            drop_unwritable(stream)


def _main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(help_text(), end="")
        return 0 if arguments else 2
    name, *rest = arguments
    if name == "--version":
        print(f"gangway {version('gangway-serve')}")
        return 0
    if name not in COMMANDS:
        near = did_you_mean(name, COMMANDS) or f"; known: {', '.join(COMMANDS)}"
        print(f"gangway: unknown command {name!r}{near}", file=sys.stderr)
        return 2
    return run(name, rest)


def run(name: str, arguments: list[str]) -> int:
    """Run a command; what a user can put right (a missing file or package, no permission) is one line, no traceback."""
    try:
        status = int(importlib.import_module(COMMANDS[name].module).main(arguments) or 0)
        sys.stdout.flush()  # a full disk is said now, not by the interpreter at its end
        return status
    except KeyboardInterrupt:
        return 130
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        is_extra = isinstance(error, ModuleNotFoundError) and package in EXTRAS
        reason = f"needs {package}: {install_command([package])}" if is_extra else f"{error}; install Gangway again"
        print(f"gangway {name}: {reason}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read the output has seen enough
        return 1
    except OSError as error:
        print(f"gangway {name}: {error}", file=sys.stderr)
        return 1


def _open_streams() -> None:
    """Open descriptors 0, 1 and 2, so that no socket or segment gets their numbers. Escape what cannot be encoded."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest number that is free
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 - for ever
        stream = getattr(sys, name)
        if number and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
