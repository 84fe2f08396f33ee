"""Flags of how models are executed: response cache, rate limiter, batches."""

import argparse
from dataclasses import dataclass, field

from gangway.server.options.values import INT32_MAX
from gangway.server.rate_limits import RateLimits

TITLE = "models"
CACHE_IMPLEMENTATION = "local"
RATE_LIMIT_MODES = ("off", "execution_count")
BATCHING_MODES = ("auto", "off")


@dataclass(frozen=True)
class ModelOptions:
    """`cache_bytes`: memory of the response cache; 0: there is none. `batching`: requests may be joined and split."""

    cache_bytes: int = 0
    rates: RateLimits = field(default_factory=RateLimits)
    batching: bool = True


def add_flags(parser: argparse._ArgumentGroup) -> None:
    """Define the flags."""
    add = parser.add_argument
    add("--cache-config", type=_cache_bytes, default=0, metavar="local,size=BYTES",
        help="keep answers of models with `response_cache { enable: true }` in so much memory (none)")  # fmt: skip
    add("--rate-limit", choices=RATE_LIMIT_MODES, default=RATE_LIMIT_MODES[0],
        help="whether resources and priorities of instance groups count (%(default)s)")  # fmt: skip
    add("--rate-limit-resource", type=_resource, action="append", default=[], metavar="NAME:COUNT",
        help="how much there is of a resource; otherwise what the model needs that needs most of it")  # fmt: skip
    add("--batching", choices=BATCHING_MODES, default=BATCHING_MODES[0],
        help="whether requests are joined to batches, and large ones split over gangs (%(default)s)")  # fmt: skip


def read(arguments: argparse.Namespace) -> ModelOptions:
    """Return the values."""
    enabled = arguments.rate_limit != RATE_LIMIT_MODES[0]
    rates = RateLimits(enabled, tuple(arguments.rate_limit_resource))
    return ModelOptions(arguments.cache_config, rates, arguments.batching != BATCHING_MODES[1])


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
