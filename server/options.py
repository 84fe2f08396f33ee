"""The options of `gangway serve`, spelled as tritonserver spells them wherever it has them."""

import argparse
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from gangway.artifact.cache import default_cache_dir
from gangway.executor.cores import available_cores
from gangway.scheduler.policies.registry import DEFAULT_POLICY, POLICIES, make_policy

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


@dataclass(frozen=True)
class ServeOptions:
    """What the command line said. `cores` are CPU numbers, in order; each gets one pinned worker."""

    repositories: tuple[Path, ...]
    grpc_address: str
    grpc_port: int
    cores: tuple[int, ...]
    cache_dir: Path
    scheduler: str
    max_shapes: int
    profile_seconds: float
    exit_timeout_secs: float
    log_verbose: int
    trace_decisions: Path | None
    timeline: Path | None


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `gangway serve`."""
    parser = argparse.ArgumentParser(
        prog="gangway serve",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model-repository", "--model-store", action="append", required=True, type=Path, metavar="DIR",
        help="folder of models; may be given several times")  # fmt: skip
    add("--grpc-port", type=int, default=8001, metavar="PORT", help="port to listen on, 0 for any free one (8001)")
    add("--grpc-address", default="0.0.0.0", metavar="HOST", help="address to listen on (0.0.0.0)")
    add("--cores", default="all", metavar="LIST",
        help="cores that compute, like 0,2-3; `all` honours affinity mask and CPU quota (all)")  # fmt: skip
    add("--cache-dir", type=Path, default=default_cache_dir(), metavar="DIR",
        help="where compiled models are kept (~/.cache/gangway)")  # fmt: skip
    add("--scheduler", default=DEFAULT_POLICY, metavar="NAME",
        help=f"scheduling policy: {', '.join(sorted(POLICIES))} ({DEFAULT_POLICY})")  # fmt: skip
    add("--max-shapes", type=int, default=8, metavar="N",
        help="sizes of its symbolic dimensions that a model is compiled for at a time, 0: none (8)")  # fmt: skip
    add("--profile-seconds", type=float, default=15, metavar="SECONDS",
        help="for so long measure a model that has no profile, while there are no requests (15)")  # fmt: skip
    add("--no-profile", action="store_const", const=0.0, dest="profile_seconds", help="measure none")
    add("--exit-timeout-secs", type=float, default=30, metavar="SECONDS",
        help="how long running requests may take to finish after SIGTERM (30)")  # fmt: skip
    add("--trace-decisions", type=Path, metavar="FILE",
        help="write why each scheduling decision was made, one JSON object per line")  # fmt: skip
    add("--timeline", type=Path, metavar="FILE",
        help="write which core computed what when, for ui.perfetto.dev")  # fmt: skip
    add("--log-verbose", type=int, default=0, metavar="LEVEL", help="0: events; 1 and more: details (0)")
    return parser


def parse_options(argv: list[str]) -> ServeOptions:
    """Return the options. Leaves with a message and status 2 (SystemExit) when they make no sense."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    try:
        cores = tuple(available_cores(arguments.cores))
    except ValueError as error:
        parser.error(f"argument --cores: {error}")
    try:
        make_policy(arguments.scheduler)
    except ValueError as error:
        parser.error(f"argument --scheduler: {error}")
    if not 0 <= arguments.grpc_port < 1 << 16:
        parser.error(f"argument --grpc-port: {arguments.grpc_port} is not a port")
    if not 0 <= arguments.profile_seconds < float("inf"):
        parser.error(f"argument --profile-seconds: {arguments.profile_seconds} is no time")
    if arguments.max_shapes < 0:
        parser.error(f"argument --max-shapes: {arguments.max_shapes} is negative")
    if missing := [folder for folder in arguments.model_repository if not folder.is_dir()]:
        parser.error(f"argument --model-repository: {missing[0]} is not a folder")
    for option in ("trace_decisions", "timeline"):
        path = getattr(arguments, option)
        if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
            parser.error(f"argument --{option.replace('_', '-')}: {path} cannot be written")
    return ServeOptions(
        repositories=tuple(arguments.model_repository),
        grpc_address=arguments.grpc_address,
        grpc_port=arguments.grpc_port,
        cores=cores,
        cache_dir=arguments.cache_dir,
        scheduler=arguments.scheduler,
        max_shapes=arguments.max_shapes,
        profile_seconds=arguments.profile_seconds,
        exit_timeout_secs=arguments.exit_timeout_secs,
        log_verbose=arguments.log_verbose,
        trace_decisions=arguments.trace_decisions,
        timeline=arguments.timeline,
    )


def log_level(log_verbose: int) -> int:
    """Return the standard library's level for `--log-verbose`."""
    return logging.DEBUG if log_verbose > 0 else logging.INFO
