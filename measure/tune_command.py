"""`gangway tune`: find, for each layer, the versions worth having on this machine, and keep them in the cache."""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from gangway.artifact.cache import add_cache_dir, add_dimension
from gangway.artifact.reader import MAX_VERSIONS
from gangway.artifact.tuning import Finalist, TunedKernel, Tuning, encode_tuning, tuning_path
from gangway.base.command_line import CommandParser
from gangway.base.console import Console, ProgressBars, Table
from gangway.base.numbers import count, positive
from gangway.measure.arguments import find_target, model_and_cores
from gangway.measure.model_runner import RunError
from gangway.measure.tuner import USUAL_QOS, TuneOptions, Tuner
from gangway.measure.version_choice import STATIC
from gangway.server.errors import CompileError
from gangway.server.models.config import QosConfig

DEFAULT_TRIALS = 16
DEFAULT_SECONDS = 90.0
LEAST_LOSS_PERCENT = 10.0


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0, or 1 when a model cannot be tuned. Wrong arguments exit with 2 (argparse)."""
    parser = _parser()
    options = parser.parse_args(argv)
    name, path, cores = model_and_cores(parser, options)
    try:
        target = QosConfig(options.qos_ms) if options.qos_ms else find_target(options.path)
    except ValueError as error:
        parser.error(str(error))
    console = Console()
    try:
        tuning = _tune(name, path, options, cores, target)
        if options.json:
            options.json.write_bytes(encode_tuning(tuning))
    except (CompileError, RunError, RuntimeError, TimeoutError, OSError) as error:
        print(f"gangway tune: {error}", file=sys.stderr)
        return 1
    kept = tuning_path(options.cache_dir, tuning.key, tuning.machine)
    console.print(kernel_table(tuning))
    console.print(*summary(tuning), f"kept in {kept}", sep="\n", highlight=False, soft_wrap=True)
    return 0


def _tune(name: str, path: Path, options: argparse.Namespace, cores: Sequence[int], target: QosConfig) -> Tuning:
    wanted = TuneOptions(
        trials=options.trials,
        most_versions=options.versions,
        least_loss=options.least_loss / 100,
        seconds=options.seconds,
        qos_us=None if target.milliseconds is None else target.milliseconds * 1e3,
        qos_multiple=target.multiple or USUAL_QOS,
    )
    with ProgressBars(Console(stderr=True), columns=48) as bar:
        task = bar.add_task(name, total=1.0)

        def progress(phase: str, share: float) -> None:
            bar.update(task, description=f"{name}: {phase}", completed=share)

        return Tuner(path, options.cache_dir, cores, wanted, progress, dict(options.dimension)).tune(name)


def _versions(text: str) -> int:
    number = int(text)
    if not 1 <= number <= MAX_VERSIONS:
        raise ValueError(text)
    return number


def _percent(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 100:
        raise ValueError(text)
    return number


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="gangway tune",
        description="Measure many points of the kernel templates' knobs for every layer of a model, and keep those "
        "that are worth having: the fastest alone, and others that are better beside interference (VELTAIR's Algorithm "
        "1). `gangway serve`, `compile` and `profile` use them from then on. A tuning that was killed goes on where it "
        "was. "
        "The machine should have nothing else to do.",
    )
    add = parser.add_argument
    add("path", type=Path, metavar="PATH", help="an .onnx file or a model directory (its latest version)")
    add("--trials", type=count, default=DEFAULT_TRIALS, metavar="N",
        help=f"samples of each distinct layer at most ({DEFAULT_TRIALS})")  # fmt: skip
    add("--versions", type=_versions, default=MAX_VERSIONS, metavar="V",
        help=f"versions of a layer at most, 1 to {MAX_VERSIONS} ({MAX_VERSIONS})")  # fmt: skip
    add("--least-loss", type=_percent, default=LEAST_LOSS_PERCENT, metavar="PERCENT",
        help=f"drop a version whose absence costs less; 0 drops none ({LEAST_LOSS_PERCENT:.0f})")  # fmt: skip
    add("--qos-ms", type=positive, metavar="X",
        help=f"latency target (the configuration's, else {USUAL_QOS:.0f} times the latency alone)")  # fmt: skip
    add("--cores", default="all", metavar="LIST", help="cores to measure on, like 0,2-3 (all)")
    add("--seconds", type=positive, default=DEFAULT_SECONDS, metavar="N",
        help=f"time for measurements; compilation comes on top ({DEFAULT_SECONDS:.0f})")  # fmt: skip
    add_dimension(parser)
    add_cache_dir(parser)
    add("--json", type=Path, metavar="FILE", help="write the tuning here, too")
    return parser


def kernel_table(tuning: Tuning) -> Table:
    """One line per distinct kernel."""
    table = Table(title=f"{tuning.model_name}, one row, {tuning.cores} cores")
    for heading in ("layer", "operator"):
        table.add_column(heading, overflow="fold")
    for heading in ("uses", "samples", "QoS us", "static us", "first us", "gain"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("versions: blocking KB, parallelism", overflow="fold")
    for kernel in tuning.kernels:
        table.add_row(*_cells(kernel))
    return table


def _cells(kernel: TunedKernel) -> list[str]:
    static_us, first_us = finalist_times(kernel)
    cells = [kernel.name, kernel.operator, str(kernel.uses), str(len(kernel.samples)), f"{kernel.qos_us:.0f}"]
    cells += [f"{static_us:.1f}", f"{first_us:.1f}", f"{static_us / first_us - 1:.1%}" if first_us else "-"]
    versions = [f"{version.blocking_bytes / 1e3:.0f}, {version.parallelism}" for version in kernel.versions]
    return [*cells, "; ".join(versions)]


def finalist_times(kernel: TunedKernel) -> tuple[float, float]:
    """Return microseconds alone of the static choice and of the first version, measured side by side."""

    def knobs(finalist: Finalist) -> str:
        return kernel.samples[finalist.sample].candidate.knobs

    by_knobs = {knobs(finalist): finalist.latency_us for finalist in kernel.finalists}
    return by_knobs[kernel.samples[STATIC].candidate.knobs], by_knobs[kernel.versions[0].knobs]


def summary(tuning: Tuning) -> list[str]:
    """Lines about the whole model."""
    pairs = [(kernel.uses, *finalist_times(kernel)) for kernel in tuning.kernels]
    static_us = sum(uses * static for uses, static, _ in pairs)
    first_us = sum(uses * first for uses, _, first in pairs)
    counts = Counter(len(tuning.kernels[number].versions) for number in tuning.layers)
    layers = ", ".join(f"{counts[count]} with {count}" for count in sorted(counts))
    samples = sum(len(kernel.samples) for kernel in tuning.kernels)
    points = ", ".join(f"{point.kind} {point.share} %: {point.level:.2f}" for point in tuning.interference)
    return [
        f"QoS {tuning.qos_us / 1e3:.4g} ms, {tuning.isolated_us / 1e3:.4g} ms alone; sum of the layers: static choices "
        f"{static_us / 1e3:.4g} ms, first versions {first_us / 1e3:.4g} ms ({static_us / first_us - 1:+.1%})",
        f"layers by number of versions: {layers}",
        f"levels of interference: {points}" if points else "on one core there is no other one to disturb from",
        f"{samples} samples of {len(tuning.kernels)} kernels in {tuning.seconds:.0f} s",
    ]
