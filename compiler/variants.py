"""The kernels that can be tried for a model, and artifacts with those that a tuning chose.

What can be tried are the distinct specs of a model, each with the points of its template's knobs. The artifacts differ
from that of static choices in kernels only: layers, weights and places in memory are the same. Nothing is measured or
decided here.
"""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gangway.artifact.format import Manifest, TargetSpec
from gangway.artifact.tuning import KnobCandidate, TunedKernel, Tuning, TuningError
from gangway.artifact.writer import VariantWriter
from gangway.compiler.arguments import NO_DIMENSIONS
from gangway.compiler.job import steps_of
from gangway.compiler.kernels.codegen import Plan, build_part, make_version, symbol_name, with_batch_plans
from gangway.compiler.kernels.linker import link
from gangway.compiler.kernels.objects import has_extents
from gangway.compiler.kernels.specs import KernelPlan
from gangway.compiler.kernels.templates import registry
from gangway.compiler.place.costs import max_ranks, shape_text
from gangway.compiler.place.memory import PlacedLayer


@dataclass(frozen=True)
class DistinctKernel:
    """Layers of one spec: a name and the fused operators for people, and what may compute them, static choice first."""

    name: str
    operator: str
    uses: int
    plans: tuple[KernelPlan, ...]


@dataclass(frozen=True)
class KernelSpace:
    """The distinct kernels of a model; `layers[l]` is the number of the one that computes layer l."""

    kernels: tuple[DistinctKernel, ...]
    layers: tuple[int, ...]


def explore(steps: Sequence[PlacedLayer], target: TargetSpec, trials: int) -> KernelSpace:
    """Return up to `trials` plans of each distinct spec."""
    uses = Counter(step.spec for step in steps)
    first = {step.spec: step for step in reversed(steps)}
    kernels = tuple(
        DistinctKernel(shape_text(first[spec]), first[spec].operator, count, registry.versions(spec, target, trials))
        for spec, count in uses.items()
    )
    numbers = {spec: number for number, spec in enumerate(uses)}
    return KernelSpace(kernels, tuple(numbers[step.spec] for step in steps))


def candidate(plan: KernelPlan) -> KnobCandidate:
    """Return a plan as data."""
    return KnobCandidate(knob_text(plan), plan.description, plan.tasks, plan.blocking_bytes, plan.parallelism)


def knob_text(plan: KernelPlan) -> str:
    """Return what tells a plan from the others of its spec: "bands=2 groups=1"."""
    return " ".join(f"{name}={value}" for name, value in plan.knobs)


class KernelStore:
    """Kernels in machine code, each compiled once, in object files of a folder; `symbols` are the functions' names."""

    def __init__(self, folder: Path, target: TargetSpec) -> None:
        self._folder = folder
        self._target = target
        self.symbols: dict[Plan, str] = {}

    def build(self, plans: Iterable[KernelPlan], progress: Callable[[int, int], None]) -> None:
        """Compile those that are not there yet; `progress(done, total)` counts them."""
        missing = [plan for plan in with_batch_plans(plans, self._target) if plan not in self.symbols]
        for done, plan in enumerate(missing):
            progress(done, len(missing))
            symbol = symbol_name(len(self.symbols), plan)
            build_part([(plan, symbol)], self._target, self._object(symbol))
            self.symbols[plan] = symbol
        progress(len(missing), len(missing))

    def link(self, plans: Iterable[KernelPlan], library: Path) -> None:
        """Put kernels that are there into a shared library."""
        link([self._object(self.symbols[plan]) for plan in with_batch_plans(plans, self._target)], library)

    def _object(self, symbol: str) -> Path:
        return self._folder / f"{symbol}.o"


def write_variant(
    original: Path,
    manifest: Manifest,
    steps: Sequence[PlacedLayer],
    versions: Sequence[Sequence[KernelPlan]],
    store: KernelStore,
    folder: Path,
) -> Manifest:
    """Write the artifact `folder`, whose name is its key: layer l of `manifest`, in `original`, in `versions[l]`.

    All plans must be in the store. Raises OSError.
    """
    with VariantWriter(folder, original) as writer:
        store.link((plan for plans in versions for plan in plans), writer.kernels_path)
        layers = tuple(
            replace(
                layer,
                arguments=layer.arguments[:-1] if has_extents(layer.versions[0].symbol) else layer.arguments,
                versions=tuple(make_version(plan, store.symbols, manifest.target) for plan in plans),
                max_ranks=max_ranks(step, max(plan.tasks for plan in plans)),
            )
            for layer, step, plans in zip(manifest.layers, steps, versions, strict=True)
        )
        return writer.commit(replace(manifest, key=folder.name, layers=layers))


def compile_tuned(
    path: Path,
    tuning: Tuning,
    original: Path,
    manifest: Manifest,
    folder: Path,
    progress: Callable[[int, int], None],
    dimensions: Mapping[str, int] = NO_DIMENSIONS,
) -> Manifest:
    """Compile the versions that `tuning` chose for the ONNX file `path` into the artifact `folder`.

    `original` is the artifact of static choices for these `dimensions`, with `manifest`. Raises TuningError when the
    tuning does not fit the model, ModelError and OSError.
    """
    begin_ns = time.monotonic_ns()
    target = manifest.target
    steps = steps_of(path, dimensions, manifest)
    versions = find_plans(tuning, steps, target)
    with tempfile.TemporaryDirectory() as scratch:
        store = KernelStore(Path(scratch), target)
        store.build((plan for plans in versions for plan in plans), progress)
        phase_us = {**manifest.phase_us, "versions": (time.monotonic_ns() - begin_ns) // 1000}
        return write_variant(original, replace(manifest, phase_us=phase_us), steps, versions, store, folder)


def find_plans(tuning: Tuning, steps: Sequence[PlacedLayer], target: TargetSpec) -> list[tuple[KernelPlan, ...]]:
    """Return the plans of each layer's versions. Raises TuningError when the model has no such layers or knobs."""
    if len(tuning.layers) != len(steps):
        raise TuningError(f"the tuning has {len(tuning.layers)} layers, the model {len(steps)}")
    found: dict[int, tuple[KernelPlan, ...]] = {}
    for number, step in zip(tuning.layers, steps, strict=True):
        if number not in found:
            found[number] = _plans(tuning.kernels[number], step, target, tuning.trials)
        if found[number][0].spec != step.spec:
            raise TuningError(f"layer '{step.name}' differs from the one that was tuned")
    return [found[number] for number in tuning.layers]


def _plans(kernel: TunedKernel, step: PlacedLayer, target: TargetSpec, trials: int) -> tuple[KernelPlan, ...]:
    plans = {knob_text(plan): plan for plan in registry.versions(step.spec, target, trials)}
    try:
        return tuple(plans[version.knobs] for version in kernel.versions)
    except KeyError as error:
        raise TuningError(f"layer '{step.name}' has no kernel with {error.args[0]}") from error
