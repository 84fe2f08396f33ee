"""Kernels for several rows against numpy, for every number of rows in a call, at strides of any kind."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.codegen import Library, aligned
from gangway.compiler.kernels.specs import RELU, Array, ConvSpec
from gangway.compiler.kernels.templates import registry
from tests.helpers.kernel_runs import build, for_rows

SPECS = {
    "several blocks, smaller last group, residual": ConvSpec(602, 1, 1, 150, residual=True, activation=RELU),
    "window as large as the image": ConvSpec(32, 3, 2, 17, kernel=(3, 2)),
}
GAP = 7  # numbers between rows that belong to nobody
GUARD = 77.0


def rows_in_memory(values: Array, width: int) -> Array:
    """The rows, each at the start of `width` + GAP numbers; what is behind them is the guard."""
    memory = np.full((len(values), width + GAP), GUARD, np.float32)
    memory[:, : values.shape[1]] = values
    memory[:, values.shape[1] : width] = 0  # surplus channels
    return aligned(memory, offset_bytes=4)


def blocked(x: Array, lanes: int) -> Array:
    """[rows][C][H][W] -> [rows][blocks of channels x pixels x lanes]."""
    rows, channels, height, width = x.shape
    padded = np.pad(x, ((0, 0), (0, -channels % lanes), (0, 0), (0, 0)))
    return padded.reshape(rows, -1, lanes, height, width).transpose(0, 1, 3, 4, 2).reshape(rows, -1)


def answered(
    library: Library, tasks: int, inputs: Array, packed: Sequence[Array], residual: Array | None, outputs: int
) -> Array:
    """What the kernel "batch" makes of these rows: memory of so many outputs for each, and of what is behind them."""
    tensors = [rows_in_memory(inputs, inputs.shape[1]), *packed]
    tensors += [] if residual is None else [rows_in_memory(residual, outputs)]
    tensors += [rows_in_memory(np.full((len(inputs), outputs), 5, np.float32), outputs)]
    for_rows(library, "batch", tensors, packed, tasks)
    return tensors[-1]


@pytest.mark.parametrize("name", SPECS)
def test_every_number_of_rows(name: str, target: TargetSpec, library_path: Path, rng: np.random.Generator) -> None:
    spec, lanes = SPECS[name], target.lanes
    plan = registry.batch_plan(spec, target)
    assert plan is not None
    library = build({"batch": plan}, target, library_path)
    shape = (spec.out_channels, spec.in_channels, *spec.kernel)
    raw = {"weights": rng.standard_normal(shape, np.float32), "bias": rng.standard_normal(shape[0], np.float32)}
    packed = [aligned(array) for array in registry.pack(registry.plan(spec, target), target, raw)]
    outputs = -(-spec.out_channels // lanes) * lanes
    for rows in range(1, plan.rows + 1):
        x = rng.standard_normal((rows, spec.in_channels, spec.height, spec.width), np.float32)
        residual = rng.standard_normal((rows, spec.out_channels), np.float32)
        inputs = blocked(x, lanes)
        y = answered(library, plan.tasks, inputs, packed, residual if spec.residual else None, outputs)
        wanted = np.einsum("rcij,ocij->ro", x.astype(np.float64), raw["weights"]) + raw["bias"]
        wanted = np.maximum(wanted + residual, 0) if spec.residual else wanted
        assert np.abs(y[:, : spec.out_channels] - wanted).max() <= 1e-5 * np.abs(wanted).max()
        assert not y[:, spec.out_channels : outputs].any(), "surplus channels are not zero"
        assert (y[:, outputs:] == GUARD).all()


def test_only_dense_layers_have_a_kernel_for_several_rows(target: TargetSpec) -> None:
    window = SPECS["window as large as the image"]
    assert registry.batch_plan(replace(window, height=4), target) is None
    assert registry.batch_plan(replace(window, input_halo=1), target) is None
    assert registry.batch_plan(replace(window, pads=(1, 0, 0, 0), height=2, input_halo=1), target) is None
    assert registry.batch_plan(replace(window, in_channels=40), target) is None or target.lanes < 16
    assert registry.batch_plan(replace(window, groups=32, out_channels=32), target) is None
