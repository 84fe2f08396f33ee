"""Dense layers of integer weights against numpy: bits, blocks, zero points, odd sizes, and every number of rows."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.codegen import aligned
from gangway.compiler.kernels.packed_specs import PackedDenseSpec
from gangway.compiler.kernels.specs import RELU, Array
from gangway.compiler.kernels.templates import registry
from tests.helpers.kernel_runs import build, for_rows

pytestmark = pytest.mark.long

GAP, GUARD = 7, 77.0  # numbers between rows that belong to nobody, and what they are
SPECS = [
    PackedDenseSpec(64, 1, 32, 4, 16),
    PackedDenseSpec(301, 1, 75, 4, 32, zeros=True, activation=RELU),
    PackedDenseSpec(603, 1, 33, 4, 603, zeros=True, residual=True),
    PackedDenseSpec(530, 5, 17, 8, 16, zeros=True, residual=True, activation=RELU),
    PackedDenseSpec(523, 1, 50, 8, 1024),
    PackedDenseSpec(268, 77, 50, 8, 268, residual=True),
    PackedDenseSpec(1030, 33, 81, 4, 512, zeros=True),
    PackedDenseSpec(40, 130, 9, 4, 16),
]


def made(spec: PackedDenseSpec, rng: np.random.Generator) -> tuple[dict[str, Array], Array]:
    """Raw weights, and the same as float64."""
    low, high = (0, 16) if spec.bits == 4 else (-128, 128)
    shape = spec.out_channels, spec.in_channels
    integers = rng.integers(low, high, shape)
    scales = rng.uniform(0.5, 2, (spec.out_channels, spec.blocks)).astype(np.float32)
    zeros = rng.integers(low, high, scales.shape) if spec.zeros else np.full(scales.shape, 8 if spec.bits == 4 else 0)
    block = np.arange(spec.in_channels) // spec.block
    real = (integers - zeros[:, block]) * scales[:, block].astype(np.float64)
    bias = rng.standard_normal(spec.out_channels, np.float32) * 100
    stored = integers.astype(np.int8)
    if spec.bits == 4:
        even = np.pad(integers, ((0, 0), (0, spec.in_channels % 2)))
        stored = (even[:, ::2] | even[:, 1::2] << 4).astype(np.uint8)
    return {"integers": stored, "scales": scales, "zeros": zeros.astype(np.int8), "bias": bias}, real


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.text)
def test_a_row(
    spec: PackedDenseSpec,
    target: TargetSpec,
    compiled: Callable[..., list[Callable[..., None]]],
    rng: np.random.Generator,
    blocked: Callable[[Array, int, int], Array],
    plain: Callable[[Array, int, int], Array],
) -> None:
    raw, real = made(spec, rng)
    x = rng.standard_normal((spec.in_channels, 1, spec.positions), np.float32)
    added = rng.standard_normal((spec.out_channels, 1, spec.positions), np.float32)
    stored = blocked(x, target.lanes, 0)
    stored.reshape(-1)[...] = np.where(stored.reshape(-1) == 0, np.nan, stored.reshape(-1))  # surplus channels
    blocks = -(-spec.out_channels // target.lanes)
    y = aligned(np.full((blocks, 1, spec.positions, target.lanes), GUARD, np.float32))
    packed = [aligned(array) for array in registry.pack(registry.plan(spec, target), target, raw)]
    residual = [blocked(added, target.lanes, 0)] if spec.residual else []
    (kernel,) = compiled([spec])
    kernel([stored, *packed, *residual, y])
    wanted = real @ x[:, 0].astype(np.float64) + raw["bias"][:, None] + (added[:, 0] if spec.residual else 0)
    wanted = np.maximum(wanted, 0) if spec.activation == RELU else wanted
    assert np.abs(plain(y, spec.out_channels, 0)[:, 0] - wanted).max() <= 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("spec", [SPECS[1], SPECS[2], SPECS[4]], ids=lambda spec: spec.text)
def test_every_number_of_rows(
    spec: PackedDenseSpec, target: TargetSpec, library_path: Path, rng: np.random.Generator
) -> None:
    raw, real = made(spec, rng)
    plan, lanes = registry.batch_plan(spec, target), target.lanes
    assert plan is not None
    library = build({"batch": plan}, target, library_path)
    packed = [aligned(array) for array in registry.pack(registry.plan(spec, target), target, raw)]
    width, surplus = -(-spec.out_channels // lanes) * lanes, -spec.in_channels % lanes
    for rows in range(1, plan.rows + 1):
        x = rng.standard_normal((rows, spec.in_channels), np.float32)
        added = rng.standard_normal((rows, spec.out_channels), np.float32)
        y = aligned(np.full((rows, width + GAP), GUARD, np.float32), offset_bytes=4)
        memory = aligned(np.pad(x, ((0, 0), (0, surplus + GAP)), constant_values=np.nan), offset_bytes=4)
        residual = [aligned(np.pad(added, ((0, 0), (0, width + 3 - spec.out_channels))))] if spec.residual else []
        for_rows(library, "batch", [memory, *packed, *residual, y], packed, plan.tasks)
        wanted = x @ real.T + raw["bias"] + (added if spec.residual else 0)
        wanted = np.maximum(wanted, 0) if spec.activation == RELU else wanted
        assert np.abs(y[:, : spec.out_channels] - wanted).max() <= 1e-5 * np.abs(wanted).max()
        assert not y[:, spec.out_channels : width].any(), "surplus channels are not zero"
        assert (y[:, width:] == GUARD).all()


def test_odd_blocks_are_refused(target: TargetSpec) -> None:
    for block in (8, 24, 100):
        with pytest.raises(registry.UnsupportedSpecError):
            registry.plan(replace(SPECS[0], in_channels=301, block=block), target)
    assert registry.batch_plan(SPECS[3], target) is None
