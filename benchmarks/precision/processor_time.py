"""Networks in bf16 on one core, in processor time, for machines that others use, too: ours, ours in fp32, and OpenVINO.

Sides take turns, and the least of each counts. OpenVINO computes in the precision that it chooses itself.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean

from benchmarks.kernels.models import NETWORKS
from benchmarks.peers.openvino_peer import openvino_peer
from gangway.artifact.reader import read_manifest
from gangway.compiler.comparison.candidate import CandidateMemory, CompiledCandidate
from gangway.compiler.frontend.importer import read_graph
from testing.reference import Example, example_of
from testing.report import Report, Row, add_repository_option, option_parser, start_report
from testing.repository import compile_model, ensure_zoo, onnx_file

OURS, OURS_FP32, OPENVINO = "gangway", "gangway fp32", "OpenVINO"
MEAN_RATIO_AT_MOST, RATIO_AT_MOST, FP32_RATIO_AT_MOST = 0.95, 1.1, 1.02


def ours(path: Path, folder: Path, example: Example) -> Callable[[], object]:
    """Return a call of all layers of an artifact, in this thread."""
    graph = read_graph(path, {})
    candidate = CompiledCandidate.of(graph, read_manifest(folder), folder)
    calls = candidate.calls(CandidateMemory.of(candidate, example.inputs))
    return lambda: [call() for call in calls]


def least_ms(sides: Mapping[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Return the least processor time of a call of each side; the first turn does not count."""
    found = dict.fromkeys(sides, float("inf"))
    for turn in range(1 + turns):
        for name, call in sides.items():
            begin = time.process_time()
            call()
            took_ms = (time.process_time() - begin) * 1e3
            if turn:
                found[name] = min(found[name], took_ms)
    return found


def measure(repository: Path, model: str, turns: int) -> Row:
    """Measure one network."""
    path = onnx_file(repository, model)
    example = example_of(model, path)
    sides = {
        OURS: ours(path, compile_model(repository, model, "bf16", 0.0), example),
        OURS_FP32: ours(path, compile_model(repository, model), example),
        OPENVINO: openvino_peer(path, example.inputs, 1, {}),
    }
    found = least_ms(sides, turns)
    ratios = {f"ratio to {name}": found[OURS] / found[name] for name in (OPENVINO, OURS_FP32)}
    return {"model": model, **{f"{name} ms": took_ms for name, took_ms in found.items()}, **ratios}


def run(report: Report, repository: Path, models: Sequence[str], turns: int) -> None:
    """Measure every network, one after the other."""
    rows = [measure(repository, model, turns) for model in models]
    report.table("processor time of one thread, the least", rows)
    ratios = [float(str(row[f"ratio to {OPENVINO}"])) for row in rows]
    for row, ratio in zip(rows, ratios, strict=True):
        report.target(f"{row['model']}: ratio to {OPENVINO}", ratio, RATIO_AT_MOST)
        report.target(f"{row['model']}: ratio to fp32", float(str(row[f"ratio to {OURS_FP32}"])), FP32_RATIO_AT_MOST)
    report.target(f"{len(ratios)} networks: geometric mean of ratios", geometric_mean(ratios), MEAN_RATIO_AT_MOST)


def main() -> int:
    """Run the benchmark; return 1 when a target is missed."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument("--models", nargs="+", default=NETWORKS, metavar="NAME")
    parser.add_argument("--turns", type=int, default=20)
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    report = start_report("Networks in bf16, processor time")
    run(report, ensure_zoo(options.repository, options.models), options.models, options.turns)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
