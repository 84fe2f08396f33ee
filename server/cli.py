"""`gangway`: one command line, a module per command, imported only when it is asked for."""

import importlib
import sys
from importlib.metadata import version
from typing import NamedTuple


class Command(NamedTuple):
    """A subcommand: the module whose `main(argv)` runs it, and its line in the help."""

    module: str
    summary: str


COMMANDS = {
    "serve": Command("gangway.server.serve_command", "serve a model repository over gRPC and HTTP"),
    "compile": Command("gangway.compiler.command", "compile a model and show its layers"),
    "profile": Command("gangway.server.profile_command", "measure a model's layers on this machine"),
    "plan": Command("gangway.server.plan_command", "show how batches of a measured model are split over cores"),
    "tune": Command("gangway.server.tune_command", "find versions of a model's layers worth having on this machine"),
    "simulate": Command("gangway.simulator.command", "run scheduling policies on a modelled machine of N cores"),
    "report": Command("gangway.server.report.command", "draw what was measured of a model"),
    "zoo": Command("gangway.zoo.command", "write example models with random weights"),
    "perf": Command("gangway.clients.perf.command", "load a server with several models, and find the rate it carries"),
    "client": Command("gangway.clients.command", "send one inference and show the answer and its times"),
}

HELP = """usage: gangway COMMAND [OPTIONS]

Gangway serves ONNX models on CPUs that many models share. It speaks Triton's gRPC protocol.

commands:
{commands}

options:
  -h, --help   show this text; `gangway COMMAND --help` explains a command
  --version    show the version

two commands to start with:
  gangway zoo models
  gangway serve --model-repository models
"""


def help_text() -> str:
    """Return what `gangway --help` prints."""
    return HELP.format(commands="\n".join(f"  {name:<9}  {command.summary}" for name, command in COMMANDS.items()))


def main(argv: list[str] | None = None) -> int:
    """Run one command; return the exit status: 0 well, 1 failed, 2 wrong usage, 130 interrupted."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(help_text(), end="")
        return 0 if arguments else 2
    name, *rest = arguments
    if name == "--version":
        print(f"gangway {version('gangway-serve')}")
        return 0
    if name not in COMMANDS:
        print(f"gangway: unknown command {name!r}; known: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return run(name, rest)


def run(name: str, arguments: list[str]) -> int:
    """Run a command; what a user can put right (a missing file, no permission) is one line, not a traceback."""
    try:
        return int(importlib.import_module(COMMANDS[name].module).main(arguments) or 0)
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        print(f"gangway {name}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
