"""Flags of tritonserver that change nothing here, and flags that ask for what this server does not do.

The first are accepted, so that a command line made for Triton starts; a warning says once that they have no effect. The
second are refused with the reason, but for the values that ask for nothing.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from gangway.server.options.values import FlagGroup, boolean, integer

TITLE = "accepted for compatibility, without effect"
REFUSED_TITLE = "flags of tritonserver that are refused"
_GPU = "no GPU is used"
_LIBRARIES = "no shared libraries are loaded"
_OBJECTS = "no such objects are pooled"
_SAGEMAKER = "SageMaker's protocol is not served"
_VERTEX = "Vertex AI's protocol is not served"


@dataclass(frozen=True)
class Flag:
    """A flag by its name, what its argument must be, and why it has no effect or is refused."""

    name: str
    metavar: str
    reason: str
    parse: Callable[[str], Any] = str


ACCEPTED = (
    Flag("--allow-gpu-metrics", "BOOL", _GPU, boolean),
    Flag("--backend-directory", "DIR", _LIBRARIES),
    Flag("--buffer-manager-thread-count", "N", "tensors are copied once, by the thread that got them", integer(0)),
    Flag("--cache-directory", "DIR", _LIBRARIES),
    Flag("--cuda-memory-pool-byte-size", "GPU:BYTES", _GPU),
    Flag("--cuda-virtual-address-size", "GPU:BYTES", _GPU),
    Flag("--enable-peer-access", "BOOL", _GPU, boolean),
    Flag("--grpc-header-forward-pattern", "REGEX", "no model reads parameters of requests"),
    Flag("--grpc-infer-allocation-pool-size", "N", _OBJECTS, integer(0)),
    Flag("--grpc-infer-thread-count", "N", "a request in flight has a thread", integer(1)),
    Flag("--grpc-max-response-pool-size", "N", _OBJECTS, integer(1)),
    Flag("--http-header-forward-pattern", "REGEX", "no model reads parameters of requests"),
    Flag("--http-thread-count", "N", "a request in flight has a thread", integer(1)),
    Flag("--min-supported-compute-capability", "X", _GPU, float),
    Flag("--model-load-gpu-limit", "GPU:FRACTION", _GPU),
    Flag("--model-load-retry-count", "N", "a second try would fail as the first one did", integer(0)),
    Flag("--model-load-thread-count", "N", "models are compiled one at a time, beside the requests", integer(1)),
    Flag("--pinned-memory-pool-byte-size", "BYTES", _GPU, integer(0, (1 << 63) - 1)),
    Flag("--repoagent-directory", "DIR", _LIBRARIES),
    Flag("--sagemaker-port", "PORT", _SAGEMAKER),
    Flag("--sagemaker-safe-port-range", "PORT-PORT", _SAGEMAKER),
    Flag("--sagemaker-thread-count", "N", _SAGEMAKER),
    Flag("--vertex-ai-default-model", "NAME", _VERTEX),
    Flag("--vertex-ai-port", "PORT", _VERTEX),
    Flag("--vertex-ai-thread-count", "N", _VERTEX),
)

# `parse` tells whether the argument asks for something.
REFUSED = (
    Flag("--allow-sagemaker", "BOOL", f"{_SAGEMAKER}; false is accepted", boolean),
    Flag("--allow-vertex-ai", "BOOL", f"{_VERTEX}; false is accepted", boolean),
    Flag("--host-policy", "POLICY,SETTING=VALUE", "one worker is pinned to each core; choose them with --cores"),
    Flag("--model-config-name", "NAME", "a model's configuration is config.pbtxt"),
    Flag("--model-namespacing", "BOOL", "a model's name is unique among all repositories; false is accepted", boolean),
    Flag("--response-cache-byte-size", "BYTES", "deprecated; use --cache-config=local,size=BYTES"),
    Flag("--strict-model-config", "BOOL", "deprecated; use --disable-auto-complete-config; false is accepted", boolean),
    Flag("--trace-count", "N", "deprecated; use --trace-config=count=N"),
    Flag("--trace-file", "FILE", "deprecated; use --trace-config=triton,file=FILE"),
    Flag("--trace-level", "LEVEL", "deprecated; use --trace-config=level=LEVEL"),
    Flag("--trace-log-frequency", "N", "deprecated; use --trace-config=triton,log-frequency=N"),
    Flag("--trace-rate", "N", "deprecated; use --trace-config=rate=N"),
)


@dataclass(frozen=True)
class CompatibilityOptions:
    """`warnings`: a sentence for each flag that was given and has no effect."""

    warnings: tuple[str, ...] = ()


class _Accept(argparse.Action):
    """Remembers that a flag was given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        given = getattr(namespace, self.dest)
        if self.option_strings[0] not in given:
            setattr(namespace, self.dest, (*given, self.option_strings[0]))


class _Refuse(argparse.Action):
    """Ends with the reason, unless the argument asks for nothing."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if values is not False:
            refuse(self)


def refuse(action: argparse.Action) -> NoReturn:
    """End with what the help says of the flag."""
    raise argparse.ArgumentError(action, f"is not supported: {action.help}")


def add_flags(parser: argparse._ArgumentGroup) -> None:
    """Define the flags that are accepted."""
    for flag in ACCEPTED:
        parser.add_argument(flag.name, action=_Accept, dest="without_effect", default=(), type=flag.parse,
            metavar=flag.metavar, help=flag.reason)  # fmt: skip


def add_refused_flags(parser: argparse._ArgumentGroup) -> None:
    """Define the flags that are refused."""
    for flag in REFUSED:
        parser.add_argument(flag.name, action=_Refuse, dest="refused", type=flag.parse, metavar=flag.metavar,
            help=flag.reason)  # fmt: skip


def read(arguments: argparse.Namespace) -> CompatibilityOptions:
    """Return the values."""
    reasons = {flag.name: flag.reason for flag in ACCEPTED}
    return CompatibilityOptions(tuple(f"{name} has no effect: {reasons[name]}" for name in arguments.without_effect))


COMPATIBILITY = FlagGroup(TITLE, add_flags, read)
