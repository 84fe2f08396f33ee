"""Kernels of plans in one shared library, and what tests make of their tasks."""

import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import tvm

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels import codegen
from gangway.compiler.kernels.codegen import Library
from gangway.compiler.kernels.specs import Array, BatchPlan, ConvSpec, KernelPlan, KernelSpec, PoolSpec
from gangway.compiler.kernels.templates import registry

KEPT: Final = "kept"
Plans = Mapping[str, KernelPlan | BatchPlan]


def planned(specs: Iterable[KernelSpec], target: TargetSpec) -> dict[str, KernelPlan]:
    """The default plans, by symbols: k0, k1, ..."""
    return numbered(registry.plan(spec, target) for spec in specs)


def numbered(plans: Iterable[KernelPlan]) -> dict[str, KernelPlan]:
    return {f"k{number}": plan for number, plan in enumerate(plans)}


def build(plans: Plans, target: TargetSpec, path: Path) -> Library:
    """Build the kernels. A folder KEPT beside `path` has libraries of equal ones, which this compiler has built."""
    functions = {symbol: registry.emit(plan, target, symbol) for symbol, plan in plans.items()}
    if not (path.parent / KEPT).exists():
        codegen.build_library(functions, target, path)
        return Library(path)
    text = "".join([repr(target), *(tvm.ir.save_json(function) for function in functions.values())])
    kept = path.parent / KEPT / f"{hashlib.sha256(text.encode()).hexdigest()}.so"
    path.unlink(missing_ok=True)  # it may be in use, and must not change
    if kept.exists():
        shutil.copyfile(kept, path)
        return Library(path)
    codegen.build_library(functions, target, path)
    unfinished = kept.with_suffix(f".{os.getpid()}")
    shutil.copyfile(path, unfinished)
    unfinished.rename(kept)
    return Library(path)


def in_pieces(library: Library, symbol: str, arguments: Sequence[Array], tasks: int) -> None:
    """Run a kernel's tasks in two calls, last half first: tasks must not depend on each other."""
    library.call(symbol, arguments, tasks // 2, tasks)
    library.call(symbol, arguments, 0, tasks // 2)


def for_rows(library: Library, symbol: str, arguments: Sequence[Array], shared: Sequence[Array], tasks: int) -> None:
    """Run a kernel for several rows, task by task from the last one on; all rows share some of the arguments."""
    strides = [0 if any(array is one for one in shared) else array.strides[0] for array in arguments]
    batch = np.array([len(arguments[0]), *strides], np.int64)
    for task in reversed(range(tasks)):
        library.call(symbol, [*arguments, batch], task, task + 1)


def windows(x: Array, spec: ConvSpec | PoolSpec, fill: float) -> Any:
    """[C][OH][OW][KH][KW] of the padded input."""
    top, left, bottom, right = spec.pads
    padded = np.pad(x.astype(np.float64), ((0, 0), (top, bottom), (left, right)), constant_values=fill)
    dilation = spec.dilation if isinstance(spec, ConvSpec) else (1, 1)
    reach = tuple((k - 1) * d + 1 for k, d in zip(spec.kernel, dilation, strict=True))
    view = np.lib.stride_tricks.sliding_window_view(padded, reach, axis=(1, 2))
    return view[:, :: spec.stride[0], :: spec.stride[1], :: dilation[0], :: dilation[1]]
