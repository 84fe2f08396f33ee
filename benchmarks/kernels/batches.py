"""What one call for several rows gains, or would gain: convolutions and products of transformers, on one core.

"row by row" is how a batch without a kernel for several rows is executed: all tasks of a row, then those of the next.
"batch": the kernel for several rows, where the compiler makes one. "task by task": each part of the weights for all
rows, then the next part. "joined": the kernel that the compiler makes of an image as high, or a sequence as long, as
all rows together, which is what a kernel for several rows could do. Times over that of row by row, for the same number
of operations.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.kernels.gap import random_arguments
from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels import codegen
from gangway.compiler.kernels.codegen import Library, aligned
from gangway.compiler.kernels.specs import Array, BatchPlan, ConvSpec
from gangway.compiler.kernels.templates import registry
from gangway.compiler.target import detect
from testing.report import Row, option_parser, start_report

PARTS = 16  # of a layer's tasks, task by task
Call = Callable[[], None]


def dense(inner: int, tokens: int, outer: int) -> ConvSpec:
    """Return a product of a transformer."""
    return ConvSpec(inner, 1, tokens, outer)


def image(channels: int, size: int, outer: int, kernel: int = 1, stride: int = 1) -> ConvSpec:
    """Return a convolution of a square image, padded so that only the stride makes it smaller."""
    pad = kernel // 2
    return ConvSpec(
        channels, size, size, outer, (kernel, kernel), (stride, stride), pads=(pad, pad, pad, pad), input_halo=pad
    )


CASES = {
    "BERT-base 128 tokens, projection": dense(768, 128, 768),
    "BERT-base 128 tokens, first of the MLP": dense(768, 128, 3072),
    "BERT-base 128 tokens, second of the MLP": dense(3072, 128, 768),
    "GPT-2 64 tokens, attention's inputs": dense(768, 64, 2304),
    "GPT-2 64 tokens, first of the MLP": dense(768, 64, 3072),
    "GPT-2 64 tokens, second of the MLP": dense(3072, 64, 768),
    "ResNet-50 stage 1, 256x56x56 -> 64 k1": image(256, 56, 64),
    "ResNet-50 stage 2, 128x28x28 -> 128 k3": image(128, 28, 128, 3),
    "ResNet-50 stage 2, 512x28x28 -> 128 k1": image(512, 28, 128),
    "ResNet-50 stage 3, 1024x14x14 -> 256 k1": image(1024, 14, 256),
    "ResNet-50 stage 3, 256x14x14 -> 256 k3": image(256, 14, 256, 3),
    "ResNet-50 stage 3, 256x14x14 -> 1024 k1": image(256, 14, 1024),
    "ResNet-50 stage 4, 1024x14x14 -> 2048 k1 s2": image(1024, 14, 2048, 1, 2),
    "ResNet-50 stage 4, 512x14x14 -> 512 k3 s2": image(512, 14, 512, 3, 2),
    "ResNet-50 stage 4, 2048x7x7 -> 512 k1": image(2048, 7, 512),
    "ResNet-50 stage 4, 512x7x7 -> 512 k3": image(512, 7, 512, 3),
    "ResNet-50 stage 4, 512x7x7 -> 2048 k1": image(512, 7, 2048),
}


@dataclass(frozen=True)
class Ways:
    """One layer, ready to be computed in these ways."""

    rows: Call
    batch: Call | None
    tasks: Call
    joined: Call
    plans: tuple[str, str]  # of one row, and joined
    share: float  # of the joined one's operations in what the rows together have: edges differ by some pixels
    arrays: object  # whose addresses the calls have


def joined_spec(spec: ConvSpec, rows: int) -> ConvSpec:
    """Return the rows below each other, or one after the other."""
    return replace(spec, width=rows * spec.width) if spec.height == 1 else replace(spec, height=rows * spec.height)


def make_ways(spec: ConvSpec, rows: int, target: TargetSpec, path: Path) -> Ways:
    """Compile a layer, and what it would be joined. Rows have images of their own and share the weights."""
    one, many = registry.plan(spec, target), registry.plan(joined_spec(spec, rows), target)
    plans = {"one": one, "many": many} | ({"batch": batch} if (batch := registry.batch_plan(spec, target)) else {})
    codegen.build_library({name: registry.emit(plan, target, name) for name, plan in plans.items()}, target, path)
    library = Library(path)
    first, *others = (random_arguments(one, target) for _ in range(rows))
    alone = [first, *([x, *first[1:-1], y] for x, *_, y in others)]
    calls = [library.bind("one", arguments) for arguments in alone]
    all_rows = random_arguments(many, target)
    together = library.bind("many", all_rows)
    part = max(1, one.tasks // PARTS)

    def row_by_row() -> None:
        for call in calls:
            call(0, one.tasks)

    def task_by_task() -> None:
        for begin in range(0, one.tasks, part):
            for call in calls:
                call(begin, min(begin + part, one.tasks))

    in_groups = bind_batch(library, batch, first, rows) if batch else None
    share = many.spec.flops / (rows * spec.flops)
    names = (one.description, many.description)
    return Ways(row_by_row, in_groups, task_by_task, lambda: together(0, many.tasks), names, share, (alone, all_rows))


def bind_batch(library: Library, plan: BatchPlan, one: Sequence[Array], rows: int) -> Call:
    """Return what computes so many rows with the kernel for several, as few calls as possible."""
    counts = [len(group) for group in np.array_split(np.arange(rows), -(-rows // plan.rows))]
    groups = []
    for count in counts:
        x, y = (aligned(np.stack([tensor] * count)) for tensor in (one[0], one[-1]))
        batch = np.array([count, x.strides[0], *[0] * (len(one) - 2), y.strides[0]], np.int64)
        arguments = [x, *one[1:-1], y, batch]
        groups.append((library.bind("batch", arguments), arguments))

    def in_groups() -> None:
        for call, _ in groups:
            call(0, plan.tasks)

    return in_groups


def lower_quartiles(calls: Sequence[Call], rounds: int) -> list[float]:
    """Seconds of each call, which take turns: time that this thread had the core, of the quieter rounds."""
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds + 1):
        for call, times in zip(calls, samples, strict=True):
            begin = time.thread_time()
            call()
            times.append(time.thread_time() - begin)
    return [sorted(times[1:])[rounds // 4] for times in samples]


def measure(name: str, spec: ConvSpec, rows: int, rounds: int, target: TargetSpec, path: Path) -> Row:
    """Return a layer's line of the table."""
    ways = make_ways(spec, rows, target, path)
    calls = [ways.rows, ways.tasks, ways.joined, *([ways.batch] if ways.batch else [])]
    alone_s, tasks_s, joined_s, *batch_s = lower_quartiles(calls, rounds)
    return {
        "layer": name,
        "ms a row": alone_s / rows * 1e3,
        "GFLOP/s": rows * spec.flops / alone_s / 1e9,
        "batch": batch_s[0] / alone_s if batch_s else "",
        "task by task": tasks_s / alone_s,
        "joined": joined_s / alone_s / ways.share,
        "kernel": ways.plans[0],
        "joined kernel": ways.plans[1],
    }


def main() -> int:
    """Run the benchmark."""
    parser = option_parser(__doc__ or "")
    parser.add_argument("--rows", type=int, default=4, help="rows of the batch on this core")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    report = start_report("Kernels for several rows, one core")
    target = detect(None)
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            measure(name, spec, options.rows, options.rounds, target, Path(folder) / f"{number}.so")
            for number, (name, spec) in enumerate(CASES.items())
        ]
    report.table(f"{options.rows} rows, times over row by row", rows)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
