"""`gangway profile`: measure a compiled model on this machine, keep the result in the cache, and show it."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gangway.artifact.cache import add_cache_dir, add_dimension
from gangway.artifact.format import Layer, Manifest
from gangway.artifact.precision import add_precision
from gangway.artifact.profile import LEAST_AGREEING, LayerProfile, Profile, encode_profile, keep_better, profile_path
from gangway.base.command_line import CommandParser
from gangway.base.console import Console, ProgressBars, Table
from gangway.base.numbers import counted, positive
from gangway.measure.arguments import compiled_manifest, in_each_precision, model_and_cores
from gangway.measure.model_runner import RunError
from gangway.measure.profiler import DEFAULT_SECONDS, profile_model
from gangway.server.errors import CompileError


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0, or 1 when a model cannot be measured. Wrong arguments exit with 2 (argparse)."""
    parser = _parser()
    options = parser.parse_args(argv)
    name, path, cores = model_and_cores(parser, options)
    console = Console()
    try:
        for each in in_each_precision(options):
            _profile(name, path, each, cores, console)
    except (CompileError, RunError, RuntimeError, TimeoutError, OSError) as error:
        print(f"gangway profile: {error}", file=sys.stderr)
        return 1
    return 0


def _profile(name: str, path: Path, options: argparse.Namespace, cores: Sequence[int], console: Console) -> None:
    manifest = compiled_manifest(options, name, path)
    measured = _measure(name, manifest, options, cores)
    kept = keep_better(options.cache_dir, measured)
    if options.json:
        options.json.write_bytes(encode_profile(kept))
    console.print(layer_table(manifest, kept))
    lines = [*summary(kept), f"kept in {profile_path(options.cache_dir, kept.key, kept.machine.machine_id)}"]
    if kept != replace(measured, agreeing=kept.agreeing):
        lines.append(
            f"All this is from before: in the new measurement cores were only {measured.cores_whole:.0%} there"
        )
    console.print(*lines, sep="\n", highlight=False, soft_wrap=True)


def _measure(name: str, manifest: Manifest, options: argparse.Namespace, cores: Sequence[int]) -> Profile:
    with ProgressBars(Console(stderr=True), columns=32) as bar:
        task = bar.add_task(name, total=1.0)

        def progress(phase: str, share: float) -> None:
            bar.update(task, description=f"{name}: {phase}", completed=share)

        return profile_model(options.cache_dir, manifest, cores, options.seconds, progress, options.every_count)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="gangway profile",
        description="Measure a model on this machine with the executor that serves it: every layer, version, number of "
        "cores and batch size alone, then its slowdown beside generated interference on the other cores. The better "
        "of this and an earlier result is kept in the cache, for schedulers, and printed. The machine should have "
        "nothing else to do.",
    )
    parser.add_argument(
        "path", type=Path, metavar="PATH", help="an .onnx file or a model directory (its latest version)"
    )
    add_cache_dir(parser)
    add_dimension(parser)
    add_precision(parser)
    parser.add_argument("--cores", default="all", metavar="LIST", help="cores to measure on, like 0,2-3 (all)")
    parser.add_argument(
        "--seconds",
        type=positive,
        default=DEFAULT_SECONDS,
        metavar="N",
        help=f"time to take ({DEFAULT_SECONDS:.0f})",
    )
    parser.add_argument(
        "--every-count",
        action="store_true",
        help="measure every number of cores, not 1, 2, 4, ... and all; `gangway plan` then finds mixed gangs",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the profile here, too")
    return parser


def layer_table(manifest: Manifest, profile: Profile) -> Table:
    """One line per layer and version, for one row. Needs the manifest that the profile was measured of."""
    table = Table(title=f"{profile.model_name}, one row")
    for heading in ("layer", "operator"):
        table.add_column(heading, overflow="fold")
    headings = [f"us on {count}" for count in profile.cores]
    headings += ["speed-up", "of peak", "m us", "c us"] + ["slope"] * bool(profile.interference)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for layer, measured in zip(manifest.layers, profile.layers, strict=True):
        for version in range(len(measured.latency_us)):
            table.add_row(*_cells(layer, measured, version, profile))
    return table


def _cells(layer: Layer, measured: LayerProfile, version: int, profile: Profile) -> list[str]:
    times_us = [row[0] for row in measured.latency_us[version]]
    name = layer.name + f" v{version}" * (len(layer.versions) > 1)
    share = measured.compute_us / times_us[0] if times_us[0] else 0.0
    cells = [name, layer.operator, *(f"{time_us:.3g}" if time_us < 100 else f"{time_us:.0f}" for time_us in times_us)]
    cells += [f"{times_us[0] / times_us[-1]:.2f}" if times_us[-1] else "-", f"{share:.0%}"]
    cells += [f"{measured.memory_us:.1f}", f"{measured.compute_us:.1f}"]
    return cells + ([f"{measured.slope[version]:.2f}"] if profile.interference else [])


def summary(profile: Profile) -> list[str]:
    """Lines about machine, whole model and interference."""
    machine = profile.machine
    lines = [
        f"{machine.cpu}, {machine.cores} cores, {machine.target}: one core does {machine.peak_flops_per_us / 1e3:.1f} "
        f"GFLOP/s and reads {machine.bandwidth_bytes_per_us / 1e3:.1f} GB/s",
    ]
    for count, times_us in zip(profile.cores, profile.isolated_us, strict=True):
        lines.append(f"whole model on {counted(count, 'core')}, ms by rows: {_by_rows(profile, times_us)}")
    for count, times_us in zip(profile.cores, profile.together_us, strict=True):
        if (gangs := profile.cores[-1] // count) > 1:
            lines.append(
                f"{gangs} gangs of {counted(count, 'core')} at once, ms by rows of each: {_by_rows(profile, times_us)}"
            )
    lines += _balance(profile)
    lines.append(_interference(profile))
    lines += wholeness(profile)
    runs = ", ".join(f"{rows}: {count}" for rows, count in zip(profile.batches, profile.runs, strict=True))
    lines.append(
        f"measured in {profile.seconds:.1f} s, runs of each setting by rows: {runs}; "
        f"one is {profile.scatter:.1%} away from their median"
    )
    return lines


def _by_rows(profile: Profile, times_us: Sequence[float]) -> str:
    return ", ".join(f"{rows}: {time_us / 1e3:.4g}" for rows, time_us in zip(profile.batches, times_us, strict=True))


def _balance(profile: Profile) -> list[str]:
    memory = sum(layer.memory_us > layer.compute_us for layer in profile.layers)
    bound_us = sum(max(layer.memory_us, layer.compute_us) for layer in profile.layers)
    one_core_us = profile.isolated_us[0][0]
    return [
        f"{memory} of {len(profile.layers)} layers have m > c; sum of max(m, c) is {bound_us / 1e3:.4g} ms, "
        f"{bound_us / one_core_us:.0%} of the time on one core"
    ]


def _interference(profile: Profile) -> str:
    if not profile.interference:
        return "no slopes: on one core there is no other one to disturb from"
    points = ", ".join(f"{point.kind} {point.share} %: {point.level:.2f}" for point in profile.interference)
    other = profile.machine.cores - profile.interference_cores
    return f"levels of interference from {counted(other, 'core')}: {points}"


def wholeness(profile: Profile) -> list[str]:
    """Return a line about whether the cores were there all at once, a warning if not; nothing of one whole core."""
    if len(profile.cores) == 1 and profile.whole:
        return []
    share = f"all cores at once: the slowest did {profile.cores_whole:.0%} of what one does alone"
    if profile.whole:
        return [share]
    if not profile.doubtful:
        return [f"{share}, on which {profile.agreeing} measurements agree"]
    return [
        f"WARNING: {share}. Something else ran, or the host gave the cores to others: times on several cores are too "
        "long; measure again when the machine is quieter. They are believed once "
        f"{LEAST_AGREEING} measurements agree (cores that are threads of one, clocks that fall)"
    ]
