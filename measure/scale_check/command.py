"""`gangway scale-check`: measure what this machine's cores do together, compare it with predictions, and report it.

The parts run one after the other, each alone on the machine.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from gangway.artifact.cache import add_cache_dir
from gangway.artifact.precision import MIN_COSINE
from gangway.base.command_line import CommandParser
from gangway.base.console import Console, Table
from gangway.base.host_limits import cpu_name
from gangway.base.numbers import positive
from gangway.clients.errors import ClientError
from gangway.executor.launch import available_cores, numa_nodes
from gangway.measure.arguments import compiled_manifest
from gangway.measure.machine import OtherWork
from gangway.measure.model_runner import RunError
from gangway.measure.scale_check.gangs import check_gangs, profile_widths
from gangway.measure.scale_check.memory import check_memory
from gangway.measure.scale_check.rates import check_rates, check_requests, measure_loads, predict, with_targets
from gangway.measure.scale_check.section import Section, cell_text
from gangway.measure.scale_check.served import ServeError, serving
from gangway.measure.scale_check.splits import check_splits
from gangway.server.errors import CompileError
from gangway.workload.mix import Mix, parse_mix
from gangway.workload.qos import WorkloadError
from gangway.zoo.catalog import MODELS

DEFAULT_SECONDS: Final = 600.0
LEAST_SECONDS: Final = 10.0
DEFAULT_MIX: Final = "mobilenetv2=4,resnet50=1"
# Of the time: what is left goes into compiling, simulating, and the start of processes.
MEMORY_PART, PROFILE_PART, SPLIT_PART, LOAD_PART = 0.06, 0.35, 0.1, 0.3
OVERSUBSCRIBED: Final = (
    "several workers share each core: parts, processes and messages work on a machine of so many cores, but NO TIME "
    "HERE IS TO BE BELIEVED"
)
SHORT_S: Final = 300.0
SHORT: Final = f"less than {SHORT_S:.0f} s: few runs stand behind each figure, which scatters"

MOST_OTHERS: Final = 0.05


@dataclass(frozen=True)
class Check:
    """What is checked: models of a repository as a mix, on these cores, `cores_text` as for `gangway serve`."""

    mix: Mix
    repository: Path
    cores: tuple[int, ...]
    cores_text: str
    seconds: float

    @property
    def believable(self) -> bool:
        """Whether each worker has a core of its own."""
        return len({*self.cores}) == len(self.cores)

    def warnings(self, others_share: float) -> tuple[str, ...]:
        """Return why its figures may be wrong. `others_share`: of the cores' time, what others took meanwhile."""
        text = f"other processes, or a host, took {others_share:.0%} of these cores' time: times are longer and scatter"
        reasons = {OVERSUBSCRIBED: not self.believable, SHORT: self.seconds < SHORT_S, text: others_share > MOST_OTHERS}
        return tuple(reason for reason, holds in reasons.items() if holds)


class CheckProgress:
    """Lines on standard error: the seconds since the beginning, and what begins."""

    def __init__(self) -> None:
        self._begin = time.monotonic()

    @property
    def passed_s(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._begin

    def __call__(self, what: str) -> None:
        """Say what begins."""
        print(f"{self.passed_s:6.0f} s  {what}", file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0, or 1 where it cannot be measured. Wrong arguments exit with 2 (argparse)."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.seconds < LEAST_SECONDS:
        parser.error(f"argument --seconds: at least {LEAST_SECONDS:.0f}")
    try:
        mix, cores = parse_mix(options.mix), available_cores(options.cores)
    except (WorkloadError, ValueError) as error:
        parser.error(str(error))
    source = options.model_repository
    if source is None and (unknown := [name for name in mix.names if name not in MODELS]):
        parser.error(f"argument --mix: the zoo has no model '{unknown[0]}'; --model-repository has others")
    if source is not None and (missing := [name for name in mix.names if not _files(source, name)[0].exists()]):
        parser.error(f"argument --mix: {_files(source, missing[0])[0]} does not exist")
    if options.html and not _can_draw():
        parser.error("argument --html: needs matplotlib: pip install 'gangway-serve[report]'")
    progress = CheckProgress()
    with tempfile.TemporaryDirectory(prefix="gangway-scale-check-") as folder:
        repository = source or Path(folder)
        check = Check(mix, repository, tuple(cores), options.cores, options.seconds)
        others = OtherWork(sorted({*cores}))
        try:
            sections = _sections(check, options, progress)
        except (ClientError, CompileError, OSError, RunError, RuntimeError, ServeError, TimeoutError) as error:
            print(f"gangway scale-check: {error}", file=sys.stderr)
            return 1
    warnings = check.warnings(others.share())
    _show(warnings, sections)
    try:
        if options.json:
            options.json.write_text(json.dumps(_result(check, sections, warnings, progress.passed_s), indent=1) + "\n")
        if options.html:
            from gangway.measure.scale_check.page import write_check  # noqa: PLC0415 - needs an extra package

            write_check(options.html, sections, warnings)
            print(options.html)
    except OSError as error:
        print(f"gangway scale-check: {error}", file=sys.stderr)
        return 1
    return 0


def _sections(check: Check, options: argparse.Namespace, progress: CheckProgress) -> list[Section]:
    cores, nodes = check.cores, numa_nodes(sorted({*check.cores}))
    if options.model_repository is None:
        progress(f"write {', '.join(check.mix.names)}")
        _write_zoo(check)
    progress(f"memory of {len({*cores})} cores")
    sections = [check_memory(cores, nodes, MEMORY_PART * check.seconds)]
    manifests = []
    for name in check.mix.names:
        progress(f"compile {name}")
        manifests.append(compiled_manifest(options, name, _files(check.repository, name)[0]))
    each_s = PROFILE_PART * check.seconds / len(manifests)
    models = [profile_widths(options.cache_dir, manifest, cores, each_s, progress) for manifest in manifests]
    sections.append(check_gangs(models))
    progress(f"splits, {SPLIT_PART * check.seconds:.0f} s")
    sections.append(check_splits(options.cache_dir, models, cores, SPLIT_PART * check.seconds))
    progress("simulate the mix")
    mix = with_targets(check.mix, models)
    spare = len(os.sched_getaffinity(0) - {*cores})
    predicted = predict(mix, models, len({*cores}), spare, check.seconds)  # whatever workers share them
    progress("start a server")
    with serving(check.repository, mix, options.cache_dir, check.cores_text) as server:
        loads = measure_loads(server, predicted, LOAD_PART * check.seconds, progress)
    progress("done")
    return [*sections, check_requests(loads, predicted), check_rates(loads, predicted)]


def _files(repository: Path, name: str) -> tuple[Path, Path]:
    """Return where a model and its configuration are."""
    return repository / name / "1" / "model.onnx", repository / name / "config.pbtxt"


def _write_zoo(check: Check) -> None:
    from gangway.zoo.repository import write_model  # noqa: PLC0415 - needs onnx

    for name in check.mix.names:
        write_model(check.repository, name)


def _can_draw() -> bool:
    try:
        import matplotlib  # noqa: F401, PLC0415 - optional dependency
    except ModuleNotFoundError:
        return False
    return True


def _show(warnings: Sequence[str], sections: Sequence[Section]) -> None:
    console = Console()
    for warning in warnings:
        console.print(f"WARNING: {warning}", highlight=False, soft_wrap=True)
    for section in sections:
        console.print(f"\n{section.title}", style="bold", highlight=False)
        if section.rows:
            table = Table(*section.rows[0])
            for row in section.rows:
                table.add_row(*map(cell_text, row.values()))
            console.print(table)
        for finding in section.findings:
            console.print(str(finding), highlight=False, soft_wrap=True)
        if any(finding.good is False for finding in section.findings):
            console.print(f"  means: {section.meaning}\n  do: {section.action}", highlight=False, soft_wrap=True)


def _result(check: Check, sections: Sequence[Section], warnings: Sequence[str], passed_s: float) -> dict[str, object]:
    return {
        "cpu": cpu_name(),
        "cores": list(check.cores),
        "mix": check.mix.name,
        "seconds": passed_s,
        "believable": check.believable,
        "warnings": list(warnings),
        "sections": {section.name: asdict(section) for section in sections},
    }


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="gangway scale-check",
        description="Measure what this machine's cores do together, and compare it with what the simulator predicts: "
        "memory bandwidth, gangs of 1 to N cores, batches split over gangs, the CPU time of scheduler and front ends, "
        "and the rate that a small mix is served at. Each part says what a bad figure means. The machine should have "
        "nothing else to do.",
    )
    add = parser.add_argument
    add("--seconds", type=positive, default=DEFAULT_SECONDS, metavar="N",
        help=f"about the time to take, compiling aside ({DEFAULT_SECONDS:.0f})")  # fmt: skip
    add("--cores", default="all", metavar="LIST",
        help="cores to check, like 0,2-3 (all); 0-1x8: eight workers on each, whose times mean nothing")  # fmt: skip
    add("--mix", default=DEFAULT_MIX, metavar="MODEL=WEIGHT,...",
        help="models, and how often each is asked (%(default)s)")  # fmt: skip
    add("--model-repository", type=Path, metavar="DIR", help="where they are (written from the zoo)")
    add("--json", type=Path, metavar="FILE", help="write all figures")
    add("--html", type=Path, metavar="FILE", help="write a page with pictures; it needs nothing but itself")
    add_cache_dir(parser)
    parser.set_defaults(dimension=[], precision="fp32", min_cosine=MIN_COSINE)
    return parser
