"""The parser of `gangway serve`, made of the groups."""

import argparse

from gangway.server.options import general, grpc, http, logs, metrics, models, repository, traces
from gangway.server.options.serve_options import ServeOptions
from gangway.server.options.values import OptionError

DESCRIPTION = """
Serve every model of a repository over Triton's gRPC protocol.

A repository is a folder with one folder per model: NAME/VERSION/model.onnx and, if wanted, NAME/config.pbtxt.
Models that are not in the cache are compiled first. `gangway zoo DIR` writes an example repository.
"""

EPILOG = """
The latency target of a model stands in its config.pbtxt:
  parameters { key: "qos_ms" value: { string_value: "15" } }   15 milliseconds
  parameters { key: "qos_ms" value: { string_value: "3x" } }   three times its latency when it is alone on these cores

SIGTERM and SIGINT refuse new requests, finish the running ones and exit with 0.
"""

GROUPS = (repository, models, general, grpc, http, metrics, traces, logs)  # in the order of the help


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `gangway serve`."""
    parser = argparse.ArgumentParser(
        prog="gangway serve",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for group in GROUPS:
        group.add_flags(parser.add_argument_group(group.TITLE))
    return parser


def parse_options(argv: list[str]) -> ServeOptions:
    """Return the options. Leaves with a message and status 2 (SystemExit) when they make no sense."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    try:
        return ServeOptions(
            general=general.read(arguments),
            repository=repository.read(arguments),
            models=models.read(arguments),
            grpc=grpc.read(arguments),
            http=http.read(arguments),
            metrics=metrics.read(arguments),
            traces=traces.read(arguments),
            logs=logs.read(arguments),
        )
    except OptionError as error:
        parser.error(f"argument {error.flag}: {error}")
