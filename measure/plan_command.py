"""`gangway plan`: into which parts batches of a measured model are cut, and how long they are predicted to take."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from gangway.artifact.cache import add_cache_dir, add_dimension, dimension_flags
from gangway.artifact.format import Engine, Manifest
from gangway.artifact.precision import add_precision
from gangway.artifact.profile import Profile, ProfileError, machine_id, profile_path, read_profile
from gangway.base.command_line import CommandParser
from gangway.base.console import Console, Table
from gangway.base.host_limits import cpu_name
from gangway.base.numbers import count
from gangway.executor.launch import available_cores
from gangway.measure.arguments import (
    compiled_manifest,
    find_model,
    in_each_precision,
    model_words,
)
from gangway.measure.profile_command import wholeness
from gangway.scheduler.batching.planner import PlanTable, plan_table
from gangway.scheduler.profiles import policy_profile
from gangway.server.errors import CompileError

_INSTANCES = ("count", "cores", "rows")  # Packrat's <i, t, b>


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0, or 1 when the model has no profile. Wrong arguments exit with 2 (argparse)."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        name, path = find_model(options.path)
    except ValueError as error:
        parser.error(str(error))
    try:
        for each in in_each_precision(options):
            _plan(name, path, each, parser)
    except (CompileError, ProfileError) as error:
        print(f"gangway plan: {error}", file=sys.stderr)
        return 1
    return 0


def _plan(name: str, path: Path, options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    console = Console()
    manifest = compiled_manifest(options, name, path)
    profile = _profile(manifest, options.cache_dir, model_words(options))
    cores = options.cores or profile.cores[-1]
    if cores > profile.cores[-1]:
        parser.error(f"argument --cores: the profile was measured on up to {profile.cores[-1]}")
    batches = options.batch or list(profile.batches)
    table = plan_table(policy_profile(profile, 0, name, profile.cores[-1]), cores, max(batches))
    console.print(_shown(name, table, batches))
    console.print(*_notes(profile, batches), sep="\n", highlight=False, soft_wrap=True)
    if options.json:
        plan = {"model": name, "cores": cores, "batches": [_entry(table, rows) for rows in batches]}
        options.json.write_text(json.dumps(plan, indent=1))


def _profile(manifest: Manifest, cache_dir: Path, argument: str) -> Profile:
    """Return what was measured of a model on this machine. Raises ProfileError that says how to measure it."""
    if manifest.engine is Engine.ONNXRUNTIME:
        reason = f"onnxruntime serves it whole: {manifest.fallback_reason}"
        given = dimension_flags(manifest)
        remedy = f"; of one size: {given}" if given else ""
        raise ProfileError(f"batches of {manifest.model_name} are not split: {reason}{remedy}")
    machine = machine_id(cpu_name(), len(available_cores("all")), manifest.target.name)
    path = profile_path(cache_dir, manifest.key, machine)
    if not path.is_file():
        raise ProfileError(f"{manifest.model_name} has not been measured here; `gangway profile {argument}` does it")
    return read_profile(path)


def _shown(name: str, table: PlanTable, batches: Sequence[int]) -> Table:
    shown = Table(title=f"{name} on {table.cores} cores: <gangs, cores of each, rows of each>")
    shown.add_column("rows", justify="right")
    shown.add_column("parts", overflow="fold")
    for heading in ("ms", "in one gang, ms", "share", "rows/s"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for rows in batches:
        plan, one_gang_us = table.best(table.cores, rows), table.one_gang_us(table.cores, rows)
        times = [f"{time_us / 1e3:.4g}" for time_us in (plan.latency_us, one_gang_us)]
        rate = rows / plan.latency_us * 1e6
        shown.add_row(str(rows), str(plan), *times, f"{plan.latency_us / one_gang_us:.2f}", f"{rate:.4g}")
    return shown


def _notes(profile: Profile, batches: Sequence[int]) -> list[str]:
    notes = [f"{profile.machine.cpu}, {profile.machine.cores} cores; gangs beside each other as they were measured"]
    if max(batches) > profile.batches[-1]:
        notes.append(
            f"more than {profile.batches[-1]} rows on a core or gang were not measured: the last slope goes on"
        )
    return [*notes, *wholeness(profile)] if profile.doubtful else notes


def _entry(table: PlanTable, rows: int) -> dict[str, object]:
    plan = table.best(table.cores, rows)
    rounds = [
        {"instances": [dict(zip(_INSTANCES, kind, strict=True)) for kind in kinds], "latency_us": round_us}
        for kinds, round_us in zip(plan.rounds, plan.rounds_us, strict=True)
    ]
    times = {"latency_us": plan.latency_us, "one_gang_us": table.one_gang_us(table.cores, rows)}
    return {"rows": rows, "rounds": rounds, **times}


def _batches(text: str) -> list[int]:
    return [count(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="gangway plan",
        description="Show into which parts a server on so many cores cuts batches of a model, and how long they are "
        "predicted to take, beside one gang on all cores. `gangway profile` must have measured the model. Gangs work "
        "side by side; `4 times` says that there are four such rounds, one after the other.",
    )
    add = parser.add_argument
    add("path", type=Path, metavar="PATH", help="an .onnx file or a model directory (its latest version)")
    add("--cores", type=count, metavar="T", help="cores to split over (all that were measured)")
    add("--batch", type=_batches, metavar="B[,B]", help="rows of the batch, or of several (those that were measured)")
    add_dimension(parser)
    add_precision(parser)
    add_cache_dir(parser)
    add("--json", type=Path, metavar="FILE", help="write the plan here, too; times in microseconds")
    return parser
