"""Every kind of kernel, compiled for every target this machine runs, against numpy in double precision."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.codegen import Library, aligned
from gangway.compiler.kernels.specs import (
    NONE,
    RELU,
    RELU6,
    Array,
    ConvSpec,
    GlobalPoolSpec,
    KernelPlan,
    KernelSpec,
    PackSpec,
    PoolSpec,
    UnpackSpec,
)
from gangway.compiler.kernels.templates import registry
from gangway.compiler.kernels.templates.tiling import UnsupportedSpecError
from gangway.compiler.target import detect
from tests.helpers.kernel_runs import build, in_pieces, numbered, planned, windows
from tests.helpers.sampled import sampled

Convert = Callable[[Array, int, int], Array]

CONVOLUTIONS: Mapping[str, ConvSpec] = {
    "3x3": ConvSpec(40, 13, 17, 24, (3, 3), pads=(1, 1, 1, 1), activation=RELU, input_halo=1, output_halo=1),
    "3x3 on 7x7": ConvSpec(32, 7, 7, 64, (3, 3), pads=(1, 1, 1, 1), input_halo=1),
    "stride 2, asymmetric": ConvSpec(
        16, 14, 15, 48, (3, 3), (2, 2), (0, 0, 1, 1), activation=RELU6, input_halo=1, output_halo=2
    ),
    "wider halo than padding": ConvSpec(8, 9, 9, 8, (3, 3), pads=(1, 0, 1, 2), input_halo=3),
    "1x1": ConvSpec(20, 13, 17, 100, residual=True, activation=RELU),
    "1x1 with halos": ConvSpec(
        32, 7, 7, 16, residual=True, residual_halo=2, input_halo=1, output_halo=1, activation=RELU6
    ),
    "1x1 stride 2": ConvSpec(64, 14, 14, 32, stride=(2, 2)),
    "1x7": ConvSpec(16, 8, 11, 16, (1, 7), pads=(0, 3, 0, 3), input_halo=3),
    "dilated": ConvSpec(16, 20, 20, 16, (3, 3), pads=(2, 2, 2, 2), dilation=(2, 2), input_halo=2),
    "single pixel": ConvSpec(100, 1, 1, 70, activation=RELU),
    "single pixel, one output": ConvSpec(33, 1, 1, 1),
    "dense of 37 rows": ConvSpec(48, 1, 37, 130),
    "first 7x7": ConvSpec(
        3, 30, 34, 64, (7, 7), (2, 2), (3, 3, 3, 3), activation=RELU, input_layout="planar", input_halo=3, output_halo=1
    ),
    "first 3x3": ConvSpec(1, 28, 28, 20, (3, 3), pads=(1, 1, 1, 1), input_layout="planar", input_halo=1),
    "depthwise": ConvSpec(
        40, 13, 17, 40, (3, 3), pads=(1, 1, 1, 1), groups=40, activation=RELU6, input_halo=1, output_halo=1
    ),
    "depthwise stride 2": ConvSpec(33, 14, 14, 33, (3, 3), (2, 2), (0, 0, 1, 1), groups=33, input_halo=1),
    "depthwise 5x5 residual": ConvSpec(
        16, 7, 7, 16, (5, 5), pads=(2, 2, 2, 2), groups=16, input_halo=2, residual=True, residual_halo=1
    ),
}

WINOGRAD: Mapping[str, ConvSpec] = {
    "even tiles": ConvSpec(64, 56, 56, 64, (3, 3), pads=(1, 1, 1, 1), activation=RELU, input_halo=1, output_halo=1),
    "tiles that overlap, surplus channels": ConvSpec(
        72, 54, 61, 40, (3, 3), pads=(1, 1, 1, 1), residual=True, residual_halo=2, activation=RELU, input_halo=1
    ),
    "padding on two sides": ConvSpec(64, 57, 58, 80, (3, 3), pads=(1, 0, 0, 1), input_halo=2, output_halo=1),
    "no padding": ConvSpec(64, 47, 60, 64, (3, 3)),
    "small image, many channels": ConvSpec(512, 8, 9, 512, (3, 3), pads=(1, 1, 1, 1), input_halo=1),
}
ODD_WINOGRAD = (
    "tiles that overlap, surplus channels",
    "padding on two sides",
)  # for targets that are not this machine's

POOLS: Mapping[str, PoolSpec] = {
    "max 3x3": PoolSpec("max", 40, 13, 17, (3, 3), (2, 2), (1, 1, 1, 1), input_halo=1, output_halo=1),
    "max of odd ends": PoolSpec("max", 16, 7, 7, (2, 2), (2, 2), (0, 0, 1, 1)),
    "max without padding": PoolSpec("max", 5, 12, 12, (2, 3), (2, 1), (0, 0, 0, 0), input_halo=2),
    "average": PoolSpec("average", 33, 9, 11, (3, 3), (1, 1), (1, 1, 1, 1), output_halo=1),
    "average with padding": PoolSpec("average", 16, 8, 8, (3, 3), (2, 2), (1, 1, 1, 1), count_include_pad=True),
    "average of one column": PoolSpec("average", 16, 5, 1, (3, 1), (1, 1), (1, 0, 1, 0)),
}


def convolve(spec: ConvSpec, x: Array, weights: Array, bias: Array, residual: Array | None) -> Array:
    view = windows(x, spec, 0.0)
    equation = "chwij,ocij->ohw" if spec.groups == 1 else "chwij,coij->chw"
    y = np.einsum(equation, view, weights.astype(np.float64), optimize=True) + bias[:, None, None]
    y = y if residual is None else y + residual
    y = np.maximum(y, 0) if spec.activation != NONE else y
    return np.minimum(y, 6) if spec.activation == RELU6 else y


def pool(spec: PoolSpec, x: Array) -> Array:
    if spec.mode == "max":
        return windows(x, spec, -np.inf).max(axis=(3, 4))
    total = windows(x, spec, 0.0).sum(axis=(3, 4))
    if spec.count_include_pad:
        return total / (spec.kernel[0] * spec.kernel[1])
    return total / windows(np.ones_like(x), spec, 0.0).sum(axis=(3, 4))


def close(got: Array, wanted: Array) -> None:
    assert got.shape == wanted.shape
    assert np.abs(got - wanted).max() <= 1e-5 * max(1.0, np.abs(wanted).max())


def run_convolution(
    library: Library, symbol: str, plan: KernelPlan, target: TargetSpec, blocked: Convert, plain: Convert
) -> None:
    spec = plan.spec
    assert isinstance(spec, ConvSpec)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((spec.in_channels, spec.height, spec.width), np.float32)
    shape = (spec.out_channels, spec.in_channels // spec.groups, *spec.kernel)
    raw = {"weights": rng.standard_normal(shape, np.float32), "bias": rng.standard_normal(shape[0], np.float32)}
    size = spec.output_size
    residual = rng.standard_normal((spec.out_channels, *size), np.float32) if spec.residual else None
    lanes, halo = target.lanes, spec.input_halo
    arguments = [
        aligned(np.pad(x, ((0, 0), (halo, halo), (halo, halo)))) if spec.input_planar else blocked(x, lanes, halo),
        *(aligned(array) for array in registry.pack(plan, target, raw)),
        *([blocked(residual, lanes, spec.residual_halo)] if residual is not None else []),
        blocked(np.zeros((spec.out_channels, *size), np.float32), lanes, spec.output_halo),
    ]
    in_pieces(library, symbol, arguments, plan.tasks)
    got = plain(arguments[-1], spec.out_channels, spec.output_halo)
    close(got, convolve(spec, x, raw["weights"], raw["bias"], residual))


def test_convolutions(target: TargetSpec, library_path: Path, blocked: Convert, plain: Convert) -> None:
    plans = planned(CONVOLUTIONS.values(), target)
    library = build(plans, target, library_path)
    for symbol, plan in plans.items():
        run_convolution(library, symbol, plan, target, blocked, plain)


def test_winograd_convolutions(target: TargetSpec, library_path: Path, blocked: Convert, plain: Convert) -> None:
    specs = list(WINOGRAD.values()) if target == detect() else [WINOGRAD[name] for name in ODD_WINOGRAD]
    plans = planned(specs, target)
    assert all(plan.description.startswith("winograd") for plan in plans.values())
    library = build(plans, target, library_path)
    for symbol, plan in plans.items():
        run_convolution(library, symbol, plan, target, blocked, plain)


@pytest.mark.parametrize("name", sampled(["3x3", "1x1", "depthwise", "single pixel"], ["depthwise"]))
def test_versions_share_weights_and_layouts(
    name: str, target: TargetSpec, library_path: Path, blocked: Convert, plain: Convert
) -> None:
    found = registry.versions(CONVOLUTIONS[name], target, most=8 if target == detect() else 3)
    assert found[0] == registry.plan(CONVOLUTIONS[name], target)
    assert len(set(found)) == len(found) > 1
    plans = numbered(found)
    library = build(plans, target, library_path)
    for symbol, plan in plans.items():
        run_convolution(library, symbol, plan, target, blocked, plain)


def test_pooling(
    target: TargetSpec, library_path: Path, rng: np.random.Generator, blocked: Convert, plain: Convert
) -> None:
    plans = planned(POOLS.values(), target)
    library = build(plans, target, library_path)
    for (symbol, plan), spec in zip(plans.items(), POOLS.values(), strict=True):
        x = rng.standard_normal((spec.channels, spec.height, spec.width), np.float32) - 3
        wanted = pool(spec, x)
        y = blocked(np.zeros(wanted.shape, np.float32), target.lanes, spec.output_halo)
        in_pieces(library, symbol, [blocked(x, target.lanes, spec.input_halo), y], plan.tasks)
        close(plain(y, spec.channels, spec.output_halo), wanted)


def test_global_pooling(
    target: TargetSpec, library_path: Path, rng: np.random.Generator, blocked: Convert, plain: Convert
) -> None:
    specs = [GlobalPoolSpec(40, 7, 7), GlobalPoolSpec(20, 13, 17, input_halo=1), GlobalPoolSpec(16, 1, 1)]
    plans = planned(specs, target)
    library = build(plans, target, library_path)
    for (symbol, plan), spec in zip(plans.items(), specs, strict=True):
        x = rng.standard_normal((spec.channels, spec.height, spec.width), np.float32)
        y = blocked(np.zeros((spec.channels, 1, 1), np.float32), target.lanes, 0)
        in_pieces(library, symbol, [blocked(x, target.lanes, spec.input_halo), y], plan.tasks)
        close(plain(y, spec.channels, 0), x.astype(np.float64).mean(axis=(1, 2), keepdims=True))


PACKS = [
    PackSpec(3, 13, 17, "planar", output_halo=3),
    PackSpec(3, 32, 32, "planar"),
    PackSpec(20, 7, 9, "blocked", output_halo=1),
    PackSpec(6, 1, 1, "blocked"),
    PackSpec(40, 1, 5, "blocked"),
    PackSpec(37, 3, 37, "blocked", output_halo=2),  # squares of which the last one of a line overlaps
    PackSpec(35, 6, 9, "blocked"),  # lines that are seen as one
    PackSpec(5, 2, 16, "blocked"),
]


def test_packing_and_unpacking_plain_tensors_of_any_alignment(
    target: TargetSpec, library_path: Path, rng: np.random.Generator, blocked: Convert
) -> None:
    unpacks = [UnpackSpec(s.channels, s.height, s.width, s.output_halo) for s in PACKS if s.layout == "blocked"]
    specs: list[KernelSpec] = [*PACKS, *unpacks]
    plans = planned(specs, target)
    library = build(plans, target, library_path)
    found = zip(plans.items(), specs, strict=True)
    for offset_bytes, ((symbol, plan), spec) in itertools.product((0, 4, 20), found):
        assert isinstance(spec, PackSpec | UnpackSpec)
        x = rng.standard_normal((spec.channels, spec.height, spec.width), np.float32)
        halo = spec.output_halo if isinstance(spec, PackSpec) else spec.input_halo
        planar = isinstance(spec, PackSpec) and spec.layout == "planar"
        inner = np.pad(x, ((0, 0), (halo, halo), (halo, halo))) if planar else blocked(x, target.lanes, halo)
        if isinstance(spec, PackSpec):
            dirty = inner.copy()
            dirty[inner != 0] = 9
            y = aligned(dirty)
            in_pieces(library, symbol, [aligned(x, offset_bytes), y], plan.tasks)
            np.testing.assert_array_equal(y, inner)
        else:
            guarded = aligned(np.full(x.size + 16, 5, np.float32), offset_bytes)
            in_pieces(library, symbol, [aligned(inner), guarded], plan.tasks)
            np.testing.assert_array_equal(guarded[: x.size].reshape(x.shape), x)
            assert (guarded[x.size :] == 5).all()


def test_packing_clears_surplus_channels(target: TargetSpec, library_path: Path, blocked: Convert) -> None:
    plan = registry.plan(PackSpec(6, 2, 2, "blocked"), target)
    library = build({"k": plan}, target, library_path)
    x = np.ones((6, 2, 2), np.float32)
    y = aligned(np.full((-(-6 // target.lanes), 2, 2, target.lanes), 9, np.float32))
    library.call("k", [x, y], 0, plan.tasks)
    np.testing.assert_array_equal(y, blocked(x, target.lanes, 0))


@pytest.mark.parametrize(
    "spec",
    [
        replace(CONVOLUTIONS["3x3"], input_halo=0),
        replace(CONVOLUTIONS["depthwise"], groups=8),
        replace(CONVOLUTIONS["depthwise"], out_channels=80),
        replace(CONVOLUTIONS["3x3"], height=1, pads=(0, 0, 0, 0)),
        replace(POOLS["max 3x3"], pads=(3, 1, 1, 1)),
        replace(POOLS["max 3x3"], pads=(1, 1, 1, 7)),
    ],
)
def test_unsupported_specs_say_why(spec: KernelSpec, target: TargetSpec) -> None:
    with pytest.raises(UnsupportedSpecError, match=r"convolution|pooling"):
        registry.plan(spec, target)


def test_big_layers_have_tasks_for_gangs_and_small_ones_are_not_chopped(target: TargetSpec) -> None:
    big = registry.plan(ConvSpec(64, 56, 56, 256), target)
    assert big.tasks >= 16
    winograd = registry.plan(WINOGRAD["even tiles"], target)  # more tasks are more work
    assert winograd.tasks >= 8
    small = registry.plan(ConvSpec(16, 1, 1, 16), target)
    assert small.tasks <= 2
