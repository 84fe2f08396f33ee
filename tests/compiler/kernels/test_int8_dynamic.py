"""Kernels of 8-bit numbers whose scale is found at run time, against numpy: the same bit for bit."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.int8_specs import Int8FactorsSpec, Int8QuantiseSpec, Int8RangeSpec
from gangway.compiler.kernels.specs import RELU, Array, ConvSpec
from gangway.compiler.kernels.templates.int8 import work
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

SCALE = np.float32(0.0213)
FACTORS = np.array([SCALE, -ZERO, 255 - ZERO, ZERO], np.float32)
CONVOLUTIONS: Mapping[str, ConvSpec] = {
    "1x1": convolution(64, 13, 17, 96),
    "1x1, odd channels": convolution(70, 9, 9, 100, activation=RELU),
    "1x1 stride 2": convolution(64, 14, 15, 32, stride=(2, 2)),
    "3x3": convolution(64, 13, 17, 40, (3, 3), pads=(1, 1, 1, 1), input_halo=1, output_halo=1),
    "3x3 stride 2": convolution(96, 14, 15, 48, (3, 3), (2, 2), (0, 0, 1, 1), input_halo=1),
    "residual": convolution(96, 14, 15, 48, residual=True, residual_halo=1, activation=RELU),
    "dilated": convolution(40, 20, 20, 16, (3, 3), pads=(2, 2, 2, 2), dilation=(2, 2), input_halo=2),
    "single pixel": convolution(100, 1, 1, 70, residual=True),
    "dense of 37 rows": convolution(192, 1, 37, 130, residual=True),
    "first 7x7": convolution(3, 30, 34, 64, (7, 7), (2, 2), (3, 3, 3, 3), input_layout="pixels", input_halo=3),
}
DEPTHWISE: Mapping[str, ConvSpec] = {
    "3x3": depthwise(70, 13, 17, (3, 3), pads=(1, 1, 1, 1), input_halo=1, output_halo=1),
    "5x5 stride 2": depthwise(64, 15, 14, (5, 5), (2, 2), (2, 2, 2, 2), input_halo=2, activation=RELU),
    "few channels": depthwise(17, 14, 14, (3, 3), (2, 2), (0, 0, 1, 1), input_halo=1),
}


WEIGHTS = ("symmetric", "zero points")
FEW = [(name, "zero points") for name in ("1x1, odd channels", "3x3 stride 2", "residual", "dilated", "first 7x7")]
FEW += [("3x3", "symmetric"), ("dense of 37 rows", "symmetric")]


@pytest.mark.parametrize(("name", "kind"), sampled(itertools.product(CONVOLUTIONS, WEIGHTS), FEW))
def test_convolution_is_that_of_integers(
    name: str, kind: str, int8_target: TargetSpec, library_path: Path, rng: np.random.Generator
) -> None:
    zeros = kind == "zero points"
    spec = replace(CONVOLUTIONS[name], output_layout="blocked", dynamic=True, weight_zeros=zeros)
    x = rng.integers(0, 256, (spec.in_channels, spec.height, spec.width), np.uint8)
    raw = _raw(rng, (spec.out_channels, spec.in_channels, *spec.kernel), zeros)
    spec = work.suited(spec, raw["weights"], int8_target)
    real = raw["weights"].astype(np.int64) - raw["zeros"].reshape(-1, 1, 1, 1)
    expected = _scaled(sums_of(x, real, spec.stride, spec.pads, spec.dilation), raw)
    given = as_pixels(x, spec.input_halo) if spec.input_layout == "pixels" else as_bytes(x, spec.input_halo)
    y = as_blocked(np.zeros(expected.shape, np.float32), int8_target.lanes, spec.output_halo)
    inputs = [given, FACTORS]
    if spec.residual:
        residual = rng.standard_normal(expected.shape).astype(np.float32)
        inputs.append(as_blocked(residual, int8_target.lanes, spec.residual_halo))
        expected = expected + residual
    expected = np.maximum(expected, 0) if spec.activation == RELU else expected
    for tasks in run_plans(spec, raw, inputs, y, int8_target, library_path):
        np.testing.assert_array_equal(image(y, spec.out_channels, spec.output_halo), expected, tasks)


@pytest.mark.parametrize("name", DEPTHWISE)
def test_depthwise_convolution_is_that_of_integers(
    name: str, int8_target: TargetSpec, library_path: Path, rng: np.random.Generator
) -> None:
    spec = replace(DEPTHWISE[name], output_layout="blocked", dynamic=True)
    x = rng.integers(0, 256, (spec.in_channels, spec.height, spec.width), np.uint8)
    raw = _raw(rng, (spec.in_channels, 1, *spec.kernel), True)
    raw["weights"] = (raw["weights"].astype(np.int16) - raw["zeros"].reshape(-1, 1, 1, 1)).astype(np.int16)
    sums = np.concatenate(
        [
            sums_of(x[c : c + 1], raw["weights"][c : c + 1], spec.stride, spec.pads, (1, 1))
            for c in range(spec.in_channels)
        ]
    )
    expected = _scaled(sums, raw)
    expected = np.maximum(expected, 0) if spec.activation == RELU else expected
    y = as_blocked(np.zeros(expected.shape, np.float32), int8_target.lanes, spec.output_halo)
    inputs = [as_bytes(x, spec.input_halo), FACTORS]
    for tasks in run_plans(spec, raw, inputs, y, int8_target, library_path):
        np.testing.assert_array_equal(image(y, spec.in_channels, spec.output_halo), expected, tasks)


@pytest.mark.parametrize(
    "spec",
    [
        Int8RangeSpec(100, 9, 11, 5, input_halo=1),
        Int8RangeSpec(7, 3, 1, 1),
        Int8RangeSpec(768, 1, 37, 16),
        Int8RangeSpec(1000, 1, 1, 4, plain=True),
        Int8RangeSpec(3, 1, 1, 1, plain=True),
    ],
    ids=lambda spec: f"{spec.text}{' plain' * spec.plain}",
)
def test_range_is_that_of_all_numbers(
    spec: Int8RangeSpec, int8_target: TargetSpec, library_path: Path, rng: np.random.Generator
) -> None:
    """Wherever the extremes are; numbers in surplus channels and halos are none of them."""
    limits = np.zeros((spec.parts, 2), np.float32)
    for sign in (-1, 0, 1):
        x = (rng.random((spec.channels, spec.height, spec.width)) * 2 - 1 + sign).astype(np.float32)
        x.flat[rng.integers(x.size)] = 5 * sign
        given = x if spec.plain else as_blocked(x, int8_target.lanes, spec.input_halo, surplus=99)
        for tasks in run_plans(spec, {}, [given], limits, int8_target, library_path):
            assert limits[:, 0].min() == min(0, x.min()), tasks
            assert limits[:, 1].max() == max(0, x.max()), tasks


@pytest.mark.parametrize("limits", [(-1.3, 2.9), (0, 4.5), (-3.7, 0), (0, 0), (-1e-30, 1e-30), (-1, 1 / 3)])
def test_factors_are_those_of_onnx(limits: tuple[float, float], int8_target: TargetSpec, library_path: Path) -> None:
    least, largest = (np.float32(limit) for limit in limits)
    x = np.array([[0, largest], [least, 0], [0, 0]], np.float32)
    scale = np.float32(1) if least == largest else (largest - least) / np.float32(255)
    point = np.rint(np.clip(-least / scale, 0, 255))
    found = np.zeros(4, np.float32)
    for tasks in run_plans(Int8FactorsSpec(3), {}, [x], found, int8_target, library_path):
        np.testing.assert_array_equal(found, np.array([scale, -point, 255 - point, point], np.float32), tasks)


@pytest.mark.parametrize(
    "spec",
    [
        Int8QuantiseSpec(100, 9, 20, input_halo=1, output_halo=1),
        Int8QuantiseSpec(128, 3, 3, output_halo=2),
        Int8QuantiseSpec(16, 4, 5),
        Int8QuantiseSpec(768, 1, 37),
        Int8QuantiseSpec(200, 1, 1),
    ],
    ids=lambda spec: spec.text,
)
def test_bytes_are_rounded_as_onnx_does(
    spec: Int8QuantiseSpec, int8_target: TargetSpec, library_path: Path, rng: np.random.Generator
) -> None:
    x = (rng.standard_normal((spec.channels, spec.height, spec.width))).astype(np.float32)
    x.flat[:4] = np.array([0.5, 1.5, 1e9, -1e9], np.float32) * SCALE
    y = as_bytes(np.zeros(x.shape, np.uint8), spec.output_halo, 0)
    inputs = [as_blocked(x, int8_target.lanes, spec.input_halo), FACTORS]
    for tasks in run_plans(spec, {}, inputs, y, int8_target, library_path):
        np.testing.assert_array_equal(image(y, spec.channels, spec.output_halo), quantised(x / SCALE), tasks)
        check_halo(y, spec.channels, spec.output_halo)


def _raw(rng: np.random.Generator, shape: tuple[int, ...], zeros: bool) -> dict[str, Array]:
    return {
        "weights": rng.integers(-128, 128, shape).astype(np.int8),
        "scales": (0.01 + rng.random(shape[0]) / 50).astype(np.float32),
        "bias": rng.standard_normal(shape[0]).astype(np.float32),
        "zeros": (rng.integers(-128, 128, shape[0]) * zeros).astype(np.int32),
    }


def _scaled(sums: Array, raw: Mapping[str, Array]) -> Array:
    """As the operators do it: the sum as float32, times the product of both scales, plus the bias."""
    scales = (raw["scales"] * SCALE).astype(np.float32).reshape(-1, 1, 1)
    return np.asarray(sums.astype(np.float32) * scales + raw["bias"].reshape(-1, 1, 1))
