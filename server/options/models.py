"""Flags of how models are executed: response cache, rate limiter, batches."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field

from gangway.artifact.format import Engine
from gangway.server.models.settings import RateLimits
from gangway.server.options.values import INT32_MAX, integer

TITLE = "models"
BATCH_SETTING = "default-max-batch-size"
BACKEND = Engine.ONNXRUNTIME.value
DEFAULT_MAX_BATCH_SIZE = 4  # Triton's for ONNX models with a symbolic first dimension and no config
CACHE_IMPLEMENTATION = "local"
RATE_LIMIT_MODES = ("off", "execution_count")
BATCHING_MODES = ("auto", "off")


@dataclass(frozen=True)
class ModelOptions:
    """`cache_bytes`: memory of the response cache; 0: there is none. `batching`: requests may be joined and split.

    `default_max_batch_size`: of models without a configuration whose first dimension may be a batch. `warnings`: a
    sentence for each setting that has no effect.
    """

    cache_bytes: int = 0
    rates: RateLimits = field(default_factory=RateLimits)
    batching: bool = True
    default_max_batch_size: int = DEFAULT_MAX_BATCH_SIZE
    warnings: tuple[str, ...] = ()


def add_flags(parser: argparse._ArgumentGroup) -> None:
    """Define the flags."""
    add = parser.add_argument
    add("--cache-config", type=_cache_bytes, default=0, metavar="local,size=BYTES",
        help="keep answers of models with `response_cache { enable: true }` in so much memory (none)")  # fmt: skip
    add("--rate-limit", choices=RATE_LIMIT_MODES, default=RATE_LIMIT_MODES[0],
        help="whether resources and priorities of instance groups count (%(default)s)")  # fmt: skip
    add("--rate-limit-resource", type=_resource, action="append", default=[], metavar="NAME:COUNT",
        help="how much there is of a resource; otherwise what the model needs that needs most of it")  # fmt: skip
    add("--backend-config", type=_backend_setting, action="append", default=[], metavar="[BACKEND,]SETTING=VALUE",
        help="default-max-batch-size=N: the batch of models without a configuration"
        f" ({DEFAULT_MAX_BATCH_SIZE}); other settings have no effect")  # fmt: skip
    add("--batching", choices=BATCHING_MODES, default=BATCHING_MODES[0],
        help="whether requests are joined to batches, and large ones split over gangs (%(default)s)")  # fmt: skip


def read(arguments: argparse.Namespace) -> ModelOptions:
    """Return the values."""
    enabled = arguments.rate_limit != RATE_LIMIT_MODES[0]
    rates = RateLimits(enabled, tuple(arguments.rate_limit_resource))
    ignored = {f"{backend},{name}".removeprefix(",") for backend, name, _ in arguments.backend_config}
    ignored -= {BATCH_SETTING, f"{BACKEND},{BATCH_SETTING}"}
    reason = "has no effect: config.pbtxt says how a model is executed"
    return ModelOptions(
        arguments.cache_config,
        rates,
        arguments.batching != BATCHING_MODES[1],
        _default_max_batch_size(arguments.backend_config),
        tuple(f"--backend-config={name} {reason}" for name in sorted(ignored)),
    )


def _default_max_batch_size(settings: Sequence[tuple[str, str, str]]) -> int:
    """Return the last one that is given; what is for the backend goes before what is for all."""
    found = {backend: int(value) for backend, name, value in settings if name == BATCH_SETTING}
    return found.get(BACKEND, found.get("", DEFAULT_MAX_BATCH_SIZE))


def _backend_setting(text: str) -> tuple[str, str, str]:
    """Read "BACKEND,SETTING=VALUE", or without the backend: then the first is empty."""
    setting, equals, value = text.partition("=")
    backend, _, name = setting.rpartition(",")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"expected '[BACKEND,]SETTING=VALUE', got '{text}'")
    if name == BATCH_SETTING:
        integer(0)(value)
    return backend, name, value


def _cache_bytes(text: str) -> int:
    """Read "local,size=1048576"."""
    implementation, _, setting = text.partition(",")
    if implementation != CACHE_IMPLEMENTATION:
        raise argparse.ArgumentTypeError(f"cache '{implementation}' is not supported, only '{CACHE_IMPLEMENTATION}'")
    name, _, size = setting.partition("=")
    if name != "size" or not _is_count(size):
        raise argparse.ArgumentTypeError(f"expected 'local,size=BYTES', got '{text}'")
    return int(size)


def _resource(text: str) -> tuple[str, int]:
    """Read "NAME:COUNT"."""
    name, _, count = text.partition(":")
    if ":" in count:
        raise argparse.ArgumentTypeError(f"'{text}' names a device, there is only one: expected 'NAME:COUNT'")
    if not name or not _is_count(count) or int(count) > INT32_MAX:
        raise argparse.ArgumentTypeError(f"expected 'NAME:COUNT', got '{text}'")
    return name, int(count)


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19
