"""`gangway profile`: measure a compiled model on this machine, keep the result in the cache, and show it."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from gangway.artifact.cache import add_cache_dir
from gangway.artifact.console import Console, ProgressBars
from gangway.artifact.format import Engine, Manifest
from gangway.artifact.profile import Profile, encode_profile
from gangway.executor.model_runner import RunError
from gangway.executor.profile_keeping import keep_profile
from gangway.executor.profiler import DEFAULT_SECONDS, profile_model
from gangway.server.compile_jobs import CompileError, Compiler
from gangway.server.model_argument import model_and_cores, positive_number
from gangway.server.profile_table import layer_table, proxy_line, summary


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0, or 1 when a model cannot be measured. Wrong arguments exit with 2 (argparse)."""
    parser = _parser()
    options = parser.parse_args(argv)
    name, path, cores = model_and_cores(parser, options)
    console = Console()
    try:
        manifest = asyncio.run(Compiler(options.cache_dir).compile(name, path))
        if manifest.engine is Engine.ONNXRUNTIME:
            raise CompileError(f"{name} has no layers to measure, onnxruntime serves it: {manifest.fallback_reason}")
        profile = _measure(name, manifest, options, cores)
        written, proxy = keep_profile(options.cache_dir, profile)
        if options.json:
            options.json.write_bytes(encode_profile(profile))
    except (CompileError, RunError, RuntimeError, TimeoutError, OSError) as error:
        print(f"gangway profile: {error}", file=sys.stderr)
        return 1
    console.print(layer_table(manifest, profile))
    console.print(*summary(profile), proxy_line(proxy), f"kept in {written}", sep="\n", highlight=False, soft_wrap=True)
    return 0


def _measure(name: str, manifest: Manifest, options: argparse.Namespace, cores: Sequence[int]) -> Profile:
    with ProgressBars(Console(stderr=True), columns=32) as bar:
        task = bar.add_task(name, total=1.0)

        def progress(phase: str, share: float) -> None:
            bar.update(task, description=f"{name}: {phase}", completed=share)

        return profile_model(options.cache_dir, manifest, cores, options.seconds, progress)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gangway profile",
        description="Measure a model on this machine with the executor that serves it: every layer, version, number of "
        "cores and batch size alone, then its slowdown beside generated interference on the other cores. The result is "
        "kept in the cache, for schedulers, and printed. The machine should have nothing else to do.",
    )
    parser.add_argument(
        "path", type=Path, metavar="PATH", help="an .onnx file or a model directory (its latest version)"
    )
    add_cache_dir(parser)
    parser.add_argument("--cores", default="all", metavar="LIST", help="cores to measure on, like 0,2-3 (all)")
    parser.add_argument(
        "--seconds",
        type=positive_number,
        default=DEFAULT_SECONDS,
        metavar="N",
        help=f"time to take ({DEFAULT_SECONDS:.0f})",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the profile here, too")
    return parser
