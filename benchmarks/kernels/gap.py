"""How far the static choice of knobs is from the best of a sweep, layer by layer, on one core.

The best of many noisy samples looks better than it is. So the sweep only nominates: its leaders are measured again, in
turns with the static choice, the fastest of them is the winner, and the gap is the median ratio of new pairs. The clock
is the thread's own, which stands still while another process has the core.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.kernels.timing import sampled
from gangway.artifact.format import TargetSpec
from gangway.compiler.frontend.importer import read_graph
from gangway.compiler.job import lower_graph
from gangway.compiler.kernels import codegen
from gangway.compiler.kernels.codegen import Library, aligned
from gangway.compiler.kernels.linker import link
from gangway.compiler.kernels.specs import Array, ConvSpec, KernelPlan
from gangway.compiler.kernels.templates import registry
from testing.report import Report, Row

KERNELS_PER_OBJECT = 8
LEADERS = 3
SWEEP_ROUNDS = 3
DUEL_ROUNDS = 9
MOST_GAP = 0.03

DENSE = {f"dense 128x{k} -> {n}": ConvSpec(k, 1, 128, n) for k, n in ((768, 768), (768, 3072), (3072, 768))}
"""BERT-base's products at 128 tokens."""


@dataclass(frozen=True)
class Gap:
    """A layer, its static choice and the winner of the sweep; `ratio`: time of the first over time of the second."""

    name: str
    static: KernelPlan
    winner: KernelPlan
    static_us: float
    ratio: float


@dataclass(frozen=True)
class Sweep:
    """A layer's kernels, k0, k1, ... in a library; the first is the static choice."""

    name: str
    plans: Sequence[KernelPlan]
    library: Path


def convolutions(path: Path, target: TargetSpec) -> dict[str, ConvSpec]:
    """The distinct convolutions and dense layers of a model, by a name for people."""
    steps = lower_graph(read_graph(path), target.lanes).steps
    specs = dict.fromkeys(step.spec for step in steps if isinstance(step.spec, ConvSpec))
    return {f"{spec.text} {spec.activation.name}{' residual' * spec.residual}": spec for spec in specs}


def report_gaps(report: Report, title: str, specs: dict[str, ConvSpec], target: TargetSpec, sweep: int) -> list[float]:
    """Measure and tabulate; return the gaps."""
    with tempfile.TemporaryDirectory() as folder:
        sweeps = [
            build_sweep(name, spec, target, sweep, Path(folder) / f"{number}.so")
            for number, (name, spec) in enumerate(specs.items())
        ]
        gaps = [measure_gap(one, target) for one in sweeps]
    rows: list[Row] = [
        {
            "layer": gap.name,
            "static": gap.static.description,
            "us": gap.static_us,
            "best": gap.winner.description if gap.winner != gap.static else "the same",
            "gap": f"{gap.ratio - 1:+.1%}",
        }
        for gap in gaps
    ]
    report.table(f"{title}: static choice against the best of up to {sweep} kernels", rows)
    return [gap.ratio - 1 for gap in gaps]


def build_sweep(name: str, spec: ConvSpec, target: TargetSpec, sweep: int, library: Path) -> Sweep:
    """Compile up to `sweep` kernels of a layer."""
    plans = registry.versions(spec, target, sweep)
    objects = []
    for begin in range(0, len(plans), KERNELS_PER_OBJECT):
        part = range(begin, min(begin + KERNELS_PER_OBJECT, len(plans)))
        objects.append(library.with_suffix(f".{begin}.o"))
        codegen.build_object({f"k{i}": registry.emit(plans[i], target, f"k{i}") for i in part}, target, objects[-1])
    link(objects, library)
    return Sweep(name, plans, library)


def measure_gap(sweep: Sweep, target: TargetSpec) -> Gap:
    """Find the winner of a sweep, and compare it with the static choice."""
    plans, library = sweep.plans, Library(sweep.library)
    arguments = random_arguments(plans[0], target)
    calls = [_call(library, number, arguments, plan.tasks) for number, plan in enumerate(plans)]
    leaders = _ranked(calls, range(len(plans)), SWEEP_ROUNDS)[:LEADERS]
    winner = _ranked(calls, list(dict.fromkeys((0, *leaders))), DUEL_ROUNDS)[0]
    pairs = [(_time(calls[0]), _time(calls[winner])) for _ in range(DUEL_ROUNDS)]
    ratio = statistics.median(static / best for static, best in pairs) if winner else 1.0
    return Gap(sweep.name, plans[0], plans[winner], statistics.median(static for static, _ in pairs) * 1e6, ratio)


def _ranked(calls: Sequence[Callable[[], None]], numbers: Sequence[int], rounds: int) -> list[int]:
    """The numbers, the fastest by median first; they take turns."""
    times = [{number: _time(calls[number]) for number in numbers} for _ in range(rounds)]
    return sorted(numbers, key=lambda number: statistics.median(one[number] for one in times))


def _time(call: Callable[[], None]) -> float:
    return next(sampled(call, 1, time.thread_time))


def _call(library: Library, number: int, arguments: Sequence[Array], tasks: int) -> Callable[[], None]:
    kernel = library.bind(f"k{number}", arguments)
    return lambda: kernel(0, tasks)


def random_arguments(plan: KernelPlan, target: TargetSpec) -> list[Array]:
    """Random arguments, halos included: their values do not matter here."""
    spec = plan.spec
    assert isinstance(spec, ConvSpec)
    rng = np.random.default_rng(0)

    def image(channels: int, height: int, width: int, halo: int, lanes: int) -> Array:
        blocks = -(-channels // lanes)
        return aligned(rng.random(blocks * (height + 2 * halo) * (width + 2 * halo) * lanes, np.float32))

    lanes, size = target.lanes, spec.output_size
    shape = (spec.out_channels, spec.in_channels // spec.groups, *spec.kernel)
    raw = {"weights": rng.standard_normal(shape, np.float32), "bias": np.zeros(shape[0], np.float32)}
    return [
        image(spec.in_channels, spec.height, spec.width, spec.input_halo, 1 if spec.input_planar else lanes),
        *(aligned(array) for array in registry.pack(plan, target, raw)),
        *([image(spec.out_channels, *size, spec.residual_halo, lanes)] if spec.residual else []),
        image(spec.out_channels, *size, spec.output_halo, lanes),
    ]
