"""Kernels with products in bfloat16 against sums in double precision of the same rounded numbers."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.attention_specs import AttentionSpec, ScoreBias
from gangway.compiler.kernels.codegen import Library, aligned
from gangway.compiler.kernels.specs import (
    NONE,
    READ_BEHIND_BYTES,
    RELU,
    RELU6,
    Activation,
    Array,
    ConvDepthwiseSpec,
    ConvSpec,
    GlobalPoolSpec,
    KernelPlan,
    KernelSpec,
    LayerNormSpec,
    Layout,
    PoolSpec,
)
from gangway.compiler.kernels.templates import registry
from gangway.compiler.kernels.templates.bf16 import words as bf16
from gangway.compiler.kernels.templates.bf16 import work
from gangway.compiler.target import TARGETS, extended
from tests.compiler.kernels.test_conv_depthwise import both
from tests.compiler.kernels.test_dense_batch import GUARD, answered
from tests.helpers.kernel_runs import build, in_pieces, numbered, planned, windows
from tests.helpers.sampled import sampled
from tests.helpers.targets import BESIDE_TILES

VECTORS = ("avx512_bf16",)
TILES = ("amx_bf16", "amx_tile", "avx512_bf16")
BEHIND = READ_BEHIND_BYTES // 2  # numbers that kernels may read behind a tensor in bfloat16
LANES = 16
STORED: tuple[Layout, Layout] = ("blocked", "bf16")  # whether an activation is
ERROR = 2e-6  # of float32 sums, relative to the largest number
ROUNDED_ERROR = 4e-3  # of a number stored in bfloat16: half of its last bit, 1 / 256


def pair(conv: ConvSpec, *window: Any, **options: Any) -> ConvDepthwiseSpec:
    """The convolution in bfloat16 and a depthwise one behind it."""
    return both(replace(conv, precision="bf16"), *window, **options)


CONVOLUTIONS: Mapping[str, ConvSpec] = {
    "1x1": ConvSpec(64, 13, 17, 96, residual=True, activation=RELU),
    "1x1, odd channels": ConvSpec(20, 13, 17, 100, residual=True, activation=RELU),
    "1x1 with halos": ConvSpec(
        64, 14, 14, 64, residual=True, residual_halo=2, input_halo=1, output_halo=1, activation=RELU6
    ),
    "1x1 stride 2": ConvSpec(64, 14, 15, 32, stride=(2, 2)),
    "3x3": ConvSpec(96, 13, 17, 32, (3, 3), pads=(1, 1, 1, 1), activation=RELU, input_halo=1, output_halo=1),
    "3x3, odd channels": ConvSpec(40, 13, 17, 24, (3, 3), pads=(1, 1, 1, 1), input_halo=1, output_halo=1),
    "3x3 on 7x7, wide halo": ConvSpec(32, 7, 7, 64, (3, 3), pads=(1, 1, 1, 1), residual=True, input_halo=2),
    "stride 2, asymmetric": ConvSpec(32, 14, 15, 64, (3, 3), (2, 2), (0, 0, 1, 1), input_halo=1, output_halo=2),
    "stride 3 over 5x5": ConvSpec(16, 17, 20, 32, (5, 5), (3, 3), (2, 2, 2, 2), input_halo=2),
    "1x7": ConvSpec(32, 8, 11, 32, (1, 7), pads=(0, 3, 0, 3), input_halo=3),
    "dilated": ConvSpec(32, 20, 20, 32, (3, 3), pads=(2, 2, 2, 2), dilation=(2, 2), input_halo=2),
    "dilated, stride 2": ConvSpec(16, 20, 20, 16, (3, 3), (2, 2), (3, 3, 3, 3), dilation=(3, 3), input_halo=3),
    "no padding": ConvSpec(48, 12, 19, 16, (3, 3)),
    "single pixel": ConvSpec(100, 1, 1, 70, activation=RELU),
    "37 positions, many planes": ConvSpec(512, 1, 37, 160, residual=True),
    "130 positions": ConvSpec(48, 1, 130, 144, activation=Activation("gelu")),
    "first 7x7": ConvSpec(
        3, 30, 34, 64, (7, 7), (2, 2), (3, 3, 3, 3), activation=RELU, input_layout="planar", input_halo=3, output_halo=1
    ),
    "first 3x3, one channel": ConvSpec(1, 28, 28, 20, (3, 3), pads=(1, 1, 1, 1), input_layout="planar", input_halo=1),
    "first 11x11, five channels": ConvSpec(5, 31, 40, 32, (11, 11), (4, 4), input_layout="planar"),
}
WINDOW = "window as large as the image"
DENSE = {
    "several blocks, smaller last group, residual": ConvSpec(602, 1, 1, 150, residual=True, activation=RELU),
    WINDOW: ConvSpec(64, 3, 2, 17, kernel=(3, 2)),
}
ATTENTIONS: Mapping[str, AttentionSpec] = {
    "128 positions, mask": AttentionSpec(2, 64, 128, 128, 0.125, (ScoreBias(False, False),)),
    "odd numbers, bias of each head": AttentionSpec(3, 64, 37, 45, 0.1, (ScoreBias(True, True),)),
    "several blocks of keys, two biases": AttentionSpec(
        2, 32, 50, 600, 0.2, (ScoreBias(False, True, True), ScoreBias(False, False))
    ),
    "few queries": AttentionSpec(1, 96, 16, 17, 0.2),
    "rows without keys become 0": AttentionSpec(
        2, 64, 37, 45, 0.1, (ScoreBias(False, True),), empty_rows="zero and nan"
    ),
}


PAIRS: Mapping[str, ConvDepthwiseSpec] = {
    "3x3": pair(ConvSpec(32, 14, 17, 96, activation=RELU6), (3, 3), pads=(1, 1, 1, 1)),
    "stride 2, surplus channels, halos": pair(
        ConvSpec(20, 15, 14, 72, activation=RELU, input_halo=2), (3, 3), (2, 2), (1, 0, 1, 2), output_halo=1
    ),
    "5x5, many tiles": pair(ConvSpec(64, 11, 70, 64), (5, 5), pads=(2, 2, 2, 2), output_halo=2),
    "behind a planar image": pair(
        ConvSpec(3, 30, 34, 32, (3, 3), (2, 2), (1, 1, 1, 1), activation=RELU6, input_layout="planar", input_halo=1),
        (3, 3),
        pads=(1, 1, 1, 1),
    ),
}


@pytest.fixture(params=[pytest.param(VECTORS, marks=BESIDE_TILES, id="vectors"), pytest.param(TILES, id="tiles")])
def low(request: pytest.FixtureRequest) -> TargetSpec:
    """A target with instructions for bfloat16, if this machine has them."""
    target = TARGETS["avx512"]
    missing = set(request.param) - set(extended(target).extensions)
    if missing:
        pytest.skip(f"this machine lacks {', '.join(sorted(missing))}")
    return replace(target, extensions=request.param)


def rounded(numbers: Array) -> Array:
    """The numbers as bfloat16 has them."""
    return np.asarray((bf16.rounded(numbers).astype(np.uint32) << 16).view(np.float32))


def blocked(plain: Array, halo: int, stored: bool) -> Array:
    """[C][H][W] -> [C/16][H + 2h][W + 2h][16], or [C/32][...][32] of bfloat16."""
    padded = np.pad(plain, ((0, -len(plain) % LANES), (halo, halo), (halo, halo)))
    if not stored:
        return aligned(padded.reshape(-1, LANES, *padded.shape[1:]).transpose(0, 2, 3, 1))
    words = bf16.rounded(padded).reshape(-1, 2 * LANES, *padded.shape[1:]).transpose(0, 2, 3, 1)
    return aligned(np.append(words.ravel(), np.full(BEHIND, 0x7FC0, np.uint16)))  # NaN, which must not count


def plain(memory: Array, shape: tuple[int, int, int], halo: int, stored: bool) -> Array:
    """What `blocked` was given; fails unless halo and surplus channels are zero."""
    channels, height, width = shape
    lanes = 2 * LANES if stored else LANES
    numbers = (memory[:-BEHIND].astype(np.uint32) << 16).view(np.float32) if stored else memory
    blocks = numbers.reshape(-1, height + 2 * halo, width + 2 * halo, lanes)
    full = blocks.transpose(0, 3, 1, 2).reshape(-1, *blocks.shape[1:3])
    inner = full[:, halo : halo + height, halo : halo + width]
    assert not full[channels:].any(), "surplus channels are not zero"
    assert np.count_nonzero(full) == np.count_nonzero(inner), "the halo is not zero"
    return np.ascontiguousarray(inner[:channels])


def activated(y: Array, activation: Activation) -> Array:
    if activation.name == "gelu":
        # Abramowitz and Stegun 7.1.26: an absolute error of 1.5e-7
        z = np.abs(y) / np.sqrt(2)
        t = 1 / (1 + 0.3275911 * z)
        series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
        return np.asarray(y * (1 + np.sign(y) * (1 - series * np.exp(-z * z))) / 2)
    return y if activation == NONE else np.clip(y, activation.alpha, activation.beta)


def storages(spec: ConvSpec) -> list[ConvSpec]:
    """The convolution in bfloat16 with each of its activations stored as it can be."""
    spec = replace(spec, precision="bf16")
    whole_in = spec.in_channels % 32 == 0 and not spec.input_planar
    whole_out = spec.out_channels % 32 == 0 and spec.output_size != (1, 1)
    options = itertools.product(
        *[(False, True) if possible else (False,) for possible in (whole_in, whole_out and spec.residual, whole_out)]
    )
    return [
        replace(
            spec,
            input_layout="bf16" if x else spec.input_layout,
            residual_layout=STORED[residual],
            output_layout=STORED[y],
        )
        for x, residual, y in options
    ]


def run_convolution(library: Library, symbol: str, plan: KernelPlan, target: TargetSpec) -> None:
    spec = plan.spec
    assert isinstance(spec, ConvSpec)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((spec.in_channels, spec.height, spec.width), np.float32)
    shape = (spec.out_channels, spec.in_channels, *spec.kernel)
    raw = {"weights": rng.standard_normal(shape, np.float32), "bias": rng.standard_normal(shape[0], np.float32)}
    size, halo = (spec.out_channels, *spec.output_size), spec.input_halo
    residual = rounded(rng.standard_normal(size, np.float32)) if spec.residual else None
    arguments = [
        aligned(np.pad(x, ((0, 0), (halo, halo), (halo, halo))))
        if spec.input_planar
        else blocked(x, halo, spec.input_layout == "bf16"),
        *(aligned(array) for array in registry.pack(plan, target, raw)),
        *([blocked(residual, spec.residual_halo, spec.residual_layout == "bf16")] if residual is not None else []),
        blocked(np.zeros(size, np.float32), spec.output_halo, spec.output_layout == "bf16"),
    ]
    in_pieces(library, symbol, arguments, plan.tasks)
    got = plain(arguments[-1], size, spec.output_halo, spec.output_layout == "bf16")
    weights = rounded(raw["weights"]).astype(np.float64)
    wanted = np.einsum("chwij,ocij->ohw", windows(rounded(x), spec, 0.0), weights, optimize=True)
    wanted = wanted + raw["bias"][:, None, None] + (0 if residual is None else residual)
    wanted = activated(wanted, spec.activation)
    error = ROUNDED_ERROR * np.abs(wanted) if spec.output_layout == "bf16" else 0
    assert (np.abs(got - wanted) <= error + ERROR * np.abs(wanted).max()).all(), plan


FEW = (
    "1x1 with halos", "3x3", "3x3 on 7x7, wide halo", "stride 2, asymmetric", "dilated, stride 2", "single pixel",
    "37 positions, many planes", "first 7x7",
)  # fmt: skip


@pytest.mark.parametrize("name", sampled(CONVOLUTIONS, FEW))
def test_convolutions(name: str, low: TargetSpec, library_path: Path) -> None:
    plans = planned(storages(CONVOLUTIONS[name]), low)
    library = build(plans, low, library_path)
    for symbol, plan in plans.items():
        kind = "tiles" if bf16.has_tiles(low) and CONVOLUTIONS[name].output_size != (1, 1) else "vectors"
        assert plan.description.startswith(f"conv bf16 {kind}")
        run_convolution(library, symbol, plan, low)


@pytest.mark.parametrize(
    "name", sampled(["3x3", "37 positions, many planes", "first 7x7", "single pixel"], ["3x3", "single pixel"])
)
def test_versions_share_weights_and_layouts(name: str, low: TargetSpec, library_path: Path) -> None:
    found = registry.versions(replace(CONVOLUTIONS[name], precision="bf16"), low, most=8)
    assert len(set(found)) == len(found)
    plans = numbered(found)
    library = build(plans, low, library_path)
    for symbol, plan in plans.items():
        run_convolution(library, symbol, plan, low)


def test_long_reductions_and_large_bands(low: TargetSpec, library_path: Path) -> None:
    specs = [
        ConvSpec(1600, 1, 128, 64, precision="bf16", input_layout="bf16"),
        ConvSpec(1600, 1, 128, 64, precision="bf16"),
        ConvSpec(416, 14, 14, 64, (3, 3), pads=(1, 1, 1, 1), input_halo=1, precision="bf16"),
    ]
    plans = planned(specs, low)
    library = build(plans, low, library_path)
    for symbol, plan in plans.items():
        run_convolution(library, symbol, plan, low)


@pytest.mark.parametrize("name", sampled(PAIRS, ["stride 2, surplus channels, halos", "behind a planar image"]))
def test_pairs(name: str, low: TargetSpec, library_path: Path, rng: np.random.Generator) -> None:
    given = PAIRS[name]
    conv, second = given.conv, given.depthwise
    options = itertools.product(
        (False, True) if conv.in_channels % 32 == 0 else (False,),
        (False, True) if conv.out_channels % 32 == 0 else (False,),
    )
    specs = [
        ConvDepthwiseSpec(
            replace(conv, input_layout="bf16" if x else conv.input_layout), replace(second, output_layout=STORED[y])
        )
        for x, y in options
    ]
    plans = planned(specs, low)
    kind = "tiles" if bf16.has_tiles(low) else "vectors"
    assert all(f"bf16 {kind}" in plan.description for plan in plans.values())
    library = build(plans, low, library_path)
    x = rng.standard_normal((conv.in_channels, conv.height, conv.width), np.float32)
    raw = {
        "weights": rng.standard_normal((conv.out_channels, conv.in_channels, *conv.kernel), np.float32),
        "bias": rng.standard_normal(conv.out_channels, np.float32),
        "depthwise_weights": rng.standard_normal((second.out_channels, 1, *second.kernel), np.float32),
        "depthwise_bias": rng.standard_normal(second.out_channels, np.float32),
    }
    weights = rounded(raw["weights"]).astype(np.float64)
    between = np.einsum("chwij,ocij->ohw", windows(rounded(x), conv, 0.0), weights, optimize=True)
    between = activated(between + raw["bias"][:, None, None], conv.activation)
    wanted = np.einsum("chwij,coij->chw", windows(between, second, 0.0), raw["depthwise_weights"].astype(np.float64))
    wanted = activated(wanted + raw["depthwise_bias"][:, None, None], second.activation)
    for (symbol, plan), spec in zip(plans.items(), specs, strict=True):
        halo, stored = conv.input_halo, spec.depthwise.output_layout == "bf16"
        arguments = [
            aligned(np.pad(x, ((0, 0), (halo, halo), (halo, halo))))
            if conv.input_planar
            else blocked(x, halo, spec.conv.input_layout == "bf16"),
            *(aligned(array) for array in registry.pack(plan, low, raw)),
            blocked(np.zeros(wanted.shape, np.float32), second.output_halo, stored),
        ]
        in_pieces(library, symbol, arguments, plan.tasks)
        shape = second.out_channels, *second.output_size
        got = plain(arguments[-1], shape, second.output_halo, stored)
        error = ROUNDED_ERROR * np.abs(wanted) if stored else 0
        assert (np.abs(got - wanted) <= error + 2 * ERROR * np.abs(between).max()).all()


@pytest.mark.parametrize(("name", "stored"), [*((name, False) for name in DENSE), (WINDOW, True)])
def test_every_number_of_rows(
    name: str, stored: bool, low: TargetSpec, library_path: Path, rng: np.random.Generator
) -> None:
    spec = replace(DENSE[name], precision="bf16", input_layout=STORED[stored])
    plan = registry.batch_plan(spec, low)
    assert plan is not None
    library = build({"batch": plan}, low, library_path)
    shape = (spec.out_channels, spec.in_channels, *spec.kernel)
    raw = {"weights": rng.standard_normal(shape, np.float32), "bias": rng.standard_normal(shape[0], np.float32)}
    packed = [aligned(array) for array in registry.pack(registry.plan(spec, low), low, raw)]
    outputs = -(-spec.out_channels // LANES) * LANES
    for rows in range(1, plan.rows + 1):
        x = rng.standard_normal((rows, spec.in_channels, spec.height, spec.width), np.float32)
        residual = rng.standard_normal((rows, spec.out_channels), np.float32)
        inputs = np.stack([blocked(row, 0, stored).ravel() for row in x])
        inputs = inputs[:, :-BEHIND].copy().view(np.float32) if stored else inputs
        y = answered(library, plan.tasks, inputs, packed, residual if spec.residual else None, outputs)
        weights = rounded(raw["weights"]).astype(np.float64)
        wanted = np.einsum("rcij,ocij->ro", rounded(x), weights) + raw["bias"]
        wanted = activated(wanted + residual, RELU) if spec.residual else wanted
        assert np.abs(y[:, : spec.out_channels] - wanted).max() <= ERROR * np.abs(wanted).max()
        assert not y[:, spec.out_channels : outputs].any(), "surplus channels are not zero"
        assert (y[:, outputs:] == GUARD).all()


@pytest.mark.parametrize("output_bf16", sampled([False, True], [True]))
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention(name: str, output_bf16: bool, low: TargetSpec, library_path: Path, rng: np.random.Generator) -> None:
    spec = replace(ATTENTIONS[name], precision="bf16", output_layout=STORED[output_bf16])
    if not bf16.has_tiles(low):
        with pytest.raises(registry.UnsupportedSpecError):
            registry.plan(spec, low)
        return
    plan = registry.plan(spec, low)
    library = build({"k": plan}, low, library_path)
    channels = spec.heads * spec.head_size
    q, k, v = (2 * rng.standard_normal((channels, 1, n), np.float32) for n in (spec.queries, spec.keys, spec.keys))
    biases = []
    for bias in spec.biases:
        shape = (spec.heads if bias.per_head else 1, spec.queries if bias.per_query else 1, spec.keys)
        biases.append(3 * rng.standard_normal(shape, np.float32))
        biases[-1][..., 0] = -np.inf
    y = blocked(np.zeros((channels, 1, spec.queries), np.float32), 0, output_bf16)
    in_pieces(library, "k", [*(blocked(x, 0, stored=True) for x in (q, k, v)), *map(aligned, biases), y], plan.tasks)
    heads = [rounded(x).astype(np.float64).reshape(spec.heads, spec.head_size, -1) for x in (q, k, v)]
    scores = np.einsum("hdq,hdk->hqk", *heads[:2]) * spec.scale
    for bias, numbers in zip(spec.biases, biases, strict=True):
        scores = scores + numbers * (spec.scale if bias.scaled else 1)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = np.einsum("hqk,hdk->hdq", shares / shares.sum(-1, keepdims=True), heads[2]).reshape(channels, 1, -1)
    got = plain(y, (channels, 1, spec.queries), 0, output_bf16)
    # Shares are rounded before they multiply values.
    assert np.abs(got - wanted).max() <= (1 + output_bf16) * ROUNDED_ERROR * np.abs(wanted).max()


@pytest.mark.parametrize("stored", [(True, False), (False, True), (True, True)])
def test_pooling_and_normalisation(
    stored: tuple[bool, bool], low: TargetSpec, library_path: Path, rng: np.random.Generator
) -> None:
    first, last = stored
    maximum = PoolSpec("max", 64, 13, 17, (3, 3), (2, 2), (1, 1, 1, 1), input_halo=1, output_halo=1)
    mean = PoolSpec("average", 32, 9, 11, (3, 3), (1, 1), (1, 1, 1, 1), output_halo=1)
    pools = [replace(spec, input_layout=STORED[first], output_layout=STORED[last]) for spec in (maximum, mean)]
    whole = GlobalPoolSpec(64, 7, 7, input_layout=STORED[first])
    norm = LayerNormSpec(96, 37, 1e-5, input_layout=STORED[first], output_layout=STORED[last])
    specs: list[KernelSpec] = [*pools, whole, norm]
    plans = planned(specs, low)
    library = build(plans, low, library_path)

    def close(y: Array, wanted: Array, halo: int, output: bool) -> None:
        got = plain(y, (wanted.shape[0], wanted.shape[1], wanted.shape[2]), halo, output)
        error = ROUNDED_ERROR * np.abs(wanted) if output else 0
        assert (np.abs(got - wanted) <= error + ERROR * np.abs(wanted).max()).all()

    for symbol, spec in zip(("k0", "k1"), pools, strict=True):
        x = rounded(rng.standard_normal((spec.channels, spec.height, spec.width), np.float32) - 3)
        count = windows(np.ones_like(x), spec, 0.0).sum(axis=(3, 4))
        wanted = windows(x, spec, -np.inf).max(axis=(3, 4))
        wanted = wanted if spec.mode == "max" else windows(x, spec, 0.0).sum(axis=(3, 4)) / count
        y = blocked(np.zeros(wanted.shape, np.float32), spec.output_halo, last)
        in_pieces(library, symbol, [blocked(x, spec.input_halo, first), y], plans[symbol].tasks)
        close(y, wanted, spec.output_halo, last)
    x = rounded(rng.standard_normal((64, 7, 7), np.float32))
    y = blocked(np.zeros((64, 1, 1), np.float32), 0, stored=False)
    in_pieces(library, "k2", [blocked(x, 0, first), y], plans["k2"].tasks)
    close(y, x.astype(np.float64).mean(axis=(1, 2), keepdims=True), 0, output=False)
    x = rounded(rng.standard_normal((96, 1, 37), np.float32))
    scale, shift = rng.standard_normal((2, 96), np.float32)
    y = blocked(np.zeros(x.shape, np.float32), 0, last)
    packed = registry.pack(plans["k3"], low, {"scale": scale, "shift": shift})
    in_pieces(library, "k3", [blocked(x, 0, first), *(aligned(array) for array in packed), y], plans["k3"].tasks)
    exact = x.astype(np.float64)
    wanted = (exact - exact.mean(0)) / np.sqrt(exact.var(0) + norm.epsilon)
    close(y, wanted * scale[:, None, None] + shift[:, None, None], 0, last)


FASTER = {
    "long reduction": ConvSpec(512, 28, 28, 128),
    "residual": ConvSpec(64, 56, 56, 256, residual=True, activation=RELU),
    "stride 2": ConvSpec(256, 28, 28, 256, (3, 3), (2, 2), (1, 1, 1, 1), input_halo=1),
    "first 7x7": ConvSpec(3, 224, 224, 64, (7, 7), (2, 2), (3, 3, 3, 3), input_layout="planar", input_halo=3),
    "few channels": ConvSpec(144, 56, 56, 24, residual=True),
    "dense, 128 positions": ConvSpec(768, 1, 128, 3072),
}
SLOWER = {
    "3x3, of which Winograd's algorithm saves more": ConvSpec(
        64, 56, 56, 64, (3, 3), pads=(1, 1, 1, 1), input_halo=1, output_halo=1
    ),
    "first 3x3, three products a row": ConvSpec(
        3, 416, 416, 16, (3, 3), pads=(1, 1, 1, 1), input_layout="planar", input_halo=1
    ),
}


@pytest.mark.parametrize("name", [*FASTER, *SLOWER])
def test_vectors_are_chosen_where_they_are_faster(name: str) -> None:
    target = replace(TARGETS["avx512"], extensions=VECTORS)
    assert work.is_faster({**FASTER, **SLOWER}[name], target) == (name in FASTER)
    assert not work.is_faster({**FASTER, **SLOWER}[name], TARGETS["avx512"])


def test_numbers_are_rounded_to_the_nearest_even() -> None:
    numbers = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -2.5, np.inf], np.float32)
    assert rounded(numbers).tolist() == [1.0, 1.0, 1 + 2**-6, 1 + 2**-7, -2.5, np.inf]
