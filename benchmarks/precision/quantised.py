"""Networks that onnxruntime has quantised: ours, onnxruntime and OpenVINO, and ours of the float32 file, taking turns.

Files are made by onnxruntime's static quantisation: pairs of QuantizeLinear and DequantizeLinear, weights of int8 for
each channel, activations of uint8, calibrated on random rows. With --dynamic they are made by its dynamic one: scales
of activations are found at run time. Weights are uint8 then in networks with convolutions, which onnxruntime computes
several times slower with int8. "cosine" compares ours with onnxruntime without fusions.

--processor-time is for machines that others use: sides compute in this process, ours without its executor, and what
counts is the least time of the processor that one of them took.

--target compiles ours for a lesser instruction set, such as that of machines without VNNI. Peers use all that this one
has, so ours is compared with our own float32 only. --reduce-range makes weights of 7 bits.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.shape_inference import quant_pre_process

from benchmarks.peers.onnxruntime_peer import RunOnce, Timed, onnxruntime_peer, pinned, timed_ms
from benchmarks.peers.openvino_peer import openvino_peer
from benchmarks.precision import processor_time
from gangway.artifact.format import WEIGHTS_FILE, Engine
from gangway.clients.inputs import Array
from gangway.compiler.comparison.agreement import cosine
from gangway.compiler.quantize_command import quantise
from gangway.compiler.target import TARGETS
from testing.exact_integers import exact_session
from testing.gang_runner import GangRunner
from testing.reference import example_of
from testing.report import Report, Row, add_repository_option, option_parser, start_report
from testing.repository import compile_file, ensure_zoo, onnx_file

ROWS = 3  # of calibration
QUERIES = 5
MODELS = ("resnet50", "mobilenetv2", "efficientnet_b0", "bert_base")
RATIO_AT_MOST = 1.15  # of the better peer's time
MEAN_AT_MOST = 1.0
COMPILE_AT_MOST = 1.2
LEAST_COSINE = 0.98
OURS, OURS_FP32 = "gangway", "gangway fp32"
PEERS: Mapping[str, Callable[[Path, Mapping[str, Array], int], RunOnce]] = {
    "onnxruntime": onnxruntime_peer,
    "OpenVINO": openvino_peer,
}


@dataclass(frozen=True)
class Settings:
    """What files are made, and what is measured; `target`: if not the best one here."""

    dynamic: bool = False
    reduce_range: bool = False
    processor: bool = False
    target: str | None = None


def quantised(repository: Path, model: str, folder: Path, dynamic: bool, reduce_range: bool = False) -> Path:
    """Write the model as a quantised file and return where."""
    source, result = onnx_file(repository, model), folder / f"{model}_int8.onnx"
    if dynamic:
        prepared = folder / f"{model}_prepared.onnx"
        quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
        convolves = any(node.op_type == "Conv" for node in onnx.load(prepared, load_external_data=False).graph.node)
        kind = QuantType.QUInt8 if convolves else QuantType.QInt8
        quantize_dynamic(prepared, result, weight_type=kind, reduce_range=reduce_range)
        return result
    examples = [example_of(model, source, seed).inputs for seed in range(ROWS)]
    quantise(source, result, examples, "MinMax", keep=(), reduce_range=reduce_range)
    return result


def measure(repository: Path, model: str, rounds: int, cores: Sequence[int], settings: Settings) -> Row:
    """Let all sides take turns on these cores; `processor`: in this process, by time of the processor."""
    count, processor, target = len(cores), settings.processor, settings.target
    with tempfile.TemporaryDirectory() as scratch:
        path = quantised(repository, model, Path(scratch), settings.dynamic, settings.reduce_range)
        example = example_of(model, path)
        sources = {OURS: path, OURS_FP32: onnx_file(repository, model)}
        folders = {name: compile_file(source, target=target) for name, source in sources.items()}
        with GangRunner(folders[OURS].parent, cores) as runner:
            models = {name: runner.open_model(folder, 1) for name, folder in folders.items()}
            if models[OURS].manifest.engine is Engine.ONNXRUNTIME:
                return {"model": model, "gangway ms": "left to onnxruntime"}
            found = runner.run(models[OURS], example.inputs, count).outputs

            def ours(name: str) -> float:
                return runner.run(models[name], example.inputs, count).outcome.compute_us / 1000

            sides: dict[str, Timed] = {name: partial(ours, name) for name in models}
            if processor:
                layers = {name: processor_time.ours(sources[name], folder, example) for name, folder in folders.items()}
                sides = {name: partial(_processor_ms, call) for name, call in layers.items()}
            for name, open_peer in () if target else PEERS.items():
                with pinned(cores):
                    peer = open_peer(path, example.inputs, count)
                    sides[name] = partial(_processor_ms, peer) if processor else timed_ms(peer, cores)
            times: dict[str, list[float]] = {name: [] for name in sides}
            for _ in range(rounds):
                for name, side in sides.items():
                    side()
                    taken = [side() for _ in range(QUERIES)]
                    times[name].append(min(taken) if processor else statistics.median(taken))
        middle = min if processor else statistics.median
        medians = {name: float(middle(values)) for name, values in times.items()}
        return {
            "model": model,
            **{f"{name} ms": value for name, value in medians.items()},
            **({} if target else {"ratio to better": medians[OURS] / min(medians[name] for name in PEERS)}),
            "ratio to fp32": medians[OURS] / medians[OURS_FP32],
            "cosine": _cosine(found, _exact(path, example.inputs)),
            "weights / file": (folders[OURS] / WEIGHTS_FILE).stat().st_size / path.stat().st_size,
            "compile s": sum(models[OURS].manifest.phase_us.values()) / 1e6,
            "compile fp32 s": sum(models[OURS_FP32].manifest.phase_us.values()) / 1e6,
        }


def _processor_ms(run: Callable[[], object]) -> float:
    begin_ns = time.process_time_ns()
    run()
    return (time.process_time_ns() - begin_ns) / 1e6


def _exact(path: Path, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
    session = exact_session(path)
    names = [output.name for output in session.get_outputs()]
    return {name: np.asarray(answer) for name, answer in zip(names, session.run(names, dict(inputs)), strict=True)}


def _cosine(outputs: Mapping[str, Array], expected: Mapping[str, Array]) -> float:
    """Return the least cosine of an output and what is expected."""
    return min(cosine(outputs[name], values) for name, values in expected.items())


def run(report: Report, repository: Path, models: list[str], rounds: int, count: int, settings: Settings) -> None:
    """Measure every model, one after the other, on so many cores."""
    cores = sorted(os.sched_getaffinity(0))[:count]
    rows = [measure(repository, model, rounds, cores, settings) for model in models]
    kind = "dynamically quantised" if settings.dynamic else "quantised"
    report.table(f"{kind} networks on {len(cores)} cores, medians", rows)
    ratios = [float(str(row["ratio to better"])) for row in rows if "ratio to better" in row]
    if ratios:
        report.target("geometric mean of ratios", statistics.geometric_mean(ratios), MEAN_AT_MOST)
    for row in rows:
        if "cosine" in row:
            if "ratio to better" in row:
                report.target(f"{row['model']}: ratio to better", float(str(row["ratio to better"])), RATIO_AT_MOST)
            report.target(f"{row['model']}: ratio to our fp32", float(str(row["ratio to fp32"])), MEAN_AT_MOST)
            if not settings.dynamic:
                compile_s = float(str(row["compile s"])) / float(str(row["compile fp32 s"]))
                report.target(f"{row['model']}: time to compile over fp32", compile_s, COMPILE_AT_MOST)
            report.target(f"{row['model']}: 1 - cosine", 1 - float(str(row["cosine"])), 1 - LEAST_COSINE)


def main() -> int:
    """Run the benchmark; return 1 when a target is missed."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME")
    parser.add_argument("--dynamic", action="store_true", help="files of dynamic quantisation")
    parser.add_argument("--processor-time", action="store_true", help="the least time of the processor, on one core")
    parser.add_argument("--target", choices=list(TARGETS), help="an instruction set, if not the best one here")
    parser.add_argument("--reduce-range", action="store_true", help="weights of 7 bits")
    parser.add_argument("--cores", type=int, default=1, help="how many cores")
    parser.add_argument("--rounds", type=int, default=10, help=f"rounds; each side runs {QUERIES} queries in each")
    options = parser.parse_args()
    report = start_report("Quantised networks")
    if options.processor_time and options.cores != 1:
        parser.error("--processor-time is of one core")
    repository = ensure_zoo(options.repository, options.models)
    settings = Settings(options.dynamic, options.reduce_range, options.processor_time, options.target)
    run(report, repository, options.models, options.rounds, options.cores, settings)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
