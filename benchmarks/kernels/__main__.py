"""Kernels one by one: GFLOP/s of every distinct layer and its share of the measured peak, on one core.

Caches are warm. Multiplications by padding, of pixels or of channels, do not count as work.
"""

import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kernels.gap import DENSE, MOST_GAP, convolutions, report_gaps
from benchmarks.kernels.timing import sampled
from gangway.artifact.format import TargetSpec
from gangway.compiler.frontend.importer import read_graph
from gangway.compiler.job import lower_graph
from gangway.compiler.kernels import codegen
from gangway.compiler.kernels.attention_specs import AttentionSpec
from gangway.compiler.kernels.codegen import Library, aligned
from gangway.compiler.kernels.plain_specs import MatMulSpec
from gangway.compiler.kernels.specs import Array, ConvSpec, GlobalPoolSpec, KernelPlan, LayerNormSpec, PoolSpec
from gangway.compiler.kernels.templates import registry
from gangway.compiler.kernels.templates.builder import Argument, Buffer, Expr, Register, kernel, lanes_at, repeat, store
from gangway.compiler.kernels.templates.tiling import registers
from gangway.compiler.place.costs import shape_text
from gangway.compiler.place.memory import PlacedLayer
from gangway.compiler.target import TARGETS, detect
from testing.report import Report, Row, add_repository_option, option_parser, start_report
from testing.repository import ensure_zoo, onnx_file

PEAK_ROUNDS = 100_000
MEASURED = (ConvSpec, MatMulSpec, AttentionSpec, LayerNormSpec, PoolSpec, GlobalPoolSpec)


@dataclass(frozen=True)
class Case:
    """A distinct kernel of a model."""

    step: PlacedLayer
    plan: KernelPlan
    uses: int
    symbol: str


def distinct_kernels(path: Path, target: TargetSpec) -> list[Case]:
    """The model's convolutions, dense layers, poolings, normalisations and products, without repetitions."""
    steps = lower_graph(read_graph(path), target.lanes).steps
    uses = Counter(step.spec for step in steps)
    first = {step.spec: step for step in reversed(steps)}
    wanted = [spec for spec in uses if isinstance(spec, MEASURED)]
    return [Case(first[spec], registry.plan(spec, target), uses[spec], f"k{i}") for i, spec in enumerate(wanted)]


def peak_kernel(target: TargetSpec, symbol: str) -> tuple[Any, int]:
    """A kernel of nothing but independent multiply-adds in registers, and the operations of one task."""
    count, lanes = 3 * registers(target) // 4, target.lanes

    def task(_: Expr, buffers: tuple[Buffer, ...]) -> None:
        x, y = buffers
        factor, term = x[lanes_at(0, lanes)], x[lanes_at(lanes, lanes)]
        sums = [Register(lanes, x[lanes_at(i * lanes, lanes)]) for i in range(count)]

        def multiply_add(_: Expr) -> None:
            for s in sums:
                s.set(s.value * factor + term)

        repeat(PEAK_ROUNDS, multiply_add)
        for i, s in enumerate(sums):
            store(y, i * lanes, s.value, lanes)

    size = count * lanes
    return kernel(symbol, [Argument("x", size), Argument("y", size)], task), 2 * size * PEAK_ROUNDS


def arguments_of(case: Case, target: TargetSpec) -> list[Array]:
    """Random arguments of a kernel, halos included: their values do not matter here."""
    rng = np.random.default_rng(0)
    x, *others = (aligned(rng.random(buffer.elements(target.lanes), np.float32)) for buffer in case.step.inputs)
    weights = registry.pack(case.plan, target, case.step.weights) if case.step.weights else ()
    y = aligned(np.zeros(case.step.output.elements(target.lanes), np.float32))
    return [x, *(aligned(array) for array in weights), *others, y]


def measure(path: Path, target: TargetSpec, repeats: int, library_path: Path) -> tuple[float, list[Row]]:
    """The peak in GFLOP/s, and a row per distinct kernel."""
    cases = distinct_kernels(path, target)
    peak_function, peak_flops = peak_kernel(target, "peak")
    functions = {case.symbol: registry.emit(case.plan, target, case.symbol) for case in cases}
    codegen.build_library({**functions, "peak": peak_function}, target, library_path)
    library = Library(library_path)
    size = 2 * registers(target) * target.lanes
    buffers = [aligned(np.full(size, 0.5, np.float32)) for _ in range(2)]
    peak_call = library.bind("peak", buffers)
    peak = peak_flops / min(sampled(lambda: peak_call(0, 1), repeats)) / 1e9
    return peak, [_row(case, library, target, repeats, peak) for case in cases]


def _row(case: Case, library: Library, target: TargetSpec, repeats: int, peak: float) -> Row:
    arguments = arguments_of(case, target)
    call = library.bind(case.symbol, arguments)
    ours = statistics.median(sampled(lambda: call(0, case.plan.tasks), repeats)) * 1e6
    work = case.step.spec.flops / 1e3
    return {
        "layer": f"{case.step.operator} {shape_text(case.step)}",
        "uses": case.uses,
        "kernel": case.plan.description,
        "tasks": case.plan.tasks,
        "us": ours,
        "GFLOP/s": work / ours,
        "of peak": f"{work / ours / peak:.0%}",
    }


def run(report: Report, repository: Path, models: Sequence[str], target: TargetSpec, repeats: int) -> None:
    """Measure every model's kernels."""
    with tempfile.TemporaryDirectory() as folder:
        for model in models:
            library_path = Path(folder) / f"{model}.so"
            peak, rows = measure(onnx_file(repository, model), target, repeats, library_path)
            report.table(f"{model}, {target.name}, peak {peak:.1f} GFLOP/s", rows)


def run_gaps(report: Report, repository: Path, models: Sequence[str], target: TargetSpec, sweep: int) -> None:
    """Measure what the static choices of every model's convolutions, and of some dense layers, leave to be gained."""
    gaps = []
    for model in models:
        specs = convolutions(onnx_file(repository, model), target)
        gaps += report_gaps(report, model, specs, target, sweep)
    gaps += report_gaps(report, "BERT-base", DENSE, target, sweep)
    report.target(f"median gap of {len(gaps)} layers", statistics.median(gaps), MOST_GAP)


def main() -> int:
    """Run the benchmark."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument("--models", nargs="+", default=["resnet50", "mobilenetv2"], metavar="NAME", help="models")
    parser.add_argument("--target", choices=list(TARGETS), help="instruction set, if not the best one here")
    parser.add_argument("--repeats", type=int, default=7, help="samples of each kernel; the median counts")
    parser.add_argument("--gap", action="store_true", help="instead: static choices against the best of a sweep")
    parser.add_argument("--sweep", type=int, default=40, metavar="N", help="kernels of a layer's sweep at most")
    options = parser.parse_args()
    report = start_report("Kernels, float32, one core")
    repository, target = ensure_zoo(options.repository, options.models), detect(options.target)
    if options.gap:
        run_gaps(report, repository, options.models, target, options.sweep)
    else:
        run(report, repository, options.models, target, options.repeats)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
