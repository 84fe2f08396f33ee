"""Networks in float16: ours of a float16 copy of each file beside ours of the float32 file, taking turns.

Weights, inputs and outputs of the copy are float16. "cosine" compares the answers of both.
"""

import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from benchmarks.precision.processor_time import least_ms, ours
from gangway.clients.inputs import Array
from gangway.compiler.comparison.agreement import cosine
from testing.gang_runner import GangRunner
from testing.reference import Example, example_of
from testing.report import Report, Row, add_repository_option, option_parser, start_report
from testing.repository import compile_file, ensure_zoo, onnx_file

NETWORKS = ("resnet50", "mobilenetv2", "efficientnet_b0", "bert_base")
QUERIES = 5
RATIO_AT_MOST = 1.05  # of the time of the float32 file
LEAST_COSINE = 0.999
LARGEST = float(np.finfo(np.float16).max)


def halved(source: Path, result: Path) -> Path:
    """Write a float16 copy of a float32 model; return where. Larger numbers become the largest ones of float16."""
    model = onnx.load(source)
    graph = model.graph
    for tensor in graph.initializer:
        _halve(tensor)
    for value in (*graph.input, *graph.output, *graph.value_info):
        kind = value.type.tensor_type
        if kind.elem_type == TensorProto.FLOAT:
            kind.elem_type = TensorProto.FLOAT16
    for attribute in (attribute for node in graph.node for attribute in node.attribute):
        if attribute.HasField("t"):
            _halve(attribute.t)
        if attribute.name == "to" and attribute.i == TensorProto.FLOAT:
            attribute.i = TensorProto.FLOAT16
    onnx.save(model, result)
    return result


def _halve(tensor: onnx.TensorProto) -> None:
    if tensor.data_type == TensorProto.FLOAT:
        numbers = np.clip(numpy_helper.to_array(tensor), -LARGEST, LARGEST).astype(np.float16)
        tensor.CopyFrom(numpy_helper.from_array(numbers, tensor.name))


def measure(repository: Path, model: str, rounds: int, cores: Sequence[int]) -> list[Row]:
    """Let both take turns, on all these cores and on one."""
    source = onnx_file(repository, model)
    with tempfile.TemporaryDirectory() as scratch:
        folders = [compile_file(halved(source, Path(scratch) / f"{model}_fp16.onnx")), compile_file(source)]
    example = example_of(model, source)
    feeds = [_as_float16(example.inputs), example.inputs]
    rows: list[Row] = []
    with GangRunner(folders[0].parent, cores) as runner:
        models = [runner.open_model(folder) for folder in folders]
        for count in range(len(cores), 0, -1):
            times: list[list[float]] = [[], []]
            answers = [runner.run(*side, count).outputs for side in zip(models, feeds, strict=True)]
            for number in range(rounds):
                for side in (number % 2, 1 - number % 2):
                    found = [runner.run(models[side], feeds[side], count) for _ in range(1 + QUERIES)]
                    times[side].append(statistics.median(one.outcome.compute_us / 1000 for one in found[1:]))
            rows.append(
                {
                    "model": model,
                    "cores": count,
                    "float16 ms": statistics.median(times[0]),
                    "float32 ms": statistics.median(times[1]),
                    "ratio": statistics.median(half / full for half, full in zip(*times, strict=True)),
                    "cosine": min(cosine(answers[0][name], wanted) for name, wanted in answers[1].items()),
                    "layers": len(models[0].manifest.layers) - len(models[1].manifest.layers),
                }
            )
    return rows


def measure_processor_time(repository: Path, model: str, turns: int) -> Row:
    """Let both take turns in this thread; the least processor time of each counts."""
    source = onnx_file(repository, model)
    example = example_of(model, source)
    with tempfile.TemporaryDirectory() as scratch:
        path = halved(source, Path(scratch) / f"{model}_fp16.onnx")
        half = Example(_as_float16(example.inputs), {}, b"")
        sides = {
            "float16": ours(path, compile_file(path), half),
            "float32": ours(source, compile_file(source), example),
        }
        found = least_ms(sides, turns)
    ratio = found["float16"] / found["float32"]
    return {"model": model, **{f"{name} ms": took_ms for name, took_ms in found.items()}, "ratio": ratio}


def _as_float16(inputs: Mapping[str, Array]) -> dict[str, Array]:
    return {
        name: values.astype(np.float16) if values.dtype == np.float32 else values for name, values in inputs.items()
    }


def run_processor_time(report: Report, repository: Path, models: Sequence[str], turns: int) -> None:
    """Measure every model in this thread, one after the other."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rows = [measure_processor_time(repository, model, turns) for model in models]
    report.table("processor time of float16 files, the least", rows)
    for row in rows:
        report.target(f"{row['model']}: ratio to float32", float(str(row["ratio"])), RATIO_AT_MOST)


def run(report: Report, repository: Path, models: Sequence[str], rounds: int, max_cores: int) -> None:
    """Measure every model, one after the other."""
    cores = sorted(os.sched_getaffinity(0))[:max_cores]
    rows = [row for model in models for row in measure(repository, model, rounds, cores)]
    report.table("compute time of float16 files, medians; layers: how many more", rows)
    for row in rows:
        where = f"{row['model']}, {row['cores']} cores"
        report.target(f"{where}: ratio to float32", float(str(row["ratio"])), RATIO_AT_MOST)
        report.target(f"{where}: 1 - cosine", 1 - float(str(row["cosine"])), 1 - LEAST_COSINE)


def main() -> int:
    """Run the benchmark; return 1 when a target is missed."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument("--models", nargs="+", default=list(NETWORKS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=10, help=f"rounds; each side runs {QUERIES} queries in each")
    parser.add_argument("--max-cores", type=int, default=2, help="largest gang")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="instead: one core, in processor time, for machines that others use, too; a round is a turn",
    )
    options = parser.parse_args()
    report = start_report("Networks in float16")
    repository = ensure_zoo(options.repository, options.models)
    if options.processor_time:
        run_processor_time(report, repository, options.models, options.rounds)
    else:
        run(report, repository, options.models, options.rounds, options.max_cores)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
