"""From steps to machine code: a kernel plan for every step, a symbol per distinct plan, packed weights, the library."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gangway.artifact.format import TargetSpec, Version
from gangway.artifact.writer import ArtifactWriter
from gangway.compiler import codegen
from gangway.compiler.buffers import Step
from gangway.compiler.errors import UnsupportedModelError
from gangway.compiler.specs import KernelPlan
from gangway.compiler.templates import registry

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


def name_symbols(plans: Sequence[KernelPlan]) -> dict[KernelPlan, str]:
    """Return one symbol per distinct plan."""
    return {plan: symbol_name(index, plan) for index, plan in enumerate(dict.fromkeys(plans))}


def symbol_name(index: int, plan: KernelPlan) -> str:
    """Return the name of a kernel's function, "k3_conv"."""
    return f"k{index}_{type(plan.spec).__name__.removesuffix('Spec').lower()}"


def make_version(plan: KernelPlan, symbol: str) -> Version:
    """Return how an artifact describes a kernel."""
    return Version(symbol, plan.tasks, plan.description, plan.blocking_bytes, plan.parallelism)


def build_kernels(
    symbols: dict[KernelPlan, str], target: TargetSpec, library: Path, progress: Callable[[int, int], None]
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


def build_part(part: Sequence[tuple[KernelPlan, str]], target: TargetSpec, path: Path) -> None:
    """Compile some kernels, with their symbols, into an object file."""
    functions: dict[str, Any] = {symbol: registry.emit(plan, target, symbol) for plan, symbol in part}
    codegen.build_object(functions, target, path)


def write_weights(
    steps: Sequence[Step], plans: Sequence[KernelPlan], target: TargetSpec, writer: ArtifactWriter
) -> list[tuple[int, ...]]:
    """Append every step's packed weights to weights.bin; return their offsets in bytes, in the order of the arguments.

    Constant operands of elementwise steps are written too, and their buffers told where they are.
    """
    offsets = []
    for step, plan in zip(steps, plans, strict=True):
        packed = registry.pack(plan, target, step.weights) if step.weights else ()
        offsets.append(tuple(writer.append_weights(np.ascontiguousarray(array).data) for array in packed))
        for buffer in step.inputs:
            if buffer.constant is not None:
                buffer.offset_bytes = writer.append_weights(np.ascontiguousarray(buffer.constant).data)
    return offsets
