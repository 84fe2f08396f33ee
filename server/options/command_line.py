"""The command line of `gangway serve`: its parser, all of its values by group, and how a front end gets them.

Flags of tritonserver that change nothing here are accepted, so that a command line made for Triton starts. Flags that
ask for what this server does not do are refused.
"""

import argparse
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gangway.base.command_line import CommandParser
from gangway.base.flags import OptionError, add_flags, common_flags, from_flags, read_flags
from gangway.base.numbers import integer
from gangway.base.python_process import start_of
from gangway.server.access import UNIX
from gangway.server.messages import LogSettings
from gangway.server.options.endpoints import GrpcOptions, HttpOptions, MetricsOptions
from gangway.server.options.server import (
    AccessLogOptions,
    GeneralOptions,
    LogFlags,
    ModelOptions,
    RepositoryOptions,
    TraceFlags,
)
from gangway.server.options.values import boolean
from gangway.server.process_options import as_stdin
from gangway.server.tracing.settings import TraceConfig

ACCEPTED_TITLE = "accepted for compatibility, without effect"
REFUSED_TITLE = "flags of tritonserver that are refused"
_GPU = "no GPU is used"
_LIBRARIES = "no shared libraries are loaded"
_OBJECTS = "no such objects are pooled"
_SAGEMAKER = "SageMaker's protocol is not served"
_VERTEX = "Vertex AI's protocol is not served"


class TritonFlag(msgspec.Struct, frozen=True):
    """A flag by its name, what its argument must be, and why it has no effect or is refused."""

    name: str
    metavar: str
    reason: str
    parse: Callable[[str], Any] = str


ACCEPTED = (
    TritonFlag("--allow-gpu-metrics", "BOOL", _GPU, boolean),
    TritonFlag("--backend-directory", "DIR", _LIBRARIES),
    TritonFlag(
        "--buffer-manager-thread-count", "N", "tensors are copied once, by the thread that got them", integer(0)
    ),
    TritonFlag("--cache-directory", "DIR", _LIBRARIES),
    TritonFlag("--cuda-memory-pool-byte-size", "GPU:BYTES", _GPU),
    TritonFlag("--cuda-virtual-address-size", "GPU:BYTES", _GPU),
    TritonFlag("--enable-peer-access", "BOOL", _GPU, boolean),
    TritonFlag("--grpc-infer-allocation-pool-size", "N", _OBJECTS, integer(0)),
    TritonFlag("--grpc-infer-thread-count", "N", "an event loop serves all calls", integer(1)),
    TritonFlag("--grpc-max-response-pool-size", "N", _OBJECTS, integer(1)),
    TritonFlag("--http-thread-count", "N", "an event loop serves all connections", integer(1)),
    TritonFlag("--min-supported-compute-capability", "X", _GPU, float),
    TritonFlag("--model-load-gpu-limit", "GPU:FRACTION", _GPU),
    TritonFlag("--model-load-retry-count", "N", "a second try would fail as the first one did", integer(0)),
    TritonFlag("--pinned-memory-pool-byte-size", "BYTES", _GPU, integer(0, (1 << 63) - 1)),
    TritonFlag("--repoagent-directory", "DIR", _LIBRARIES),
    TritonFlag("--sagemaker-port", "PORT", _SAGEMAKER),
    TritonFlag("--sagemaker-safe-port-range", "PORT-PORT", _SAGEMAKER),
    TritonFlag("--sagemaker-thread-count", "N", _SAGEMAKER),
    TritonFlag("--vertex-ai-default-model", "NAME", _VERTEX),
    TritonFlag("--vertex-ai-port", "PORT", _VERTEX),
    TritonFlag("--vertex-ai-thread-count", "N", _VERTEX),
)

# `parse` tells whether the argument asks for something.
REFUSED = (
    TritonFlag("--allow-sagemaker", "BOOL", f"{_SAGEMAKER}; false is accepted", boolean),
    TritonFlag("--allow-vertex-ai", "BOOL", f"{_VERTEX}; false is accepted", boolean),
    TritonFlag("--host-policy", "POLICY,SETTING=VALUE", "one worker is pinned to each core; choose them with --cores"),
    TritonFlag(
        "--model-namespacing", "BOOL", "a model's name is unique among all repositories; false is accepted", boolean
    ),
    TritonFlag("--response-cache-byte-size", "BYTES", "deprecated; use --cache-config=local,size=BYTES"),
    TritonFlag(
        "--strict-model-config", "BOOL", "deprecated; use --disable-auto-complete-config; false is accepted", boolean
    ),
    TritonFlag("--trace-count", "N", "deprecated; use --trace-config=count=N"),
    TritonFlag("--trace-file", "FILE", "deprecated; use --trace-config=triton,file=FILE"),
    TritonFlag("--trace-level", "LEVEL", "deprecated; use --trace-config=level=LEVEL"),
    TritonFlag("--trace-log-frequency", "N", "deprecated; use --trace-config=triton,log-frequency=N"),
    TritonFlag("--trace-rate", "N", "deprecated; use --trace-config=rate=N"),
)


class _Accept(argparse.Action):
    """Remembers that a flag was given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        given = getattr(namespace, self.dest, ())
        if self.option_strings[0] not in given:
            setattr(namespace, self.dest, (*given, self.option_strings[0]))


def _add_accepted_flags(parser: argparse._ArgumentGroup) -> None:
    for flag in ACCEPTED:
        parser.add_argument(flag.name, action=_Accept, dest="without_effect", default=(), type=flag.parse,
            metavar=flag.metavar, help=flag.reason)  # fmt: skip


def _add_refused_flags(parser: argparse._ArgumentGroup) -> None:
    for flag in REFUSED:
        parser.add_argument(flag.name, type=_refused(flag), metavar=flag.metavar, help=flag.reason)


def _refused(flag: TritonFlag) -> Callable[[str], bool]:
    """Return a type of arguments that says why there are none, unless one asks for nothing."""

    def parse(text: str) -> bool:
        if flag.parse(text) is not False:
            raise argparse.ArgumentTypeError(f"is not supported: {flag.reason}")
        return False

    return parse


def _without_effect(arguments: argparse.Namespace) -> tuple[str, ...]:
    reasons = {flag.name: flag.reason for flag in ACCEPTED}
    return tuple(f"{name} has no effect: {reasons[name]}" for name in arguments.without_effect)


@dataclass(frozen=True)
class CompatibilityOptions:
    """`warnings`: a sentence for each flag that was given and has no effect."""

    warnings: tuple[str, ...] = from_flags("", _without_effect, _add_accepted_flags, default=())


_VISIBLE = "every user of this machine can read the key in the list of processes; @FILE has it read from a file"


@dataclass(frozen=True)
class ServeOptions:
    """What the command line said. Every value has a default, so that a test names only what it is about."""

    repository: RepositoryOptions = field(default_factory=RepositoryOptions)
    models: ModelOptions = field(default_factory=ModelOptions)
    general: GeneralOptions = field(default_factory=GeneralOptions)
    grpc: GrpcOptions = field(default_factory=GrpcOptions)
    http: HttpOptions = field(default_factory=HttpOptions)
    metrics: MetricsOptions = field(default_factory=MetricsOptions)
    traces: TraceConfig = field(default_factory=TraceConfig)
    logs: LogSettings = field(default_factory=LogSettings)
    access_log: AccessLogOptions = field(default_factory=AccessLogOptions)
    compatibility: CompatibilityOptions = field(default_factory=CompatibilityOptions)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the log shall say once: flags that have no effect, what is left open, secrets that others can read."""
        given = (*self.compatibility.warnings, *self.models.warnings, *self.grpc.warnings, *self.http.warnings)
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
Serve models over Triton's gRPC and HTTP protocols: ONNX files, and folders of
models (repositories).

A repository has one folder per model: NAME/VERSION/model.onnx and, if wanted,
NAME/config.pbtxt. Models that are not in the cache are compiled first.
`gangway zoo DIR` writes an example repository.
"""

EPILOG = """
examples:
  gangway serve model.onnx
  gangway serve models --http-port 9000
  gangway serve first=a/model.onnx second=b/model.onnx

The latency target of a model stands in its config.pbtxt:
  parameters { key: "qos_ms" value: { string_value: "15" } }   15 milliseconds
  parameters { key: "qos_ms" value: { string_value: "3x" } }   3 x latency alone

Every flag is also a variable (GANGWAY_HTTP_PORT=9000), and a key of a file:
a flag counts more than a variable, and a variable more than --config FILE.

SIGTERM, SIGINT, SIGQUIT and SIGHUP (unless ignored, as by nohup) refuse new
requests, finish the running ones and exit with 0.
"""

USAGE = "gangway serve MODELS... [OPTIONS]"
# The titles of flags in the help.
GROUPS: Mapping[str, type] = {
    "model repository": RepositoryOptions,
    "models": ModelOptions,
    "server": GeneralOptions,
    "gRPC": GrpcOptions,
    "HTTP": HttpOptions,
    "metrics": MetricsOptions,
    "traces": TraceFlags,
    "log": LogFlags,
    "access log": AccessLogOptions,
    ACCEPTED_TITLE: CompatibilityOptions,
}


def make_parser() -> CommandParser:
    """Return the parser of `gangway serve`."""
    parser = CommandParser(
        prog="gangway serve",
        usage=USAGE,
        common=[name for options in GROUPS.values() for name in common_flags(options)],
        usage_hint=f"usage: {USAGE}; --help-all lists all flags",
        description=DESCRIPTION,
        epilog=EPILOG,
        allow_abbrev=False,
    )
    for title, options in GROUPS.items():
        add_flags(options, parser.add_argument_group(title))
    _add_refused_flags(parser.add_argument_group(REFUSED_TITLE))
    return parser


def parse_options(argv: list[str]) -> ServeOptions:
    """Return the options. Leaves with a message and status 2 (SystemExit) when they make no sense."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    try:
        options = ServeOptions(
            read_flags(RepositoryOptions, arguments),
            read_flags(ModelOptions, arguments),
            read_flags(GeneralOptions, arguments),
            read_flags(GrpcOptions, arguments),
            read_flags(HttpOptions, arguments),
            read_flags(MetricsOptions, arguments),
            read_flags(TraceFlags, arguments).config,
            read_flags(LogFlags, arguments).settings,
            read_flags(AccessLogOptions, arguments),
            read_flags(CompatibilityOptions, arguments),
        )
        check_front_ends(options)
    except OptionError as error:
        parser.error(f"argument {error.flag}: {error}")
    return options


def check_front_ends(options: ServeOptions) -> None:
    """Raise OptionError if several front ends cannot share what they are to listen on."""
    if options.general.front_ends > 1 and options.grpc.target.startswith(UNIX):
        raise OptionError("--front-ends", f"only one can listen on {options.grpc.target}")


@dataclass(frozen=True)
class FrontEndOptions:
    """How the supervisor starts a front-end process: one dataclass, on its standard input.

    `serve` is the whole command line, so a new flag needs no further step: the front end reads
    `options.serve.GROUP.VALUE`. The other fields are what the supervisor adds. The descriptors are inherited. The io
    segment begins with `slots` request slots, its heap follows. `index` is the front end's number in the control
    segment. `address` is where gRPC listens, "host:port" (port 0: any; a successor gets its predecessor's). At most
    `slots` requests are in flight, further ones are answered UNAVAILABLE at once.

    `bell_fd`: the eventfd that the bell of the io segment's slot table names (-1: none is inherited). `trace_fd`: where
    traces go (-1: nowhere). `statistics_fd`: the table in which it counts (-1: its own memory). `custom_metrics_fds`:
    the table of what Python models count (empty: none). `cancellations_fd`: says to Python models which calls are over
    (-1: nowhere). `other_io_fds`: the io segments of other front ends. `regions_fd`: for having workers map regions
    (-1: they do not).
    """

    index: int
    control_fd: int
    io_fd: int
    supervisor_fd: int
    slots: int
    address: str
    bell_fd: int = -1
    trace_fd: int = -1
    regions_fd: int = -1
    statistics_fd: int = -1
    custom_metrics_fds: tuple[int, ...] = ()
    cancellations_fd: int = -1
    other_io_fds: tuple[int, ...] = ()
    serve: ServeOptions = field(default_factory=ServeOptions)

    def start(self, stderr: int | None = None) -> "subprocess.Popen[bytes]":
        """Start the process. `stderr`: a descriptor for its log, None for the standard error of this process."""
        start = start_of("gangway.server.serving.process")
        with as_stdin(self) as stdin:
            return subprocess.Popen(
                start.command, env=start.environment, pass_fds=self.descriptors, stdin=stdin, stderr=stderr
            )

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What the process must inherit."""
        optional = (self.bell_fd, self.trace_fd, self.regions_fd, self.statistics_fd, self.cancellations_fd)
        return (
            self.control_fd,
            self.io_fd,
            self.supervisor_fd,
            *self.other_io_fds,
            *self.custom_metrics_fds,
            *(fd for fd in optional if fd >= 0),
        )
