"""Winograd convolutions for several rows against the kernel for one row, bit for bit, for every number of rows."""

from pathlib import Path

import numpy as np
import pytest

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.codegen import aligned
from gangway.compiler.kernels.specs import RELU, Array, ConvSpec
from gangway.compiler.kernels.templates import registry
from tests.helpers.kernel_runs import build, for_rows

pytestmark = pytest.mark.long

WHOLE = {"kernel": (3, 3), "pads": (1, 1, 1, 1), "input_halo": 1}
SPECS = {
    "tiles that overlap, surplus channels, residual": ConvSpec(
        120, 8, 15, 120, **WHOLE, residual=True, residual_halo=2, output_halo=1, activation=RELU
    ),
    "smaller last group": ConvSpec(72, 8, 16, 136, **WHOLE),
}
GAP = 7  # numbers between rows that belong to nobody
GUARD = 77.0


def images(rng: np.random.Generator, rows: int, channels: int, size: tuple[int, int], halo: int, lanes: int) -> Array:
    """Random rows [rows][C/L x (H + 2h) x (W + 2h) x L + GAP]; halos and surplus channels are zero."""
    x = rng.standard_normal((rows, channels, *size), np.float32)
    padded = np.pad(x, ((0, 0), (0, -channels % lanes), (halo, halo), (halo, halo)))
    blocks = padded.reshape(rows, -1, lanes, *padded.shape[2:]).transpose(0, 1, 3, 4, 2)
    return aligned(np.pad(blocks.reshape(rows, -1), ((0, 0), (0, GAP)), constant_values=GUARD), offset_bytes=4)


@pytest.mark.parametrize("name", SPECS)
def test_every_number_of_rows(name: str, target: TargetSpec, library_path: Path, rng: np.random.Generator) -> None:
    spec, lanes = SPECS[name], target.lanes
    one, batch = registry.plan(spec, target), registry.batch_plan(spec, target)
    assert batch is not None
    library = build({"one": one, "batch": batch}, target, library_path)
    shape = (spec.out_channels, spec.in_channels, *spec.kernel)
    raw = {"weights": rng.standard_normal(shape, np.float32), "bias": rng.standard_normal(shape[0], np.float32)}
    packed = [aligned(array) for array in registry.pack(one, target, raw)]
    for rows in range(1, batch.rows + 1):
        x = images(rng, rows, spec.in_channels, (spec.height, spec.width), spec.input_halo, lanes)
        added = [images(rng, rows, spec.out_channels, spec.output_size, spec.residual_halo, lanes)] * spec.residual
        y = images(rng, rows, spec.out_channels, spec.output_size, spec.output_halo, lanes)
        wanted = aligned(y)
        for row in range(rows):
            library.call("one", [x[row], *packed, *(image[row] for image in added), wanted[row]], 0, one.tasks)
        for_rows(library, "batch", [x, *packed, *added, y], packed, batch.tasks)
        assert np.array_equal(y, wanted)
        assert (y[:, -GAP:] == GUARD).all()


def test_images_with_tiles_enough_have_no_such_kernel(target: TargetSpec) -> None:
    assert registry.plan(ConvSpec(128, 28, 56, 128, **WHOLE), target).description.startswith("winograd")
    assert registry.batch_plan(ConvSpec(128, 28, 56, 128, **WHOLE), target) is None
