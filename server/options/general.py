"""Flags of the server as a whole: cores, scheduling, compiled models, measuring, its end."""

import argparse
from dataclasses import dataclass, field
from pathlib import Path

from gangway.executor.cores import available_cores
from gangway.server.options.values import integer, seconds, writable_file

TITLE = "server"
SERVER_NAME = "gangway"
MAX_NAME_CHARACTERS = 256
MAX_FRONT_ENDS = 16


def _default_cache_dir() -> Path:
    from gangway.artifact.cache import default_cache_dir  # noqa: PLC0415 - not in the front end, which starts sooner

    return default_cache_dir()


@dataclass(frozen=True)
class GeneralOptions:
    """`id` is the name that clients are told. `cores` are CPU numbers, in order; each gets one pinned worker.
    `front_ends`: processes that share the ports. Times are in seconds.
    """

    id: str = SERVER_NAME
    cores: tuple[int, ...] = ()
    front_ends: int = 1
    cache_dir: Path = field(default_factory=_default_cache_dir)
    scheduler: str = ""  # the parser knows the default: only it loads the policies
    max_shapes: int = 8
    profile_seconds: float = 15.0
    exit_timeout_secs: float = 30.0
    trace_decisions: Path | None = None
    timeline: Path | None = None


def add_flags(parser: argparse._ArgumentGroup) -> None:
    """Define the flags."""
    from gangway.artifact.cache import add_cache_dir  # noqa: PLC0415 - not in the front end
    from gangway.scheduler.policies.registry import DEFAULT_POLICY, POLICIES  # noqa: PLC0415

    add = parser.add_argument
    add("--id", type=_name, default=SERVER_NAME, metavar="NAME", help="the server's name in its metadata (%(default)s)")
    add("--cores", type=_cores, default="all", metavar="LIST",
        help="cores that compute, like 0,2-3; `all` honours affinity mask and CPU quota (all)")  # fmt: skip
    add("--front-ends", type=integer(1, MAX_FRONT_ENDS), default=GeneralOptions.front_ends, metavar="N",
        help="processes that talk with clients and share the ports (%(default)s)")  # fmt: skip
    add_cache_dir(parser)
    add("--scheduler", type=_scheduler, default=DEFAULT_POLICY, metavar="NAME",
        help=f"scheduling policy: {', '.join(sorted(POLICIES))} ({DEFAULT_POLICY})")  # fmt: skip
    add("--max-shapes", type=integer(0), default=GeneralOptions.max_shapes, metavar="N",
        help="sizes of its symbolic dimensions that a model is compiled for at a time, 0: none (8)")  # fmt: skip
    add("--profile-seconds", type=seconds, default=GeneralOptions.profile_seconds, metavar="SECONDS",
        help="for so long measure a model that has no profile, while there are no requests (15)")  # fmt: skip
    add("--no-profile", action="store_const", const=0.0, dest="profile_seconds", help="measure none")
    add("--exit-timeout-secs", type=seconds, default=GeneralOptions.exit_timeout_secs, metavar="SECONDS",
        help="how long running requests may take to finish after SIGTERM (30)")  # fmt: skip
    add("--trace-decisions", type=writable_file, metavar="FILE",
        help="write why each scheduling decision was made, one JSON object per line")  # fmt: skip
    add("--timeline", type=writable_file, metavar="FILE",
        help="write which core computed what when, for ui.perfetto.dev")  # fmt: skip


def read(arguments: argparse.Namespace) -> GeneralOptions:
    """Return the values."""
    return GeneralOptions(
        id=arguments.id,
        cores=arguments.cores,
        front_ends=arguments.front_ends,
        cache_dir=arguments.cache_dir,
        scheduler=arguments.scheduler,
        max_shapes=arguments.max_shapes,
        profile_seconds=arguments.profile_seconds,
        exit_timeout_secs=arguments.exit_timeout_secs,
        trace_decisions=arguments.trace_decisions,
        timeline=arguments.timeline,
    )


def _cores(text: str) -> tuple[int, ...]:
    try:
        return tuple(available_cores(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _scheduler(text: str) -> str:
    from gangway.scheduler.policies.registry import make_policy  # noqa: PLC0415 - as above

    try:
        make_policy(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _name(text: str) -> str:
    if not text.isprintable() or not 0 < len(text) <= MAX_NAME_CHARACTERS:
        raise argparse.ArgumentTypeError(f"a name has 1 to {MAX_NAME_CHARACTERS} characters that can be printed")
    return text
