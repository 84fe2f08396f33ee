"""A convolution and the depthwise one behind it in one kernel, against numpy in double precision."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.codegen import Library, aligned
from gangway.compiler.kernels.specs import RELU, RELU6, Array, ConvDepthwiseSpec, ConvSpec, KernelPlan
from gangway.compiler.kernels.templates import registry
from gangway.compiler.target import detect
from tests.compiler.kernels.test_templates import Convert, close, convolve
from tests.helpers.kernel_runs import build, in_pieces, numbered, planned
from tests.helpers.sampled import sampled


def both(
    conv: ConvSpec,
    kernel: tuple[int, int],
    stride: tuple[int, int] = (1, 1),
    pads: tuple[int, int, int, int] = (0, 0, 0, 0),
    output_halo: int = 0,
) -> ConvDepthwiseSpec:
    channels = conv.out_channels
    depthwise = ConvSpec(
        channels,
        *conv.output_size,
        channels,
        kernel,
        stride,
        pads,
        groups=channels,
        activation=RELU6,
        output_halo=output_halo,
    )
    return ConvDepthwiseSpec(conv, depthwise)


SPECS: Mapping[str, ConvDepthwiseSpec] = {
    "3x3": both(ConvSpec(16, 14, 17, 96, activation=RELU6), (3, 3), pads=(1, 1, 1, 1)),
    "stride 2, surplus channels, halos": both(
        ConvSpec(20, 15, 14, 72, activation=RELU, input_halo=2), (3, 3), (2, 2), (1, 0, 1, 2), output_halo=1
    ),
    "5x5": both(ConvSpec(24, 11, 33, 40), (5, 5), pads=(2, 2, 2, 2), output_halo=2),
    "5x5, stride 2": both(ConvSpec(24, 12, 13, 24), (5, 5), (2, 2), (1, 2, 2, 1)),
    "no padding, the last lines unused": both(ConvSpec(8, 10, 9, 8), (3, 3), (2, 2)),
    "padding below and above only": both(ConvSpec(8, 6, 40, 24), (3, 1), pads=(2, 0, 1, 0)),
    "window as high as it moves": both(ConvSpec(16, 12, 12, 16), (2, 2), (2, 2)),
    "behind a planar image": both(
        ConvSpec(3, 30, 34, 32, (3, 3), (2, 2), (1, 1, 1, 1), activation=RELU6, input_layout="planar", input_halo=1),
        (3, 3),
        pads=(1, 1, 1, 1),
    ),
    "one channel block": both(ConvSpec(5, 9, 9, 3), (3, 3), pads=(1, 1, 1, 1)),
}


def run(library: Library, symbol: str, plan: KernelPlan, target: TargetSpec, blocked: Convert, plain: Convert) -> None:
    spec = plan.spec
    assert isinstance(spec, ConvDepthwiseSpec)
    conv, depthwise = spec.conv, spec.depthwise
    rng = np.random.default_rng(1)
    x = rng.standard_normal((conv.in_channels, conv.height, conv.width), np.float32)
    raw = {
        "weights": rng.standard_normal((conv.out_channels, conv.in_channels, *conv.kernel), np.float32),
        "bias": rng.standard_normal(conv.out_channels, np.float32),
        "depthwise_weights": rng.standard_normal((depthwise.out_channels, 1, *depthwise.kernel), np.float32),
        "depthwise_bias": rng.standard_normal(depthwise.out_channels, np.float32),
    }
    lanes, halo = target.lanes, conv.input_halo
    arguments = [
        aligned(np.pad(x, ((0, 0), (halo, halo), (halo, halo)))) if conv.input_planar else blocked(x, lanes, halo),
        *(aligned(array) for array in registry.pack(plan, target, raw)),
        blocked(np.zeros((depthwise.out_channels, *depthwise.output_size), np.float32), lanes, depthwise.output_halo),
    ]
    in_pieces(library, symbol, arguments, plan.tasks)
    between = convolve(conv, x, raw["weights"], raw["bias"], None)
    wanted = convolve(depthwise, between, raw["depthwise_weights"], raw["depthwise_bias"], None)
    close(plain(arguments[-1], depthwise.out_channels, depthwise.output_halo), wanted)


def test_all_of_them(target: TargetSpec, library_path: Path, blocked: Convert, plain: Convert) -> None:
    plans = planned(SPECS.values(), target)
    library = build(plans, target, library_path)
    for symbol, plan in plans.items():
        run(library, symbol, plan, target, blocked, plain)


@pytest.mark.parametrize("name", sampled(["3x3", "stride 2, surplus channels, halos"], ["3x3"]))
def test_versions(name: str, target: TargetSpec, library_path: Path, blocked: Convert, plain: Convert) -> None:
    found = registry.versions(SPECS[name], target, most=8 if target == detect() else 3)
    assert found[0] == registry.plan(SPECS[name], target)
    assert len(set(found)) == len(found) > 1
    plans = numbered(found)
    library = build(plans, target, library_path)
    for symbol, plan in plans.items():
        run(library, symbol, plan, target, blocked, plain)


def test_numbers_are_those_of_two_kernels(
    target: TargetSpec, compiled: Callable[[Sequence[ConvSpec | ConvDepthwiseSpec]], list[Callable[..., None]]],
    rng: np.random.Generator, blocked: Convert,
) -> None:  # fmt: skip
    """Bit for bit: each sum is added up in the same order."""
    spec = both(ConvSpec(16, 14, 28, 48, activation=RELU6), (3, 3), (2, 2), (1, 1, 1, 1))
    alone = (
        ConvSpec(16, 14, 28, 48, activation=RELU6, output_halo=1),
        ConvSpec(48, 14, 28, 48, (3, 3), (2, 2), (1, 1, 1, 1), groups=48, activation=RELU6, input_halo=1),
    )
    first, second, together = compiled([*alone, spec])
    raw = {
        "weights": rng.standard_normal((48, 16, 1, 1), np.float32),
        "bias": rng.standard_normal(48, np.float32),
        "depthwise_weights": rng.standard_normal((48, 1, 3, 3), np.float32),
        "depthwise_bias": rng.standard_normal(48, np.float32),
    }
    constants: list[Array] = [aligned(array) for array in registry.pack(registry.plan(spec, target), target, raw)]
    x = blocked(rng.standard_normal((16, 14, 28), np.float32), target.lanes, 0)
    between = blocked(np.zeros((48, 14, 28), np.float32), target.lanes, 1)
    y, fused = (blocked(np.zeros((48, 7, 14), np.float32), target.lanes, 0) for _ in range(2))
    first([x, *constants[:2], between])
    second([between, *constants[2:], y])
    together([x, *constants, fused])
    assert y.any()
    np.testing.assert_array_equal(fused, y)
