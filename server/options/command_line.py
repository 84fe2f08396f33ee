"""The parser of `gangway serve`, made of the groups."""

import argparse
import sys
from typing import NoReturn

from gangway.server.addresses import UNIX
from gangway.server.options import compatibility, general, grpc, http, logs, metrics, models, repository, traces
from gangway.server.options.serve_options import ServeOptions
from gangway.server.options.values import OptionError

DESCRIPTION = """
Serve every model of a repository over Triton's gRPC and HTTP protocols.

A repository is a folder with one folder per model: NAME/VERSION/model.onnx and, if wanted, NAME/config.pbtxt.
Models that are not in the cache are compiled first. `gangway zoo DIR` writes an example repository.
"""

EPILOG = """
The latency target of a model stands in its config.pbtxt:
  parameters { key: "qos_ms" value: { string_value: "15" } }   15 milliseconds
  parameters { key: "qos_ms" value: { string_value: "3x" } }   three times its latency when it is alone on these cores

SIGTERM and SIGINT refuse new requests, finish the running ones and exit with 0.
"""

USAGE = "gangway serve --model-repository DIR [OPTIONS]"
GROUPS = (repository, models, general, grpc, http, metrics, traces, logs, compatibility)  # in the order of the help


class Parser(argparse.ArgumentParser):
    """Does not list a hundred flags when one is wrong."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and leave with status 2."""
        print(f"gangway serve: error: {message}\nusage: {USAGE}; --help lists all options", file=sys.stderr)
        raise SystemExit(2)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `gangway serve`."""
    parser = Parser(
        prog="gangway serve",
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for group in GROUPS:
        group.add_flags(parser.add_argument_group(group.TITLE))
    compatibility.add_refused_flags(parser.add_argument_group(compatibility.REFUSED_TITLE))
    return parser


def parse_options(argv: list[str]) -> ServeOptions:
    """Return the options. Leaves with a message and status 2 (SystemExit) when they make no sense."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    try:
        options = ServeOptions(
            general=general.read(arguments),
            repository=repository.read(arguments),
            models=models.read(arguments),
            grpc=grpc.read(arguments),
            http=http.read(arguments),
            metrics=metrics.read(arguments),
            traces=traces.read(arguments),
            logs=logs.read(arguments),
            compatibility=compatibility.read(arguments),
        )
        check_front_ends(options)
    except OptionError as error:
        parser.error(f"argument {error.flag}: {error}")
    return options


def check_front_ends(options: ServeOptions) -> None:
    """Raise OptionError if several front ends cannot share what they are to listen on."""
    if options.general.front_ends > 1 and options.grpc.target.startswith(UNIX):
        raise OptionError("--front-ends", f"only one can listen on {options.grpc.target}")
