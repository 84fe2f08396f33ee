"""From steps to machine code: a kernel plan for every step, a symbol per distinct plan, packed weights, the library."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gangway.artifact.format import BatchKernel, TargetSpec, Version
from gangway.artifact.writer import ArtifactWriter
from gangway.compiler.errors import UnsupportedModelError
from gangway.compiler.kernels import codegen
from gangway.compiler.kernels.specs import Array, BatchPlan, KernelPlan
from gangway.compiler.kernels.templates import registry
from gangway.compiler.place.steps import Step

Plan = KernelPlan | BatchPlan
KERNELS_PER_OBJECT = 4  # small enough for a smooth progress bar; the cost of one more object file is a few milliseconds


def choose_plans(steps: Sequence[Step], target: TargetSpec) -> list[KernelPlan]:
    """Return the kernel of each step. Raises UnsupportedModelError when no template computes a step."""
    plans = []
    for step in steps:
        try:
            plans.append(registry.plan(step.spec, target))
        except registry.UnsupportedSpecError as error:
            raise UnsupportedModelError(f"node '{step.name}' ({step.operator}): {error}") from error
    return plans


def with_batch_plans(plans: Iterable[KernelPlan], target: TargetSpec) -> list[Plan]:
    """Return the distinct plans, and those of their kernels for several rows."""
    distinct = dict.fromkeys(plans)
    batches = (registry.batch_plan(spec, target) for spec in dict.fromkeys(plan.spec for plan in distinct))
    return [*distinct, *(batch for batch in batches if batch)]


def name_symbols(plans: Sequence[Plan]) -> dict[Plan, str]:
    """Return one symbol per plan."""
    return {plan: symbol_name(index, plan) for index, plan in enumerate(plans)}


def symbol_name(index: int, plan: Plan) -> str:
    """Return the name of a kernel's function, "k3_conv" or, for several rows, "k3_conv_rows"."""
    kind = type(plan.spec).__name__.removesuffix("Spec").lower()
    return f"k{index}_{kind}" + "_rows" * isinstance(plan, BatchPlan)


def make_version(plan: KernelPlan, symbols: Mapping[Plan, str], target: TargetSpec) -> Version:
    """Return how an artifact describes a kernel, and that for several rows."""
    batch = registry.batch_plan(plan.spec, target)
    return Version(
        symbols[plan],
        plan.tasks,
        plan.description,
        plan.blocking_bytes,
        plan.parallelism,
        BatchKernel(symbols[batch], batch.rows, batch.tasks, batch.description) if batch else None,
    )


def build_kernels(
    symbols: Mapping[Plan, str], target: TargetSpec, library: Path, progress: Callable[[int, int], None]
) -> None:
    """Compile all kernels into the shared library; `progress(done, total)` counts them."""
    items = list(symbols.items())
    objects = []
    for begin in range(0, len(items), KERNELS_PER_OBJECT):
        progress(begin, len(items))
        objects.append(library.with_suffix(f".{begin}.o"))
        build_part(items[begin : begin + KERNELS_PER_OBJECT], target, objects[-1])
    codegen.link(objects, library)
    for path in objects:
        path.unlink()
    progress(len(items), len(items))


def build_part(part: Sequence[tuple[Plan, str]], target: TargetSpec, path: Path) -> None:
    """Compile some kernels, with their symbols, into an object file."""
    functions: dict[str, Any] = {symbol: registry.emit(plan, target, symbol) for plan, symbol in part}
    codegen.build_object(functions, target, path)


def write_weights(
    steps: Sequence[Step], plans: Sequence[KernelPlan], target: TargetSpec, writer: ArtifactWriter
) -> list[tuple[int, ...]]:
    """Append every step's packed weights to weights.bin; return their offsets in bytes, in the order of the arguments.

    Constant operands of elementwise steps are written too, and their buffers told where they are. Equal bytes are
    written once: the steps of a recurrent layer share theirs.
    """
    known: dict[bytes, int] = {}

    def append(array: Array) -> int:
        content = np.ascontiguousarray(array).data
        digest = hashlib.sha256(content).digest()
        if digest not in known:
            known[digest] = writer.append_weights(content)
        return known[digest]

    offsets = []
    for step, plan in zip(steps, plans, strict=True):
        packed = registry.pack(plan, target, step.weights) if step.weights else ()
        offsets.append(tuple(append(array) for array in packed))
        for buffer in step.inputs:
            if buffer.constant is not None:
                buffer.offset_bytes = append(buffer.constant)
    return offsets
