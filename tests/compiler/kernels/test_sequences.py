"""Kernels of transformers against numpy, for every target: packing, layer normalisation, gathering."""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import pytest

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.codegen import aligned
from gangway.compiler.kernels.plain_specs import GatherSpec
from gangway.compiler.kernels.specs import Array, KernelSpec, LayerNormSpec, SequencePackSpec
from gangway.compiler.kernels.templates import registry
from gangway.compiler.kernels.templates.tiling import UnsupportedSpecError

Compile = Callable[[Sequence[KernelSpec]], list[Callable[[Sequence[Array]], None]]]

PACKS = [(1, 1, 1), (1, 40, 40), (37, 48, 48), (8, 20, 23), (100, 96, 200)]  # positions, channels, stride


def blocks(plain: Array, lanes: int, surplus: float = 0.0) -> Array:
    """[P][C] -> [C/L][P][L]."""
    positions, channels = plain.shape
    padded = np.pad(plain, ((0, 0), (0, -channels % lanes)), constant_values=surplus)
    return aligned(padded.reshape(positions, -1, lanes).transpose(1, 0, 2))


def unblocked(blocked: Array) -> Array:
    """[C/L][P][L] -> [P][C], surplus channels included."""
    return blocked.transpose(1, 0, 2).reshape(blocked.shape[1], -1)


def test_packing_sequences(compiled: Compile, target: TargetSpec, rng: np.random.Generator) -> None:
    kernels = compiled([SequencePackSpec(*shape) for shape in PACKS])
    for kernel, (positions, channels, stride) in zip(kernels, PACKS, strict=True):
        full = rng.standard_normal((positions, stride), np.float32)
        wanted = blocks(full[:, :channels], target.lanes)
        y = aligned(np.full_like(wanted, 7))
        kernel([aligned(full, 4), y])
        np.testing.assert_array_equal(y, wanted)


def test_unpacking_sequences_touches_nothing_else(
    compiled: Compile, target: TargetSpec, rng: np.random.Generator
) -> None:
    kernels = compiled([SequencePackSpec(*shape, unpack=True) for shape in PACKS])
    for kernel, (positions, channels, stride) in zip(kernels, PACKS, strict=True):
        x = rng.standard_normal((positions, channels), np.float32)
        wanted = np.full((positions + 1, stride), 5, np.float32)
        y = aligned(wanted, 4)
        wanted[:positions, :channels] = x
        kernel([blocks(x, target.lanes, surplus=3), y])
        np.testing.assert_array_equal(y, wanted)


def test_layer_norm(compiled: Compile, target: TargetSpec, rng: np.random.Generator) -> None:
    shapes = [(1, 1), (5, 3), (64, 13), (100, 9), (768, 6), (20_000, 2)]  # channels, positions
    specs = [LayerNormSpec(*shape, 1e-5, centred) for centred in (True, False) for shape in shapes]
    for kernel, spec in zip(compiled(specs), specs, strict=True):
        x = 10 + 3 * rng.standard_normal((spec.positions, spec.channels), np.float32)
        raw = {name: rng.standard_normal(spec.channels, np.float32) for name in ("scale", "shift")}
        weights = [aligned(array) for array in registry.pack(registry.plan(spec, target), target, raw)]
        y = aligned(np.full_like(blocks(x, target.lanes), 9))
        kernel([blocks(x, target.lanes, surplus=-1e3), *weights, y])
        wanted = x.astype(np.float64) - (x.mean(axis=1, keepdims=True, dtype=np.float64) if spec.centred else 0)
        wanted /= np.sqrt((wanted**2).mean(axis=1, keepdims=True) + spec.epsilon)
        got = unblocked(y)
        np.testing.assert_allclose(got[:, : spec.channels], wanted * raw["scale"] + raw["shift"], atol=3e-5)
        assert not got[:, spec.channels :].any()


def test_layer_norm_of_too_many_channels_is_refused(target: TargetSpec) -> None:
    with pytest.raises(UnsupportedSpecError, match="40000 channels"):
        registry.plan(LayerNormSpec(40_000, 2, 1e-5), target)


def test_gather(compiled: Compile, rng: np.random.Generator) -> None:
    shapes = [(1, 1, 1, 1), (1, 50, 100, 7), (3, 5, 1, 9), (2, 300, 9000, 3)]  # outer, length, inner, count
    dtypes: list[tuple[str, Literal["int32", "int64"]]] = [
        ("uint8", "int32"),
        ("float16", "int64"),
        ("float32", "int64"),
        ("int64", "int32"),
    ]
    cases = list(zip(shapes, dtypes, strict=True)) + list(zip(shapes, dtypes[::-1], strict=True))
    specs = [GatherSpec(*shape, np.dtype(dtype).itemsize, index) for shape, (dtype, index) in cases]
    for kernel, spec, (_, (dtype, _)) in zip(compiled(specs), specs, cases, strict=True):
        data = rng.integers(0, 100, (spec.outer, spec.length, spec.inner)).astype(dtype)
        indices = rng.integers(-spec.length, spec.length, spec.count).astype(spec.index_dtype)
        y = aligned(np.full(spec.outer * spec.count * spec.inner + 1, 77, dtype))
        refused = np.zeros(2, np.int64)
        kernel([aligned(data), aligned(indices), y, refused])
        assert not refused.any()
        np.testing.assert_array_equal(y[:-1].reshape(spec.outer, spec.count, spec.inner), data[:, indices])
        assert y[-1] == 77


def test_gather_refuses_what_is_out_of_range(compiled: Compile) -> None:
    indices = np.array([2**40, -(2**40), 3, -4, 2, -3])
    y, refused = np.zeros(6, np.float32), np.zeros(2, np.int64)
    (kernel,) = compiled([GatherSpec(1, 3, 1, 6, 4, "int64")])
    kernel([np.float32([10, 11, 12]), indices, y, refused])
    np.testing.assert_array_equal(y, [12, 10, 12, 10, 12, 10])  # it reads from nowhere else
    assert refused.tolist() == [1, -4]
