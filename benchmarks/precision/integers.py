"""Convolutions and dense layers of 8-bit numbers beside the same in float32, by instruction set, on one core.

Sides take turns, and the least time of the processor of each counts. Weights have 8 bits, or are narrow: products of
two beside each other fit 16 bits. A target is an instruction set without extensions: what a machine without VNNI has.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels import codegen
from gangway.compiler.kernels.codegen import Library, aligned
from gangway.compiler.kernels.specs import BYTES_CHANNELS, PIXELS_CHANNELS, RELU, Array, ConvSpec, KernelPlan, Layout
from gangway.compiler.kernels.templates import registry
from gangway.compiler.kernels.templates.int8 import instructions as int8
from gangway.compiler.kernels.templates.int8 import work
from gangway.compiler.kernels.templates.tiling import Image
from gangway.compiler.target import TARGETS, detect
from testing.report import Report, Row, option_parser, start_report

SAMPLE_S = 0.02
ROUNDS = 5
RATIO_AT_MOST = 1.0  # of float32's time
FP32, WHOLE, NARROW = "fp32", "8 bits", "narrow"
PADDED = (1, 1, 1, 1)
LAYERS: Mapping[str, ConvSpec] = {
    "first 7x7, 3 -> 64": ConvSpec(3, 224, 224, 64, (7, 7), (2, 2), (3, 3, 3, 3), input_layout="planar", input_halo=3),
    "1x1 64 -> 256, 56x56": ConvSpec(64, 56, 56, 256),
    "1x1 256 -> 64, 56x56": ConvSpec(256, 56, 56, 64),
    "3x3 64 -> 64, 56x56": ConvSpec(64, 56, 56, 64, (3, 3), (1, 1), PADDED, input_halo=1),
    "3x3 128 -> 128, 28x28": ConvSpec(128, 28, 28, 128, (3, 3), (1, 1), PADDED, input_halo=1),
    "3x3 256 -> 256, 14x14": ConvSpec(256, 14, 14, 256, (3, 3), (1, 1), PADDED, input_halo=1),
    "1x1 1024 -> 256, 14x14": ConvSpec(1024, 14, 14, 256),
    "3x3 512 -> 512, 7x7": ConvSpec(512, 7, 7, 512, (3, 3), (1, 1), PADDED, input_halo=1),
    "1x1 512 -> 2048, 7x7": ConvSpec(512, 7, 7, 2048),
    "dense 768 -> 768, 128 rows": ConvSpec(768, 1, 128, 768),
    "dense 768 -> 3072, 128 rows": ConvSpec(768, 1, 128, 3072),
    "dense 3072 -> 768, 128 rows": ConvSpec(3072, 1, 128, 768),
    "dense 2048 -> 1000, 1 row": ConvSpec(2048, 1, 1, 1000),
}
"""Of resnet50, and bert_base with 128 tokens."""


@dataclass(frozen=True)
class _Side:
    """A kernel and its tensors."""

    plan: KernelPlan
    arguments: list[Array]


def _float32(spec: ConvSpec, target: TargetSpec, rng: np.random.Generator) -> _Side:
    spec = replace(spec, activation=RELU)
    plan = registry.plan(spec, target)
    lanes = 1 if spec.input_planar else target.lanes
    x = Image(spec.in_channels, spec.height, spec.width, spec.input_halo, lanes)
    y = Image(spec.out_channels, *spec.output_size, 0, target.lanes)
    raw = {
        "weights": rng.standard_normal((spec.out_channels, spec.in_channels, *spec.kernel)).astype(np.float32),
        "bias": np.zeros(spec.out_channels, np.float32),
    }
    tensors = [aligned(rng.random(image.elements, np.float32)) for image in (x, y)]
    return _Side(plan, [tensors[0], *map(aligned, registry.pack(plan, target, raw)), tensors[1]])


def _integers(conv: ConvSpec, target: TargetSpec, rng: np.random.Generator, most: int) -> _Side:
    weights = rng.integers(-most, most, (conv.out_channels, conv.in_channels, *conv.kernel)).astype(np.int8)
    layout: Layout = "pixels" if conv.input_planar else "bytes"
    spec = replace(conv, precision="int8", input_layout=layout, output_layout="bytes")
    spec = work.suited(spec, weights, target)
    plan = registry.plan(spec, target)
    x = Image(
        spec.in_channels, spec.height, spec.width, spec.input_halo,
        PIXELS_CHANNELS if layout == "pixels" else BYTES_CHANNELS,
    )  # fmt: skip
    y = Image(spec.out_channels, *spec.output_size, 0, BYTES_CHANNELS)
    raw: dict[str, Array] = {
        "weights": weights,
        "bias": np.zeros(spec.out_channels, np.int32),
        "multiplier": np.full(spec.out_channels, 1e-4, np.float32),
        "zero": np.zeros(1, np.float32),
    }
    given = aligned(rng.integers(0, 256, x.elements + int8.READ_BEHIND_BYTES).astype(np.uint8))
    packed = map(aligned, registry.pack(plan, target, raw))
    return _Side(plan, [given, *packed, aligned(np.zeros(y.elements, np.uint8))])


def measure(name: str, spec: ConvSpec, target: TargetSpec, library: Path) -> Row:
    """Measure one layer."""
    rng = np.random.default_rng(3)
    sides = {FP32: _float32(spec, target, rng), WHOLE: _integers(spec, target, rng, 127)}
    if not int8.has_words(target):
        sides[NARROW] = _integers(spec, target, rng, 64)
    plans = [side.plan for side in sides.values()]
    functions = {f"k{index}": registry.emit(plan, target, f"k{index}") for index, plan in enumerate(plans)}
    codegen.build_library(functions, target, library)
    kernels = Library(library)
    calls: dict[str, Callable[[], None]] = {}
    for index, (kind, side) in enumerate(sides.items()):
        calls[kind] = partial(kernels.bind(f"k{index}", side.arguments), 0, side.plan.tasks)
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for kind, call in calls.items():
            call()
            begin, count = time.thread_time(), 0
            while count < 2 or time.thread_time() - begin < SAMPLE_S:
                call()
                count += 1
            least[kind] = min(least[kind], (time.thread_time() - begin) / count)
    row: Row = {"layer": name, **{f"{kind} GOP/s": spec.flops / took / 1e9 for kind, took in least.items()}}
    return {**row, **{f"{kind} / fp32": took / least[FP32] for kind, took in least.items() if kind != FP32}}


def run(report: Report, target: TargetSpec) -> None:
    """Measure every layer."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            measure(name, spec, target, Path(folder) / f"layer{index}.so")
            for index, (name, spec) in enumerate(LAYERS.items())
        ]
    report.table(f"layers, {target.name}, one core", rows)
    for row in rows:
        report.target(f"{row['layer']}: time over fp32", float(str(row[f"{WHOLE} / fp32"])), RATIO_AT_MOST)


def main() -> int:
    """Run the benchmark; return 1 when a target is missed."""
    parser = option_parser(__doc__ or "")
    parser.add_argument("--target", choices=[name for name in TARGETS if int8.multiplies(TARGETS[name])])
    options = parser.parse_args()
    report = start_report("Layers of 8-bit numbers")
    run(report, detect(options.target))
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
