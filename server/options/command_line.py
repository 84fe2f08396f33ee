"""The command line of `gangway serve`: its parser, and all of its values by group."""

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from gangway.server.addresses import UNIX
from gangway.server.log_settings import LogSettings
from gangway.server.options.compatibility import (
    COMPATIBILITY,
    REFUSED_TITLE,
    CompatibilityOptions,
    add_refused_flags,
)
from gangway.server.options.endpoints import GRPC, HTTP, METRICS, GrpcOptions, HttpOptions, MetricsOptions
from gangway.server.options.server import (
    GENERAL,
    LOGS,
    MODELS,
    REPOSITORY,
    TRACES,
    GeneralOptions,
    ModelOptions,
    RepositoryOptions,
)
from gangway.server.options.values import FlagGroup, OptionError
from gangway.server.tracing.settings import TraceConfig

_VISIBLE = "every user of this machine can read the key in the list of processes; @FILE has it read from a file"


@dataclass(frozen=True)
class ServeOptions:
    """What the command line said. Every value has a default, so that a test names only what it is about."""

    general: GeneralOptions = field(default_factory=GeneralOptions)
    repository: RepositoryOptions = field(default_factory=RepositoryOptions)
    models: ModelOptions = field(default_factory=ModelOptions)
    grpc: GrpcOptions = field(default_factory=GrpcOptions)
    http: HttpOptions = field(default_factory=HttpOptions)
    metrics: MetricsOptions = field(default_factory=MetricsOptions)
    traces: TraceConfig = field(default_factory=TraceConfig)
    logs: LogSettings = field(default_factory=LogSettings)
    compatibility: CompatibilityOptions = field(default_factory=CompatibilityOptions)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the log shall say once: flags that have no effect, what is left open, secrets that others can read."""
        given = (*self.compatibility.warnings, *self.models.warnings, *self.grpc.warnings)
        return (*given, *self._open_elsewhere(), *self._visible())

    def _open_elsewhere(self) -> Iterator[str]:
        """Yield a sentence for each protocol that leaves open what the other one restricts."""
        kinds = (
            (self.grpc.allowed, self.grpc.restrictions, "gRPC", "--grpc-restricted-protocol"),
            (self.http.allowed, self.http.restrictions, "HTTP", "--http-restricted-api"),
        )
        for (_, restricted, _, flag), (served, others, protocol, other) in (kinds, kinds[::-1]):
            if served and (left := restricted.categories - others.categories):
                names = ", ".join(sorted(left))
                yield f"{flag} restricts {names}, which {protocol} leaves open to everyone: {other} restricts it"

    def _visible(self) -> Iterator[str]:
        """Yield a sentence for each flag whose value on the command line is a secret."""
        given = {"--grpc-restricted-protocol": self.grpc.restrictions, "--http-restricted-api": self.http.restrictions}
        for flag, restrictions in given.items():
            if restrictions.is_visible:
                yield f"{flag}: {_VISIBLE}"


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
# By their fields in ServeOptions, in the order of the help.
GROUPS: Mapping[str, FlagGroup] = {
    "repository": REPOSITORY,
    "models": MODELS,
    "general": GENERAL,
    "grpc": GRPC,
    "http": HTTP,
    "metrics": METRICS,
    "traces": TRACES,
    "logs": LOGS,
    "compatibility": COMPATIBILITY,
}


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
    for group in GROUPS.values():
        group.add(parser.add_argument_group(group.title))
    add_refused_flags(parser.add_argument_group(REFUSED_TITLE))
    return parser


def parse_options(argv: list[str]) -> ServeOptions:
    """Return the options. Leaves with a message and status 2 (SystemExit) when they make no sense."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    try:
        options = ServeOptions(**{name: group.read(arguments) for name, group in GROUPS.items()})
        check_front_ends(options)
    except OptionError as error:
        parser.error(f"argument {error.flag}: {error}")
    return options


def check_front_ends(options: ServeOptions) -> None:
    """Raise OptionError if several front ends cannot share what they are to listen on."""
    if options.general.front_ends > 1 and options.grpc.target.startswith(UNIX):
        raise OptionError("--front-ends", f"only one can listen on {options.grpc.target}")
