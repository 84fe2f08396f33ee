"""Interpolation alone: any table of places and weights, lines beside guards."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.codegen import aligned
from gangway.compiler.kernels.specs import Array, KernelSpec, ResizeSpec, lines_kept
from gangway.compiler.kernels.templates import registry

GUARD = 9.0


def table(rng: np.random.Generator, before: int, after: int, taps: int) -> tuple[Array, Array]:
    """Places that wander to and fro a little while they grow, and weights."""
    centres = np.linspace(0, before - 1, after).astype(int)
    places = centres[:, None] + rng.integers(-2, 3, (after, taps))
    weights = rng.standard_normal((after, taps), np.float32) if taps > 1 else np.ones((after, 1), np.float32)
    return np.sort(np.clip(places, 0, before - 1), axis=1), weights


@pytest.mark.parametrize("plain", [False, True])
def test_any_table(
    plain: bool,
    target: TargetSpec,
    compiled: Callable[[Sequence[KernelSpec]], list[Any]],
    rng: np.random.Generator,
    blocked: Callable[[Array, int, int], Array],
) -> None:
    cases = [((13, 17), (40, 21), (2, 4)), ((30, 700), (11, 900), (1, 2)), ((5, 1), (33, 1), (3, 1))]
    halos = (0, 0) if plain else (1, 2)
    specs: list[ResizeSpec] = []
    tables = []
    for before, after, taps in cases:
        raw: dict[str, Array] = {}
        for name, old, new, count in zip(("row", "column"), before, after, taps, strict=True):
            raw[f"{name}_places"], raw[f"{name}_weights"] = table(rng, old, new, count)
        tables.append(raw)
        specs.append(ResizeSpec(20, *before, after, taps, lines_kept(raw["row_places"]), plain, *halos))
    for kernel, spec, raw in zip(compiled(specs), specs, tables, strict=True):
        x = rng.standard_normal((spec.channels, spec.height, spec.width), np.float32)
        rows = (x[:, raw["row_places"]] * raw["row_weights"][None, :, :, None]).sum(axis=2)
        wanted = (rows[:, :, raw["column_places"]] * raw["column_weights"]).sum(axis=3)
        source, result = (
            (aligned(array), aligned(np.zeros_like(array)))
            if plain
            else (blocked(array, target.lanes, halo), blocked(np.zeros_like(array), target.lanes, halo))
            for array, halo in zip((x, wanted), halos, strict=True)
        )
        guarded = aligned(np.full(result[1].size + 64, GUARD, np.float32))
        guarded[: result[1].size] = 0
        packed = [aligned(array) for array in registry.pack(registry.plan(spec, target), target, raw)]
        kernel([source[0], *packed, guarded])
        got = guarded[: result[1].size].reshape(result[1].shape)
        np.testing.assert_allclose(got, result[0], atol=2e-6 * np.abs(wanted).max())
        assert (guarded[result[1].size :] == GUARD).all()
