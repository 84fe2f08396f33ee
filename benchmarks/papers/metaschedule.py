"""TVM's own search, MetaSchedule (Shao et al., NeurIPS 2022), beside our templates for convolutions.

`python -m benchmarks.papers.metaschedule PATH` searches kernels for the longest convolutions of a model. The kernels
that it finds are whole functions, without tasks that a gang could share, so they are for comparison only. Kernels are
built and run in this process: TVM's pools of processes take longer to start than a search of templates takes.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import te
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule

from gangway.artifact.format import TargetSpec
from gangway.compiler.frontend.importer import read_graph
from gangway.compiler.job import lower_graph
from gangway.compiler.kernels import codegen
from gangway.compiler.kernels.codegen import Library, aligned
from gangway.compiler.kernels.specs import ConvSpec, KernelSpec
from gangway.compiler.kernels.templates import registry
from gangway.compiler.kernels.templates.convolution import ConvolutionGeometry
from gangway.compiler.target import detect
from testing.report import Row, start_report

KERNELS = 4
TRIALS = 64
TRIALS_PER_ROUND = 16
ROUNDS = 9
_REPEATS = 3


def main(argv: Sequence[str]) -> int:
    """Search kernels for a model's longest convolutions and print both sides; return 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.papers.metaschedule", description=__doc__)
    parser.add_argument("path", type=Path, metavar="PATH", help="an .onnx file")
    parser.add_argument("--kernels", type=int, default=KERNELS, metavar="N", help=f"how many convolutions ({KERNELS})")
    parser.add_argument("--trials", type=int, default=TRIALS, metavar="N", help=f"trials of each search ({TRIALS})")
    options = parser.parse_args(argv)
    target = detect()
    steps = lower_graph(read_graph(options.path), target.lanes).steps
    uses = Counter(step.spec for step in steps if searchable(step.spec))
    rows: list[Row] = []
    for spec in longest(uses, target)[: options.kernels]:
        template_us, searched_us = compare(spec, target, options.trials)
        rows.append(
            {
                "layer": spec.text,
                "uses": uses[spec],
                "template GFLOP/s": round(spec.flops / template_us / 1e3, 1),
                "MetaSchedule GFLOP/s": round(spec.flops / searched_us / 1e3, 1),
            }
        )
    title = f"{options.path}: the static choice and MetaSchedule, {options.trials} trials, one core"
    start_report(title).table(title, rows)
    return 0


def longest(uses: Mapping[KernelSpec, int], target: TargetSpec) -> list[ConvSpec]:
    """Return the convolutions, those first on whose template kernels a model spends most time (uses x seconds)."""
    specs = [spec for spec in uses if isinstance(spec, ConvSpec)]
    seconds = {spec: uses[spec] * _template_seconds(spec, target) for spec in specs}
    return sorted(specs, key=lambda spec: -seconds[spec])


def _template_seconds(spec: ConvSpec, target: TargetSpec) -> float:
    plan = registry.plan(spec, target)
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernel.so"
        codegen.build_library({"kernel": registry.emit(plan, target, "kernel")}, target, library)
        kernel = Library(library).bind("kernel", arguments := _arguments(spec, target))
        seconds = min(_seconds(lambda: kernel(0, plan.tasks)) for _ in range(_REPEATS))
        del arguments
    return seconds


def searchable(spec: KernelSpec) -> bool:
    """Whether `packed_convolution` describes it."""
    return isinstance(spec, ConvSpec) and spec.groups == 1 and not spec.input_planar


def packed_convolution(spec: ConvSpec, lanes: int) -> Any:
    """The convolution as a `tirx.PrimFunc` without any schedule: x, weights and y blocked, halo in x, no epilogue."""
    inputs, outputs = -(-spec.in_channels // lanes), -(-spec.out_channels // lanes)
    (height, width), halo = spec.output_size, spec.input_halo
    top, left = halo - spec.pads[0], halo - spec.pads[1]
    x = te.placeholder((inputs, spec.height + 2 * halo, spec.width + 2 * halo, lanes), name="x")
    weights = te.placeholder((outputs, inputs, *spec.kernel, lanes, lanes), name="weights")
    axes: Any = [te.reduce_axis((0, size)) for size in (inputs, *spec.kernel, lanes)]
    block, kh, kw, channel = axes

    def number(o: Any, row: Any, column: Any, lane: Any) -> Any:
        h = row * spec.stride[0] + kh * spec.dilation[0] + top
        w = column * spec.stride[1] + kw * spec.dilation[1] + left
        return te.sum(x[block, h, w, channel] * weights[o, block, kh, kw, channel, lane], axis=axes)

    y: Any = te.compute((outputs, height, width, lanes), number, name="y")
    return te.create_prim_func([x, weights, y])


def compare(spec: ConvSpec, target: TargetSpec, trials: int) -> tuple[float, float]:
    """Microseconds on one core of the template's static choice, and of the best kernel that the search finds.

    Both are measured in turns; the clock is the thread's own. Raises RuntimeError when the search finds nothing.
    """
    searched = _search(spec, target, trials)
    plan = registry.plan(spec, target)
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernel.so"
        codegen.build_library({"kernel": registry.emit(plan, target, "kernel")}, target, library)
        kernel = Library(library).bind("kernel", arguments := _arguments(spec, target))
        times = [(_seconds(lambda: kernel(0, plan.tasks)), _seconds(searched)) for _ in range(ROUNDS)]
        del arguments
    ours, theirs = (statistics.median(column) * 1e6 for column in zip(*times, strict=True))
    return ours, theirs


def _search(spec: ConvSpec, target: TargetSpec, trials: int) -> Callable[[], None]:
    """The best kernel, bound to arguments of its own."""
    machine = _InProcess()
    with tempfile.TemporaryDirectory() as folder:
        meta_schedule.tune_tir(
            packed_convolution(spec, target.lanes).with_attr("global_symbol", "main"),
            tvm.target.Target({"kind": "llvm", "mcpu": target.cpu, "num-cores": 1}),
            folder,
            max_trials_global=trials,
            num_trials_per_iter=min(trials, TRIALS_PER_ROUND),
            builder=_builder(machine),
            runner=_runner(machine),
            database="memory",
            cost_model="random",  # the learned ones need packages of their own
            measure_callbacks=[meta_schedule.measure_callback.AddToDatabase()],
            strategy=meta_schedule.search_strategy.EvolutionarySearch(population_size=64, init_min_unmeasured=16),
            num_tuning_cores=1,
            seed=1,
        )
    if machine.best is None:
        raise RuntimeError("MetaSchedule built no kernel")
    return machine.best


class _InProcess:
    """Builds and runs kernels; remembers the fastest."""

    def __init__(self) -> None:
        self._modules: dict[str, Any] = {}
        self._least = float("inf")
        self.best: Callable[[], None] | None = None

    def build(self, module: Any, target: Any) -> str:
        """Return the name of the kernel that was built. Raises what TVM raises."""
        name = str(len(self._modules))
        self._modules[name] = tvm.tirx.build(module, target=target)
        return name

    def run(self, name: str, shapes: Sequence[Sequence[int]]) -> float:
        """Return the seconds of one call."""
        rng = np.random.default_rng(0)
        tensors = [tvm.runtime.tensor(rng.random(tuple(map(int, shape)), np.float32)) for shape in shapes]
        function = self._modules.pop(name)["main"]
        call = lambda: function(*tensors)  # noqa: E731
        seconds = min(_seconds(call) for _ in range(_REPEATS))
        if seconds < self._least:
            self._least, self.best = seconds, call
        return seconds


def _builder(machine: _InProcess) -> Any:
    @derived_object
    class Builder(meta_schedule.builder.PyBuilder):  # type: ignore[misc]
        """Builds in this process."""

        def build(self, build_inputs: Any) -> Any:
            return [self._one(item) for item in build_inputs]

        def _one(self, item: Any) -> Any:
            try:
                return meta_schedule.builder.BuilderResult(machine.build(item.mod, item.target), None)
            except RuntimeError as error:  # a schedule that cannot be built is a bad sample, not the end
                return meta_schedule.builder.BuilderResult(None, str(error))

    return Builder()


def _runner(machine: _InProcess) -> Any:
    @derived_object
    class Done(meta_schedule.runner.PyRunnerFuture):  # type: ignore[misc]
        """A run that has ended."""

        def __init__(self, seconds: float) -> None:
            super().__init__()
            self._seconds = seconds

        def done(self) -> bool:
            return True

        def result(self) -> Any:
            return meta_schedule.runner.RunnerResult([self._seconds], None)

    @derived_object
    class Runner(meta_schedule.runner.PyRunner):  # type: ignore[misc]
        """Runs in this process."""

        def run(self, runner_inputs: Any) -> Any:
            return [Done(machine.run(item.artifact_path, [a.shape for a in item.args_info])) for item in runner_inputs]

    return Runner()


def _seconds(call: Callable[[], None]) -> float:
    begin = time.thread_time()
    call()
    return time.thread_time() - begin


def _arguments(spec: ConvSpec, target: TargetSpec) -> list[Any]:
    """Random arguments of the template's kernel."""
    rng, geometry = np.random.default_rng(0), ConvolutionGeometry(spec, target)
    shape = (spec.out_channels, spec.in_channels, *spec.kernel)
    raw = {"weights": rng.standard_normal(shape, np.float32), "bias": np.zeros(shape[0], np.float32)}
    images = [geometry.input, *([geometry.residual] if spec.residual else []), geometry.output]
    x, *others = (aligned(rng.random(image.elements, np.float32)) for image in images)
    plan = registry.plan(spec, target)
    return [x, *(aligned(array) for array in registry.pack(plan, target, raw)), *others]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
