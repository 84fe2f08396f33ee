"""`gangway compose`: find the fastest schedule of models that compute one input together, and keep it in the cache."""

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from string import ascii_uppercase
from typing import Final

from gangway.artifact.cache import add_cache_dir
from gangway.artifact.format import Manifest
from gangway.base.command_line import CommandParser
from gangway.base.console import Console, ProgressBars
from gangway.base.numbers import count, positive
from gangway.executor.launch import available_cores
from gangway.measure.arguments import find_model
from gangway.measure.composer import SEARCHES, ComposedSchedule, ComposeOptions, compose
from gangway.measure.compound_runner import CompoundRunner, CompoundTimes
from gangway.measure.model_runner import RunError
from gangway.scheduler.stages.schedule_file import schedule_path
from gangway.server.control.repository.compile_jobs import Compiler, CompileRequest
from gangway.server.control.repository.repository import BrokenModel, ModelVersion, read_model
from gangway.server.errors import CompileError
from gangway.server.models.config import is_ensemble

DEFAULT_ROUNDS: Final = 3
DEFAULT_CANDIDATES: Final = 8
DEFAULT_SECONDS: Final = 90.0
WIDTH: Final = 80  # of the picture
MOST_MODELS: Final = len(ascii_uppercase)
_IDLE, _BARRIER = ".", "|"


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0, or 1 when the models cannot be run. Wrong arguments exit with 2 (argparse)."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        cores = available_cores(options.cores)
        models = find_members(options.paths)
        wanted = _options(options, len(models))
    except ValueError as error:
        parser.error(str(error))
    try:
        manifests = asyncio.run(_compile(models, options.cache_dir))
        result = _compose(manifests, options.cache_dir, cores, wanted)
    except (CompileError, RunError, RuntimeError, TimeoutError, OSError, ValueError) as error:
        print(f"gangway compose: {error}", file=sys.stderr)
        return 1
    kept = schedule_path(options.cache_dir, result.found.keys, result.found.machine)
    use = "a server uses it from the next load of its ensemble on"
    Console().print(*report(result), f"kept in {kept};", use, sep="\n", highlight=False, markup=False, soft_wrap=True)
    return 0


def find_members(paths: Sequence[Path]) -> list[tuple[str, Path]]:
    """Return names and ONNX files of an ensemble's steps, or of the models given.

    Raises ValueError unless there are 2 to 26, and for an ensemble whose steps depend on each other.
    """
    models = [find_model(path) for path in paths] if len(paths) > 1 else _steps(paths[0])
    if not 2 <= len(models) <= MOST_MODELS:
        raise ValueError(f"a compound task has 2 to {MOST_MODELS} models, not {len(models)}")
    return models


def _steps(path: Path) -> list[tuple[str, Path]]:
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    if not path.is_dir():
        raise ValueError(f"{path}: one model is no compound task; name an ensemble's directory or several models")
    entry = read_model(path.resolve())[-1]
    if isinstance(entry, BrokenModel):
        raise ValueError(f"{path}: {entry.reason}")
    if not is_ensemble(entry.config):
        raise ValueError(f"{path}: one model is no compound task; name an ensemble's directory or several models")
    steps = entry.config.ensemble_scheduling.step
    written = {tensor: step.model_name for step in steps for tensor in step.output_map.values()}
    for step in steps:
        for tensor in step.input_map.values():
            if tensor in written:
                raise ValueError(
                    f"{path}: step {step.model_name} needs '{tensor}' of step {written[tensor]}; the steps of a "
                    "compound task do not depend on each other"
                )
    return [_step(path.resolve().parent / step.model_name, step.model_version) for step in steps]


def _step(folder: Path, version: int) -> tuple[str, Path]:
    if version <= 0 or not folder.is_dir():
        return find_model(folder)
    for entry in read_model(folder):
        if isinstance(entry, ModelVersion) and entry.version == version:
            return entry.name, entry.path
    raise ValueError(f"{folder} has no version {version}")


def _options(options: argparse.Namespace, models: int) -> ComposeOptions:
    pointers = options.pointers or models
    if pointers < models - 1:
        raise ValueError(f"argument --pointers: {models} models need at least {models - 1}")
    return ComposeOptions(options.search, pointers, options.rounds, options.candidates, options.seconds)


async def _compile(models: Sequence[tuple[str, Path]], cache_dir: Path) -> list[Manifest]:
    compiler = Compiler(cache_dir)
    return [await compiler.compile(CompileRequest(name, path)) for name, path in models]


def _compose(
    manifests: Sequence[Manifest], cache_dir: Path, cores: Sequence[int], wanted: ComposeOptions
) -> ComposedSchedule:
    with CompoundRunner(cache_dir, manifests, cores) as runner, ProgressBars(Console(stderr=True), columns=32) as bar:
        task = bar.add_task("schedules", total=1.0)

        def progress(phase: str, share: float) -> None:
            bar.update(task, description=f"schedules: {phase}", completed=share)

        return compose(runner, cache_dir, wanted, progress)


def report(result: ComposedSchedule) -> Iterator[str]:
    """Yield lines about the models, the two schedules as pictures of one scale, and the times."""
    found = result.found
    for letter, name, layers in zip(ascii_uppercase, found.names, found.layers, strict=False):
        yield f"{letter}  {name}, {layers} layers"
    longest_us = max(result.sequential.total_us, result.fastest.total_us)
    for title, times in (("one after the other", result.sequential), ("found", result.fastest)):
        yield f"{title}, {times.total_us / 1e3:.4g} ms:"
        yield from picture(times, found.cores, longest_us)
    gains = [before_us / found.time_us for before_us in (found.sequential_us, found.parallel_us)]
    yield (
        f"medians by turns: one after the other {found.sequential_us / 1e3:.4g} ms, side by side "
        f"{found.parallel_us / 1e3:.4g} ms,"
    )
    yield f"found {found.time_us / 1e3:.4g} ms: {gains[0]:.3f} and {gains[1]:.3f} times as fast"
    yield f"{found.schedules} schedules measured in {found.seconds:.0f} s, {found.search} search"


def picture(times: CompoundTimes, cores: int, longest_us: float) -> list[str]:
    """Return a run as text of at most 80 columns: a line for each core, or for several alike, from left to right.

    `longest_us`: the time that takes the whole width. Models are letters by stream; an idle core is dots. The last
    line marks where each segment ends.
    """
    labels = [f"core {core}" for core in range(cores)]
    columns = WIDTH - len(f"cores {cores - 1}-{cores - 1}") - 1
    length = max(1, round(columns * times.total_us / longest_us))

    def column(time_us: float) -> int:
        return min(length - 1, int(length * time_us / times.total_us))

    lines = [[_IDLE] * length for _ in range(cores)]
    marks = [" "] * length
    for span in times.spans:
        begin, end = column(span.begin_us), max(column(span.begin_us) + 1, round(length * span.end_us / times.total_us))
        for line in lines[span.worker : span.worker + span.segment.cores]:
            line[begin:end] = ascii_uppercase[span.segment.stream] * (end - begin)
        marks[column(span.end_us)] = _BARRIER
    drawn = []
    place = 0
    for text, alike in groupby("".join(line) for line in lines):
        count = len(list(alike))
        label = labels[place] if count == 1 else f"cores {place}-{place + count - 1}"
        drawn.append(f"{label:<{WIDTH - columns - 1}} {text}")
        place += count
    return [*drawn, f"{'':<{WIDTH - columns - 1}} {''.join(marks)}".rstrip()]


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="gangway compose",
        description="Find the fastest schedule of models that compute one input together: stages, in each of which "
        "some layers of each model run side by side on cores of their own. Schedules are measured on the executor that "
        "serves, each by turns with the best so far. The result is kept in the cache, and servers use it from "
        "the next load of their ensembles on; it is never slower than the models one after the other, or side by side. "
        "A search that was killed goes on where it was. The machine should have nothing else to do.",
    )
    add = parser.add_argument
    add("paths", type=Path, nargs="+", metavar="PATH",
        help="the directory of an ensemble whose steps do not depend on each other, or several models: .onnx files or "
        "model directories")  # fmt: skip
    add("--search", choices=SEARCHES, default=SEARCHES[0],
        help=f"coordinate descent, or as many random schedules ({SEARCHES[0]})")  # fmt: skip
    add("--pointers", type=count, metavar="P",
        help="barriers in each model, which make P + 1 stages (as many as models)")  # fmt: skip
    add("--rounds", type=count, default=DEFAULT_ROUNDS, metavar="R",
        help=f"rounds over all models ({DEFAULT_ROUNDS})")  # fmt: skip
    add("--candidates", type=count, default=DEFAULT_CANDIDATES, metavar="M",
        help=f"schedules for each model and round ({DEFAULT_CANDIDATES})")  # fmt: skip
    add("--seconds", type=positive, default=DEFAULT_SECONDS, metavar="S",
        help=f"time for the search at most; compilation comes on top ({DEFAULT_SECONDS:.0f})")  # fmt: skip
    add("--cores", default="all", metavar="LIST", help="cores to measure on, like 0,2-3 (all)")
    add_cache_dir(parser)
    return parser
