"""The artifact that a tuning asks for."""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from gangway.artifact.format import Manifest, TargetSpec
from gangway.artifact.tuning import TunedKernel, Tuning, TuningError
from gangway.compiler.buffers import Step
from gangway.compiler.importer import read_graph
from gangway.compiler.job import lower_graph
from gangway.compiler.specs import KernelPlan
from gangway.compiler.templates import registry
from gangway.compiler.tuning.space import knob_text
from gangway.compiler.tuning.variant import KernelStore, write_variant


def compile_tuned(
    path: Path,
    tuning: Tuning,
    original: Path,
    manifest: Manifest,
    folder: Path,
    progress: Callable[[int, int], None],
) -> Manifest:
    """Compile the versions that `tuning` chose for the ONNX file `path` into the artifact `folder`.

    `original` is the artifact of static choices, with `manifest`. Raises TuningError when the tuning does not fit the
    model, ModelError and OSError.
    """
    begin_ns = time.monotonic_ns()
    target = manifest.target
    steps, _ = lower_graph(read_graph(path), target.lanes)
    versions = find_plans(tuning, steps, target)
    with tempfile.TemporaryDirectory() as scratch:
        store = KernelStore(Path(scratch), target)
        store.build((plan for plans in versions for plan in plans), progress)
        phase_us = {**manifest.phase_us, "versions": (time.monotonic_ns() - begin_ns) // 1000}
        return write_variant(original, replace(manifest, phase_us=phase_us), steps, versions, store, folder)


def find_plans(tuning: Tuning, steps: Sequence[Step], target: TargetSpec) -> list[tuple[KernelPlan, ...]]:
    """Return the plans of each layer's versions. Raises TuningError when the model has no such layers or knobs."""
    if len(tuning.layers) != len(steps):
        raise TuningError(f"the tuning has {len(tuning.layers)} layers, the model {len(steps)}")
    found: dict[int, tuple[KernelPlan, ...]] = {}
    for number, step in zip(tuning.layers, steps, strict=True):
        if number not in found:
            found[number] = _plans(tuning.kernels[number], step, target, tuning.trials)
        if found[number][0].spec != step.spec:
            raise TuningError(f"layer '{step.name}' is not what the tuning says")
    return [found[number] for number in tuning.layers]


def _plans(kernel: TunedKernel, step: Step, target: TargetSpec, trials: int) -> tuple[KernelPlan, ...]:
    plans = {knob_text(plan): plan for plan in registry.versions(step.spec, target, trials)}
    try:
        return tuple(plans[version.knobs] for version in kernel.versions)
    except KeyError as error:
        raise TuningError(f"layer '{step.name}' has no kernel with {error.args[0]}") from error
