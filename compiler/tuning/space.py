"""What can be tried: the distinct kernels of a model, and the points of their templates' knobs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gangway.artifact.format import TargetSpec
from gangway.artifact.tuning import Candidate
from gangway.compiler.buffers import Step
from gangway.compiler.describe import shape_text
from gangway.compiler.specs import KernelPlan
from gangway.compiler.templates import registry


@dataclass(frozen=True)
class Kernel:
    """Layers of one spec: a name and the fused operators for people, and what may compute them, static choice first."""

    name: str
    operator: str
    uses: int
    plans: tuple[KernelPlan, ...]


@dataclass(frozen=True)
class Space:
    """The distinct kernels of a model; `layers[l]` is the number of the one that computes layer l."""

    kernels: tuple[Kernel, ...]
    layers: tuple[int, ...]


def explore(steps: Sequence[Step], target: TargetSpec, trials: int) -> Space:
    """Return up to `trials` plans of each distinct spec."""
    uses = Counter(step.spec for step in steps)
    first = {step.spec: step for step in reversed(steps)}
    kernels = tuple(
        Kernel(shape_text(first[spec]), first[spec].operator, count, registry.versions(spec, target, trials))
        for spec, count in uses.items()
    )
    numbers = {spec: number for number, spec in enumerate(uses)}
    return Space(kernels, tuple(numbers[step.spec] for step in steps))


def candidate(plan: KernelPlan) -> Candidate:
    """Return a plan as data."""
    return Candidate(knob_text(plan), plan.description, plan.tasks, plan.blocking_bytes, plan.parallelism)


def knob_text(plan: KernelPlan) -> str:
    """Return what tells a plan from the others of its spec: "bands=2 groups=1"."""
    return " ".join(f"{name}={value}" for name, value in plan.knobs)
