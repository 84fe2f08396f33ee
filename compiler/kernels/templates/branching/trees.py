"""Ensembles of decision trees.

A step from a node to its child waits for memory: the node, the feature, the next node. So the steps of several trees
alternate, and the waits overlap. Leaves lead to themselves; a bundle of trees is done when all of them are at leaves.
"""

from collections.abc import Iterator
from functools import reduce
from typing import Any

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as ir

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.plain_specs import TreeSpec
from gangway.compiler.kernels.specs import KernelPlan, PackedWeights, RawWeights
from gangway.compiler.kernels.templates import builder as T
from gangway.compiler.kernels.templates.builder import Argument, Buffer, Expr, Register
from gangway.compiler.kernels.templates.tiling import UnsupportedSpecError, knob, make_plan

BUNDLE = 8  # trees whose steps alternate
TASK_STEPS = 1024
MOST_TARGETS = 1024  # their sums lie on the stack
_START = {"add": 0.0, "min": float("inf"), "max": float("-inf")}


def candidates(spec: TreeSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan: a task is a group of trees for some rows. Raises `UnsupportedSpecError`."""
    if spec.targets > MOST_TARGETS:
        raise UnsupportedSpecError(f"{spec.targets} targets of trees; {MOST_TARGETS} are possible")
    rows = min(spec.rows, max(1, TASK_STEPS * spec.groups // spec.steps))
    trees = -(-_bundles(spec) // spec.groups) * BUNDLE
    tasks = -(-spec.rows // rows) * spec.groups
    moved = (spec.inner + spec.leaves) * (16 + np.dtype(spec.dtype).itemsize) // spec.groups
    yield make_plan(spec, {"rows": rows}, tasks, f"{trees} trees, {rows} rows", moved, BUNDLE)


def _bundles(spec: TreeSpec) -> int:
    return -(-spec.trees // BUNDLE)


def pack(spec: TreeSpec, target: TargetSpec, raw: RawWeights) -> PackedWeights:
    """The raw weights, with trees of one leaf that adds nothing, so that all bundles are full."""
    empty = _leaf_count(spec) - spec.leaves
    start, itself = _START[spec.operator], spec.inner + spec.leaves
    padding = np.full(_per_group(spec) * spec.groups * BUNDLE - spec.trees, itself, np.int32)
    weights = raw["weights"]
    return (
        np.append(raw["thresholds"], np.zeros(empty, spec.dtype)),
        np.append(raw["links"], [[0, itself, itself, 0]] * empty).astype(np.int32),
        np.append(raw["roots"], padding),
        np.append(weights, np.full((empty, *weights.shape[1:]), start, spec.dtype)),
        np.zeros(1, np.int32) if spec.dense else np.append(raw["targets"], np.zeros(empty, np.int32)),
    )


def _per_group(spec: TreeSpec) -> int:
    """Bundles of a group."""
    return -(-_bundles(spec) // spec.groups)


def _leaf_count(spec: TreeSpec) -> int:
    """Leaves, and the one of padding."""
    return spec.leaves + 1


def emit(spec: TreeSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: x, thresholds, links, roots, weights, targets, y."""
    per_task, per_group = knob(plan, "rows"), _per_group(spec)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        first, group = T.quotient(number, spec.groups) * per_task, T.remainder(number, spec.groups)

        def row(index: Expr) -> None:
            place = first + index
            sums = T.scratch(spec.targets, spec.dtype)
            start = tirx.const(_START[spec.operator], spec.dtype)
            T.repeat(spec.targets, lambda i: T.store(sums, i, start, 1))
            T.repeat(per_group, lambda bundle: _bundle(spec, buffers, place, group * per_group + bundle, sums))
            into = (place * spec.groups + group) * spec.targets
            T.repeat(spec.targets, lambda i: T.store(buffers[-1], into + i, sums[i], 1))

        T.repeat(T.at_most(per_task, spec.rows - first), row)

    nodes, leaves = spec.inner + _leaf_count(spec), _leaf_count(spec)
    arguments = [
        Argument("x", spec.rows * spec.columns, spec.dtype),
        Argument("thresholds", nodes, spec.dtype),
        Argument("links", 4 * nodes, "int32"),
        Argument("roots", per_group * spec.groups * BUNDLE, "int32"),
        Argument("weights", leaves * (spec.targets if spec.dense else 1), spec.dtype),
        Argument("targets", 1 if spec.dense else leaves, "int32"),
        Argument("y", spec.rows * spec.groups * spec.targets, spec.dtype),
    ]
    return T.kernel(symbol, arguments, task)


def _bundle(spec: TreeSpec, buffers: tuple[Buffer, ...], row: Expr, bundle: Expr, sums: Buffer) -> None:
    """Follow the trees of a bundle to their leaves, and take those up."""
    roots = buffers[3]
    places = [Register(1, roots[bundle * BUNDLE + tree], "int32") for tree in range(BUNDLE)]
    least = reduce(tirx.Min, [place.value for place in places])
    with ir.While(least < tirx.const(spec.inner, "int32")):
        for place in places:
            place.set(_child(spec, buffers, row, T.bind(place.value)))
    for place in places:
        _take(spec, buffers, T.bind(place.value - spec.inner), sums)


def _child(spec: TreeSpec, buffers: tuple[Buffer, ...], row: Expr, node: Expr) -> Expr:
    x, thresholds, links, *_ = buffers
    value = Register(1, x[row * spec.columns + links[node * 4]], spec.dtype).value
    first, second = T.bind(links[node * 4 + 1]), T.bind(links[node * 4 + 2])
    child = T.bind(tirx.Select(value <= thresholds[node], first, second))
    if not spec.missing:
        return child
    leads_first = tirx.And(T.is_nan(value, spec.dtype, 1), links[node * 4 + 3] > 0)
    return tirx.Select(leads_first, first, child)


def _take(spec: TreeSpec, buffers: tuple[Buffer, ...], leaf: Expr, sums: Buffer) -> None:
    _, _, _, _, weights, targets, _ = buffers
    if spec.dense:
        T.repeat(
            spec.targets, lambda i: T.store(sums, i, _combined(spec, sums[i], weights[leaf * spec.targets + i]), 1)
        )
    else:
        at = T.bind(targets[leaf]) if spec.targets > 1 else 0
        T.store(sums, at, _combined(spec, sums[at], weights[leaf]), 1)


def _combined(spec: TreeSpec, old: Expr, new: Expr) -> Expr:
    if spec.operator == "add":
        return old + new
    return (tirx.Min if spec.operator == "min" else tirx.Max)(old, new)
