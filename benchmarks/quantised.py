"""Networks that onnxruntime has quantised: ours, onnxruntime and OpenVINO, and ours of the float32 file, taking turns.

Files are made by onnxruntime's static quantisation: pairs of QuantizeLinear and DequantizeLinear, weights of int8 for
each channel, activations of uint8, calibrated on random rows. "cosine" compares ours with onnxruntime without fusions.
"""

import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime

from benchmarks.lib.gang_runner import GangRunner
from benchmarks.lib.reference import example_of
from benchmarks.lib.report import Report, Row, add_repository_option, option_parser, start_report
from benchmarks.lib.repository import compile_file, ensure_zoo, onnx_file
from benchmarks.models.peers import openvino_peer
from benchmarks.peers.onnxruntime_peer import Timed, onnxruntime_peer, pinned, timed_ms
from gangway.artifact.format import WEIGHTS_FILE, Engine
from gangway.clients.inputs import Array
from gangway.compiler.agreement import cosine
from gangway.compiler.quantize_command import quantise

ROWS = 3  # of calibration
QUERIES = 5
RATIO_AT_MOST = 1.1  # of the better peer's time
LEAST_COSINE = 0.98
OURS, OURS_FP32 = "gangway", "gangway fp32"


def quantised(repository: Path, model: str, folder: Path) -> Path:
    """Write the model as a quantised file and return where."""
    source, result = onnx_file(repository, model), folder / f"{model}_int8.onnx"
    examples = [example_of(model, source, seed).inputs for seed in range(ROWS)]
    quantise(source, result, examples, "MinMax", keep=(), reduce_range=False)
    return result


def measure(repository: Path, model: str, rounds: int, core: int) -> Row:
    """Let all sides take turns on one core."""
    with tempfile.TemporaryDirectory() as scratch:
        path = quantised(repository, model, Path(scratch))
        example = example_of(model, path)
        folders = {OURS: compile_file(path), OURS_FP32: compile_file(onnx_file(repository, model))}
        with GangRunner(folders[OURS].parent, [core]) as runner:
            models = {name: runner.open_model(folder, 1) for name, folder in folders.items()}
            if models[OURS].manifest.engine is Engine.ONNXRUNTIME:
                return {"model": model, "gangway ms": "left to onnxruntime"}
            found = runner.run(models[OURS], example.inputs, 1).outputs

            def ours(name: str) -> float:
                return runner.run(models[name], example.inputs, 1).outcome.compute_us / 1000

            sides: dict[str, Timed] = {name: partial(ours, name) for name in models}
            for name, open_peer in {"onnxruntime": onnxruntime_peer, "OpenVINO": openvino_peer}.items():
                with pinned([core]):
                    sides[name] = timed_ms(open_peer(path, example.inputs, 1), [core])
            times: dict[str, list[float]] = {name: [] for name in sides}
            for _ in range(rounds):
                for name, side in sides.items():
                    side()
                    times[name].append(statistics.median(side() for _ in range(QUERIES)))
        medians = {name: statistics.median(values) for name, values in times.items()}
        return {
            "model": model,
            **{f"{name} ms": value for name, value in medians.items()},
            "ratio to better": medians[OURS] / min(medians["onnxruntime"], medians["OpenVINO"]),
            "cosine": _cosine(found, _exact(path, example.inputs)),
            "weights / file": (folders[OURS] / WEIGHTS_FILE).stat().st_size / path.stat().st_size,
            "compile s": sum(models[OURS].manifest.phase_us.values()) / 1e6,
            "compile fp32 s": sum(models[OURS_FP32].manifest.phase_us.values()) / 1e6,
        }


def _exact(path: Path, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options)
    names = [output.name for output in session.get_outputs()]
    return {name: np.asarray(answer) for name, answer in zip(names, session.run(names, dict(inputs)), strict=True)}


def _cosine(outputs: Mapping[str, Array], expected: Mapping[str, Array]) -> float:
    """Return the least cosine of an output and what is expected."""
    return min(cosine(outputs[name], values) for name, values in expected.items())


def run(report: Report, repository: Path, models: list[str], rounds: int) -> None:
    """Measure every model, one after the other."""
    core = min(os.sched_getaffinity(0))
    rows = [measure(repository, model, rounds, core) for model in models]
    report.table("quantised networks on one core, medians", rows)
    for row in rows:
        if "cosine" in row:
            report.target(f"{row['model']}: ratio to better", float(str(row["ratio to better"])), RATIO_AT_MOST)
            report.target(f"{row['model']}: 1 - cosine", 1 - float(str(row["cosine"])), 1 - LEAST_COSINE)


def main() -> int:
    """Run the benchmark; return 1 when a target is missed."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument("--models", nargs="+", default=["resnet50", "mobilenetv2"], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=10, help=f"rounds; each side runs {QUERIES} queries in each")
    options = parser.parse_args()
    report = start_report("Quantised networks")
    run(report, ensure_zoo(options.repository, options.models), options.models, options.rounds)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
