"""`gangway compile`: compile a model by hand and show its layers."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.progress import MofNCompleteColumn

from gangway.artifact.cache import Cache, add_cache_dir, add_dimension, dimension_flags
from gangway.artifact.format import Manifest, TargetSpec
from gangway.artifact.precision import WantedPrecision, add_precision
from gangway.base.command_line import CommandParser
from gangway.base.console import Console, ProgressBars, Table
from gangway.base.files import words_of
from gangway.base.numbers import counted
from gangway.compiler.arguments import CompileOptions, find_models
from gangway.compiler.errors import ModelError
from gangway.compiler.pipeline import CompileResult
from gangway.compiler.precision import compile_in_precision
from gangway.compiler.target import TARGETS, UnsupportedTargetError, detect


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0, or 1 if a model cannot be compiled. Wrong arguments exit with 2 (argparse)."""
    options = _parser().parse_args(argv)
    console = Console()
    cache = Cache(options.cache_dir)
    try:
        target = detect(options.target)
        for name, path in find_models(options.path):
            for wanted in WantedPrecision(options.precision, options.min_cosine).each:
                start = time.monotonic()
                compiled = _compile(name, path, cache, target, wanted, options, console)
                _show(compiled, time.monotonic() - start, console)
    except (ModelError, UnsupportedTargetError, OSError) as error:
        print(f"gangway compile: {words_of(error)}", file=sys.stderr)
        return 1
    return 0


def _compile(
    name: str,
    path: Path,
    cache: Cache,
    target: TargetSpec,
    wanted: WantedPrecision,
    options: argparse.Namespace,
    console: Console,
) -> CompileResult:
    with ProgressBars(console, MofNCompleteColumn(), columns=24) as bar:
        task = bar.add_task(name, total=None)

        def progress(phase: str, done: int, total: int) -> None:
            bar.update(task, description=f"{name}: {phase}", completed=done, total=total)

        compiled = CompileOptions(dict(options.dimension), keep_fp32=tuple(options.keep_fp32))
        return compile_in_precision(path, name, cache, target, progress, wanted, compiled)


def _show(compiled: CompileResult, seconds: float, console: Console) -> None:
    manifest = compiled.manifest
    if manifest.fallback_reason:
        _show_reason(manifest, console)
    else:
        _show_layers(manifest, console)
    phases = ", ".join(f"{phase} {time_us / 1e3:.0f} ms" for phase, time_us in manifest.phase_us.items())
    if manifest.integers:
        integers = f"8-bit numbers by {manifest.integers}"
        console.print(f"{manifest.model_name}: {integers}", highlight=False, soft_wrap=True)
    if manifest.difference:
        console.print(
            f"{manifest.model_name}: answers otherwise than onnxruntime: {manifest.difference}",
            highlight=False,
            soft_wrap=True,
        )
    if manifest.precision_note:
        console.print(f"{manifest.model_name}: {manifest.precision_note}", highlight=False, soft_wrap=True)
    made = "left to onnxruntime" if manifest.fallback_reason else "compiled"
    console.print(
        f"phases: {phases}",
        f"{'found in the cache' if compiled.cached else made} in {seconds:.2f} s: {compiled.folder}",
        sep="\n",
        highlight=False,
        soft_wrap=True,
    )


def _show_reason(manifest: Manifest, console: Console) -> None:
    given = dimension_flags(manifest)
    console.print(
        f"{manifest.model_name}: {manifest.parameters / 1e6:.2f} M parameters, served whole by onnxruntime",
        f"not compiled: {manifest.fallback_reason}",
        *([f"of one size: {given}; a server compiles those that requests have"] if given else ()),
        sep="\n",
        highlight=False,
        soft_wrap=True,
    )


def _show_layers(manifest: Manifest, console: Console) -> None:
    symbols = {version.symbol for layer in manifest.layers if not layer.onnx_file for version in layer.versions}
    islands = f", of which onnxruntime computes {len(manifest.islands)}" if manifest.islands else ""
    console.print(_layer_table(manifest))
    console.print(
        f"{manifest.model_name}: {manifest.parameters / 1e6:.2f} M parameters, "
        f"{counted(len(manifest.layers), 'layer')}{islands}, "
        f"{counted(len(symbols), f'{manifest.precision} kernel')} for {manifest.target.name}, "
        f"arena {manifest.arena_bytes / 1e6:.1f} MB",
        highlight=False,
        soft_wrap=True,
    )


def _layer_table(manifest: Manifest) -> Table:
    table = Table(title=manifest.model_name)
    for heading in ("layer", "operator", "shape"):
        table.add_column(heading, overflow="fold")
    for heading in ("MFLOP", "MB", "tasks", "ranks"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("kernel", overflow="fold")
    for number, layer in enumerate(manifest.layers, 1):
        version = layer.versions[0]
        numbers = (f"{layer.flops / 1e6:.3g}", f"{layer.bytes / 1e6:.3g}", str(version.tasks), str(layer.max_ranks))
        kernels = "; ".join(version.description for version in layer.versions)
        kind = "tail: " if manifest.tail and number == len(manifest.layers) else "island: " if layer.onnx_file else ""
        operator = f"{kind}{layer.operator}"
        table.add_row(layer.name, operator, layer.shape, *numbers, kernels)
    return table


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="gangway compile",
        description="Compile a model into the cache and print its layers, their kernels and the time of each phase. "
        "`gangway serve` does the same for the models of its repository; this is for looking, and to warm a cache.",
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="a model directory (all its versions) or an .onnx file")
    add_cache_dir(parser)
    add_dimension(parser)
    add_precision(parser)
    parser.add_argument("--keep-fp32", action="append", default=[], metavar="LAYER",
        help="a layer that multiplies float32 in any case; may be given several times")  # fmt: skip
    parser.add_argument("--target", metavar="NAME", help=f"{', '.join(TARGETS)}; default: the best this machine runs")
    return parser
