"""What it gains to compute a convolution and the depthwise one behind it line by line, on one core.

"apart" is a kernel for each, with all that is between them in memory; "together" is the kernel that the compiler makes
where that is large. Of several rows each kernel does one after the other, as a batch is executed, each row in memory of
its own.
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.kernels.batches import Call, lower_quartiles
from gangway.artifact.format import TargetSpec
from gangway.compiler.frontend.importer import read_graph
from gangway.compiler.job import lower_graph
from gangway.compiler.kernels import codegen
from gangway.compiler.kernels.codegen import Library, aligned
from gangway.compiler.kernels.specs import Array, ConvDepthwiseSpec, ConvSpec
from gangway.compiler.kernels.templates import registry
from gangway.compiler.kernels.templates.tiling import Image
from gangway.compiler.target import detect
from testing.report import Row, add_repository_option, option_parser, start_report
from testing.repository import ensure_zoo, onnx_file

MODELS = ("mobilenetv2", "efficientnet_b0")
ROWS = (1, 8)


@dataclass(frozen=True)
class Memory:
    """What the kernels of one row read and write."""

    x: Array
    between: Array
    y: Array


def alone(spec: ConvDepthwiseSpec) -> tuple[ConvSpec, ConvSpec]:
    """Return both convolutions as layers of their own, which agree on the halo between them."""
    halo = max(spec.depthwise.pads)
    return replace(spec.conv, output_halo=halo), replace(spec.depthwise, input_halo=halo)


def memory_of(spec: ConvDepthwiseSpec, lanes: int) -> Memory:
    """Return memory for a row; its values do not matter here."""
    conv, depthwise = alone(spec)
    rng = np.random.default_rng(0)
    images = [
        Image(conv.in_channels, conv.height, conv.width, conv.input_halo, 1 if conv.input_planar else lanes),
        Image(conv.out_channels, *conv.output_size, conv.output_halo, lanes),
        Image(depthwise.out_channels, *depthwise.output_size, depthwise.output_halo, lanes),
    ]
    return Memory(*[aligned(rng.random(image.elements, np.float32)) for image in images])


def measure(name: str, spec: ConvDepthwiseSpec, target: TargetSpec, rounds: int, path: Path) -> Row:
    """Return a block's line of the table."""
    plans = [registry.plan(one, target) for one in (*alone(spec), spec)]
    functions = {f"k{number}": registry.emit(plan, target, f"k{number}") for number, plan in enumerate(plans)}
    codegen.build_library(functions, target, path)
    library, rng = Library(path), np.random.default_rng(1)
    shapes = {"weights": (spec.conv.out_channels, spec.conv.in_channels, *spec.conv.kernel)}
    shapes |= {"bias": shapes["weights"][:1], "depthwise_bias": shapes["weights"][:1]}
    shapes["depthwise_weights"] = (spec.depthwise.out_channels, 1, *spec.depthwise.kernel)
    raw = {key: rng.standard_normal(shape).astype(np.float32) for key, shape in shapes.items()}
    weights = [aligned(array) for array in registry.pack(plans[2], target, raw)]
    row: Row = {"block": name, "kernel": plans[2].description}
    for rows in ROWS:
        memories = [memory_of(spec, target.lanes) for _ in range(rows)]
        arguments = [
            [[m.x, *weights[:2], m.between] for m in memories],
            [[m.between, *weights[2:], m.y] for m in memories],
            [[m.x, *weights, m.y] for m in memories],
        ]
        layers = [
            [partial(library.bind(f"k{k}", one), 0, plans[k].tasks) for one in arguments[k]] for k in range(len(plans))
        ]
        apart_s, together_s = lower_quartiles([partial(run, layers[:2]), partial(run, layers[2:])], rounds)
        row |= {
            f"apart, us a row of {rows}": apart_s / rows * 1e6,
            f"together, of {rows}": together_s / rows * 1e6,
            f"ratio, of {rows}": together_s / apart_s,
        }
    return row


def run(layers: Sequence[Sequence[Call]]) -> None:
    """Compute all rows of one layer, then those of the next."""
    for rows in layers:
        for call in rows:
            call()


def main() -> int:
    """Run the benchmark."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument("--rounds", type=int, default=24)
    options = parser.parse_args()
    report = start_report("A convolution and the depthwise one behind it, one core")
    target = detect(None)
    repository = ensure_zoo(options.repository, MODELS)
    with tempfile.TemporaryDirectory() as folder:
        for model in MODELS:
            steps = lower_graph(read_graph(onnx_file(repository, model)), target.lanes).steps
            specs = {step.spec: step.name for step in reversed(steps) if isinstance(step.spec, ConvDepthwiseSpec)}
            rows = [
                measure(name, spec, target, options.rounds, Path(folder) / f"{model}{number}.so")
                for number, (spec, name) in enumerate(reversed(specs.items()))
            ]
            report.table(model, rows)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
