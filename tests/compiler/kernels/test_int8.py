"""Kernels of 8-bit numbers against numpy: sums are exact, so results are the same bit for bit."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.int8_specs import Int8HaloSpec, Int8TableSpec
from gangway.compiler.kernels.specs import (
    NONE,
    RELU,
    Activation,
    Array,
    BlockedElementwiseSpec,
    ConvSpec,
    GlobalPoolSpec,
    PackSpec,
    PoolSpec,
)
from gangway.compiler.kernels.templates.int8 import instructions as int8
from gangway.compiler.kernels.templates.int8 import work
from gangway.compiler.target import TARGETS
from tests.helpers.int8_memory import (
    ZERO,
    as_blocked,
    as_bytes,
    as_pixels,
    check_halo,
    convolution,
    depthwise,
    image,
    quantised,
    run_plans,
    sums_of,
)
from tests.helpers.sampled import sampled

CONVOLUTIONS: Mapping[str, ConvSpec] = {
    "1x1": convolution(64, 13, 17, 96),
    "1x1 with halos": convolution(128, 7, 7, 16, input_halo=1, output_halo=1),
    "1x1, odd channels": convolution(70, 9, 9, 100),
    "1x1 stride 2": convolution(64, 14, 15, 32, stride=(2, 2)),
    "3x3": convolution(64, 13, 17, 40, (3, 3), pads=(1, 1, 1, 1), input_halo=1, output_halo=1),
    "3x3 on 7x7": convolution(192, 7, 7, 64, (3, 3), pads=(1, 1, 1, 1), input_halo=1),
    "3x3 stride 2": convolution(96, 14, 15, 48, (3, 3), (2, 2), (0, 0, 1, 1), input_halo=1, output_halo=2),
    "wide": convolution(64, 6, 56, 64, (3, 3), pads=(1, 1, 1, 1), input_halo=1),
    "wider halo than padding": convolution(20, 9, 9, 8, (3, 3), pads=(1, 0, 1, 2), input_halo=3),
    "1x7": convolution(64, 8, 11, 16, (1, 7), pads=(0, 3, 0, 3), input_halo=3),
    "dilated": convolution(64, 20, 20, 16, (3, 3), pads=(2, 2, 2, 2), dilation=(2, 2), input_halo=2),
    "single pixel": convolution(100, 1, 1, 70),
    "single pixel, float32": convolution(256, 1, 1, 1000, output_layout="blocked"),
    "dense of 37 rows": convolution(192, 1, 37, 130),
    "float32, activation": convolution(64, 5, 9, 40, output_layout="blocked", activation=RELU, output_halo=1),
    "first 7x7": convolution(
        3, 30, 34, 64, (7, 7), (2, 2), (3, 3, 3, 3), input_layout="pixels", input_halo=3, output_halo=1
    ),
    "first 3x3": convolution(1, 28, 28, 20, (3, 3), pads=(1, 1, 1, 1), input_layout="pixels", input_halo=1),
}
WITHOUT_VNNI: Mapping[str, ConvSpec] = {
    **{
        name: CONVOLUTIONS[name]
        for name in ("1x1, odd channels", "1x1 stride 2", "3x3 on 7x7", "dilated", "single pixel, float32", "first 7x7")
    },
    "many channels": convolution(1000, 2, 40, 24, (3, 3), pads=(1, 1, 1, 1), input_halo=1),
}
DEPTHWISE: Mapping[str, ConvSpec] = {
    "3x3": depthwise(70, 13, 17, (3, 3), pads=(1, 1, 1, 1), input_halo=1, output_halo=1),
    "5x5 stride 2": depthwise(64, 15, 14, (5, 5), (2, 2), (2, 2, 2, 2), input_halo=2),
    "stride 2, asymmetric": depthwise(33, 14, 14, (3, 3), (2, 2), (0, 0, 1, 1), input_halo=1),
}


MOST = (
    "1x1 with halos", "1x1, odd channels", "3x3", "3x3 stride 2", "wider halo than padding", "dilated", "single pixel",
    "dense of 37 rows", "float32, activation", "first 7x7",
)  # fmt: skip


@pytest.mark.parametrize("name", sampled(CONVOLUTIONS, MOST))
def test_convolution_is_that_of_integers(
    name: str, int8_target: TargetSpec, library_path: Path, rng: np.random.Generator
) -> None:
    check_convolution(CONVOLUTIONS[name], int8_target, library_path, rng, narrow=False)


SUMS = ("8 bits", "narrow")
FEW = [("1x1, odd channels", "8 bits"), ("3x3 on 7x7", "8 bits"), ("first 7x7", "8 bits"), ("many channels", "narrow")]


@pytest.mark.parametrize(("name", "kind"), sampled(itertools.product(WITHOUT_VNNI, SUMS), FEW))
@pytest.mark.parametrize("target", sampled(["avx2", "avx512"], ["avx2"]), indirect=True)
def test_convolution_without_vnni(
    name: str, kind: str, target: TargetSpec, library_path: Path, rng: np.random.Generator
) -> None:
    check_convolution(WITHOUT_VNNI[name], target, library_path, rng, narrow=kind == "narrow")


def check_convolution(
    spec: ConvSpec, target: TargetSpec, library_path: Path, rng: np.random.Generator, narrow: bool
) -> None:
    """Compare all outputs; numbers are extreme, too: products of two of them do not fit 16 bits, or just do."""
    x = rng.integers(0, 256, (spec.in_channels, spec.height, spec.width), np.uint8)
    x[rng.random(x.shape) < 0.3] = 255
    raw = _raw(rng, (spec.out_channels, spec.in_channels, *spec.kernel), narrow)
    spec = work.suited(spec, raw["weights"], target)
    assert spec.narrow == ((narrow or spec.in_channels == 1) and not int8.has_words(target))
    sums = sums_of(x, raw["weights"], spec.stride, spec.pads, spec.dilation) + raw["sums_bias"][:, None, None]
    numbers = sums.astype(np.float32) * raw["multiplier"][:, None, None]
    given = as_pixels(x, spec.input_halo) if spec.input_layout == "pixels" else as_bytes(x, spec.input_halo)
    height, width = spec.output_size
    if spec.output_layout == "bytes":
        y = as_bytes(np.zeros((spec.out_channels, height, width), np.uint8), spec.output_halo)
    else:
        y = as_blocked(np.zeros((spec.out_channels, height, width), np.float32), target.lanes, spec.output_halo)
    for tasks in run_plans(spec, raw, [given], y, target, library_path):
        if spec.output_layout == "bytes":
            expected = quantised(numbers)
            np.testing.assert_array_equal(image(y, spec.out_channels, spec.output_halo), expected, tasks)
            check_halo(y, spec.out_channels, spec.output_halo)
        else:
            expected = np.maximum(numbers, 0) if spec.activation == RELU else numbers
            np.testing.assert_array_equal(image(y, spec.out_channels, spec.output_halo), expected, tasks)


def test_weights_are_narrow_if_no_sum_can_saturate() -> None:
    """By their extremes: 255 * 128 is less than 2^15, 255 * 129 is more; the sign of the other one counts."""
    spec, avx2 = convolution(3, 5, 5, 2), TARGETS["avx2"]
    for pair, narrow in {
        (127, 1): True, (64, 64): True, (127, 2): False, (-128, 0): True, (-127, -1): True, (-128, -1): False,
        (127, -128): True, (0, 127): True,
    }.items():  # fmt: skip
        weights = np.zeros((2, 3, 1, 1), np.int8)
        weights[1, :2, 0, 0] = pair
        weights[0, 2] = 127  # beside which nothing is
        assert work.suited(spec, weights, avx2).narrow == narrow, pair
        assert not work.suited(spec, weights, replace(TARGETS["avx512"], extensions=("avx512_vnni",))).narrow


@pytest.mark.parametrize("name", DEPTHWISE)
def test_depthwise_convolution_is_that_of_integers(
    name: str, int8_target: TargetSpec, library_path: Path, rng: np.random.Generator
) -> None:
    spec = DEPTHWISE[name]
    x = rng.integers(0, 256, (spec.in_channels, spec.height, spec.width), np.uint8)
    raw = _raw(rng, (spec.in_channels, 1, *spec.kernel))
    sums = np.concatenate(
        [
            sums_of(x[c : c + 1], raw["weights"][c : c + 1], spec.stride, spec.pads, (1, 1))
            for c in range(spec.in_channels)
        ]
    )
    numbers = (sums + raw["sums_bias"][:, None, None]).astype(np.float32) * raw["multiplier"][:, None, None]
    y = as_bytes(np.zeros((spec.in_channels, *spec.output_size), np.uint8), spec.output_halo)
    for tasks in run_plans(spec, raw, [as_bytes(x, spec.input_halo)], y, int8_target, library_path):
        np.testing.assert_array_equal(image(y, spec.in_channels, spec.output_halo), quantised(numbers), tasks)


@pytest.mark.parametrize("activation", [NONE, RELU, Activation("sigmoid")], ids=lambda each: each.name)
@pytest.mark.parametrize("channels", [128, 40])
def test_sum_of_bytes_and_of_float32(
    channels: int, activation: Activation, int8_target: TargetSpec, library_path: Path, rng: np.random.Generator
) -> None:
    a = rng.integers(0, 256, (channels, 9, 11), np.uint8)
    b = rng.standard_normal(a.shape).astype(np.float32)
    b[3, 2, 5:9] = [1e30, -1e30, np.inf, -np.inf]
    spec = BlockedElementwiseSpec(
        "add", channels, 9, 11, (False, False), (1, 0), activation, 1, ("bytes", "blocked"), "bytes"
    )
    scale, zero, step = 0.03, 130, 0.02
    factors = np.array([scale, -zero * scale, 1, 0, 1 / step, ZERO], np.float32)
    total = (a.astype(np.float64) - zero) * scale + b
    with np.errstate(over="ignore"):
        value = {"none": total, "clip": np.maximum(total, 0), "sigmoid": 1 / (1 + np.exp(-total))}[activation.name]
    y = as_bytes(np.zeros_like(a), 1)
    for tasks in run_plans(
        spec, {"factors": factors}, [as_bytes(a, 1), as_blocked(b, int8_target.lanes, 0)], y, int8_target, library_path
    ):
        difference = image(y, channels, 1).astype(int) - quantised(value / step)
        assert np.abs(difference).max() <= 1, tasks  # a number half way between two
        assert np.mean(difference != 0) < 1e-3, tasks


def test_product_with_a_vector(int8_target: TargetSpec, library_path: Path, rng: np.random.Generator) -> None:
    a, gate = rng.integers(0, 256, (96, 5, 5), np.uint8), rng.random((96, 1, 1), np.float32)
    spec = BlockedElementwiseSpec("mul", 96, 5, 5, (False, True), (0, 0), input_layouts=("bytes", "blocked"))
    factors = np.array([0.5, -ZERO * 0.5, 1, 0, 1, 0], np.float32)
    y = as_blocked(np.zeros((96, 5, 5), np.float32), int8_target.lanes, 0)
    inputs = [as_bytes(a, 0), as_blocked(gate, int8_target.lanes, 0)]
    for tasks in run_plans(spec, {"factors": factors}, inputs, y, int8_target, library_path):
        np.testing.assert_allclose(image(y, 96, 0), (a.astype(np.float32) - ZERO) * 0.5 * gate, 1e-6, 0, True, tasks)


@pytest.mark.parametrize("pads", [(1, 1, 1, 1), (0, 0, 1, 1)])
def test_largest_of_windows(
    pads: tuple[int, int, int, int], int8_target: TargetSpec, library_path: Path, rng: np.random.Generator
) -> None:
    x = rng.integers(0, 256, (72, 12, 13), np.uint8)
    pool = PoolSpec("max", 72, 12, 13, (3, 3), (2, 2), pads, input_halo=1, output_halo=1)
    spec = replace(pool, input_layout="bytes", output_layout="bytes")
    y = as_bytes(np.zeros((72, *spec.output_size), np.uint8), 1)
    padded = np.pad(x, ((0, 0), pads[::2], pads[1::2]))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (1, 2))[:, ::2, ::2]
    for tasks in run_plans(spec, {}, [as_bytes(x, 1)], y, int8_target, library_path):
        np.testing.assert_array_equal(image(y, 72, 1), windows.max((3, 4)), tasks)


@pytest.mark.parametrize("channels", [40, 256, 100])
def test_mean_of_pixels(channels: int, int8_target: TargetSpec, library_path: Path, rng: np.random.Generator) -> None:
    x = rng.integers(0, 256, (channels, 7, 5), np.uint8)
    factors = np.array([0.1 / 35, -ZERO * 0.1], np.float32)
    y = as_blocked(np.zeros((channels, 1, 1), np.float32), int8_target.lanes, 0)
    spec = GlobalPoolSpec(channels, 7, 5, input_layout="bytes", input_halo=1)
    expected = (x.mean((1, 2), keepdims=True) - ZERO) * 0.1
    for tasks in run_plans(spec, {"factors": factors}, [as_bytes(x, 1)], y, int8_target, library_path):
        np.testing.assert_allclose(image(y, channels, 0), expected, 1e-5, 1e-5, True, tasks)


@pytest.mark.parametrize(
    "spec",
    [
        PackSpec(3, 20, 33, "pixels", output_halo=3),
        PackSpec(4, 5, 6, "pixels"),
        PackSpec(1, 20, 16, "pixels", output_halo=1),
        PackSpec(100, 9, 20, "bytes", output_halo=1),
        PackSpec(70, 3, 3, "bytes"),
        PackSpec(200, 1, 1, "bytes"),
        PackSpec(128, 1, 1, "bytes"),
    ],
    ids=lambda spec: spec.text,
)
def test_packing_rounds_as_onnx_does(
    spec: PackSpec, int8_target: TargetSpec, library_path: Path, rng: np.random.Generator
) -> None:
    x = (rng.standard_normal((spec.channels, spec.height, spec.width)) * 3).astype(np.float32)
    scale = np.float32(0.025)
    x.flat[:4] = np.array([0.5, 1.5, 1e9, -1e9], np.float32) * scale
    factors = np.array([scale, -ZERO, 255 - ZERO, ZERO], np.float32)
    expected = quantised(x / scale)
    halo, layout = spec.output_halo, as_pixels if spec.layout == "pixels" else as_bytes
    y = layout(np.zeros(x.shape, np.uint8), halo, 0)
    for tasks in run_plans(spec, {"factors": factors}, [x], y, int8_target, library_path):
        np.testing.assert_array_equal(image(y, spec.channels, halo), expected, tasks)
        check_halo(y, spec.channels, halo)


def test_every_number_is_looked_up(int8_target: TargetSpec, library_path: Path, rng: np.random.Generator) -> None:
    """With the processor's permutation of bytes, and one by one without it."""
    x = rng.permutation(np.arange(256 * 6).astype(np.uint8)).reshape(96, 4, 4)
    table = rng.permutation(256).astype(np.uint8)
    y = as_bytes(np.zeros_like(x), 2)
    spec = Int8TableSpec(96, 4, 4, input_halo=1, output_halo=2)
    for tasks in run_plans(spec, {"table": table}, [as_bytes(x, 1)], y, int8_target, library_path):
        np.testing.assert_array_equal(image(y, 96, 2), table[x], tasks)
        check_halo(y, 96, 2)


def test_halo_is_the_zero_point(int8_target: TargetSpec, library_path: Path, rng: np.random.Generator) -> None:
    x = rng.integers(0, 256, (128, 5, 6), np.uint8)
    y = as_bytes(x, 2, 0)
    raw = {"zero": np.array([ZERO], np.uint8)}
    for tasks in run_plans(Int8HaloSpec(128, 5, 6, 2), raw, [y], None, int8_target, library_path):
        np.testing.assert_array_equal(y, as_bytes(x, 2), tasks)


def _raw(rng: np.random.Generator, shape: tuple[int, ...], narrow: bool = False) -> dict[str, Array]:
    weights = rng.integers(-64, 65, shape) if narrow else rng.integers(-128, 128, shape)
    weights[0, 0] = 127
    weights[0, 1:2] = 1 if narrow else 127
    weights[-1, :2] = 0 if narrow else -128
    weights[-1, 0] = -128
    weights = weights.astype(np.int8)
    bias = rng.integers(-3000, 3000, shape[0]).astype(np.int32)
    reach = 40 / np.sqrt(np.prod(shape[1:])) / 9000
    multiplier = (reach * (0.5 + rng.random(shape[0]))).astype(np.float32)
    folded = bias - ZERO * weights.reshape(shape[0], -1).astype(np.int32).sum(1)
    return {
        "weights": weights,
        "bias": folded.astype(np.int32),
        "multiplier": multiplier,
        "zero": np.array([ZERO], np.float32),
        "sums_bias": bias,
    }
