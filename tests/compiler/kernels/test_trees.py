"""Ensembles of trees on every target, against a loop over their nodes."""

from pathlib import Path

import numpy as np

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.codegen import aligned
from gangway.compiler.kernels.plain_specs import TreeSpec
from gangway.compiler.kernels.specs import Array
from gangway.compiler.kernels.templates import registry
from tests.helpers.kernel_runs import build, planned

GUARD = 16
COMBINE = {"add": np.add, "min": np.minimum, "max": np.maximum}
START = {"add": 0.0, "min": np.inf, "max": -np.inf}


def weights(spec: TreeSpec, random: np.random.Generator) -> dict[str, Array]:
    """Trees of random nodes, whose children have larger numbers."""
    count = spec.inner + spec.leaves
    links = np.zeros((count, 4), np.int32)
    links[: spec.inner, 0] = random.integers(spec.columns, size=spec.inner)
    links[:, 3] = random.integers(2, size=count) if spec.missing else 0
    for node in range(count):
        links[node, 1:3] = random.integers(node + 1, count, 2) if node < spec.inner else node
    shape = (spec.leaves, spec.targets) if spec.dense else spec.leaves
    return {
        "thresholds": random.standard_normal(count).astype(spec.dtype),
        "links": links,
        "roots": random.integers(count, size=spec.trees).astype(np.int32),
        "weights": random.standard_normal(shape).astype(spec.dtype),
        "targets": np.zeros(0, "i4") if spec.dense else random.integers(spec.targets, size=spec.leaves).astype("i4"),
    }


def expected(spec: TreeSpec, x: Array, raw: dict[str, Array]) -> Array:
    """All trees together, [rows, targets]."""
    y = np.full((spec.rows, spec.targets), START[spec.operator], spec.dtype)
    for row, line in enumerate(x):
        for root in raw["roots"].tolist():
            node = root
            while node < spec.inner:
                feature, first, second, nan_first = raw["links"][node].tolist()
                goes_first = nan_first if np.isnan(line[feature]) else line[feature] <= raw["thresholds"][node]
                node = first if goes_first else second
            leaf = node - spec.inner
            at = slice(None) if spec.dense else raw["targets"][leaf]
            y[row, at] = COMBINE[spec.operator](y[row, at], raw["weights"][leaf])
    return y


def test_trees(target: TargetSpec, library_path: Path) -> None:
    random = np.random.default_rng(0)
    specs = [
        TreeSpec("float32", 3, 7, 21, 40, 30, 2, 3, "add", dense=False, missing=True, steps=60),
        TreeSpec("float64", 5, 4, 5, 12, 9, 3, 1, "add", dense=True, missing=False, steps=15),
        TreeSpec("float32", 2, 4, 17, 12, 9, 1, 2, "min", dense=False, missing=False, steps=15),
        TreeSpec("float64", 2, 4, 9, 12, 9, 3, 1, "max", dense=True, missing=True, steps=15),
    ]
    plans = planned(specs, target)
    library = build(plans, target, library_path)
    for spec, (symbol, plan) in zip(specs, plans.items(), strict=True):
        x = random.standard_normal((spec.rows, spec.columns)).astype(spec.dtype)
        x[0, 0] = np.nan
        raw = weights(spec, random)
        y = aligned(np.full(spec.rows * spec.groups * spec.targets + GUARD, 77, spec.dtype), 8)
        arguments = [aligned(array, 8) for array in (x, *registry.pack(plan, target, raw))]
        for task in reversed(range(plan.tasks)):
            library.call(symbol, [*arguments, y], task, task + 1)
        assert (y[-GUARD:] == 77).all()
        parts = y[:-GUARD].reshape(spec.rows, spec.groups, spec.targets)
        got = COMBINE[spec.operator].reduce(parts, axis=1)
        np.testing.assert_allclose(got, expected(spec, x, raw), rtol=1e-5, atol=1e-5)
