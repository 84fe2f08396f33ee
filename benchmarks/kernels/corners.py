"""Operators beside convolutions, each in a network of one to three nodes, beside onnxruntime, on as many cores.

"ours" is a run of the compiled network by a gang of workers, packing at its edges included. Both sides take turns.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime as ort
from onnx import NodeProto, TensorProto, helper, numpy_helper

from benchmarks.kernels.timing import elapsed_us
from gangway.artifact.cache import Cache
from gangway.compiler.kernels.specs import GATES, Cell
from gangway.compiler.pipeline import compile_model
from gangway.compiler.target import detect
from gangway.executor.launch import available_cores
from gangway.measure.model_runner import ModelRunner
from testing.report import Row, option_parser, start_report

Weights = Mapping[str, tuple[int, ...]]
node = helper.make_node
RUNS: Final = 5  # of one side at a time
SPIN_S: Final = 0.05  # after a run onnxruntime's threads wait actively for about so long
MOST_LAYERS: Final = 8  # more are only counted


@dataclass(frozen=True)
class Case:
    """A network of one input x and one output y; `weights` are shapes of random ones."""

    nodes: tuple[NodeProto, ...]
    shape: tuple[int, ...]
    weights: Weights
    scales: tuple[float, ...] = ()


def _resized(channels: int, size: tuple[int, int], scale: float, alone: bool = False, **how: Any) -> Case:
    """Resize, between two convolutions of one pixel unless `alone`."""
    shape, scales, square = (1, channels, *size), (1.0, 1.0, scale, scale), (channels, channels, 1, 1)
    if alone:
        return Case((node("Resize", ["x", "", "scales"], ["y"], **how),), shape, {}, scales)
    nodes = (node("Conv", ["x", "w"], ["a"]), node("Resize", ["a", "", "scales"], ["b"], **how))
    return Case((*nodes, node("Conv", ["b", "v"], ["y"])), shape, {"w": square, "v": square}, scales)


def _transposed(channels: int, size: int, outputs: int, kernel: int, **how: Any) -> Case:
    nodes = (node("Conv", ["x", "w"], ["a"]), node("ConvTranspose", ["a", "v"], ["b"], strides=[2, 2], **how))
    weights = {"w": (channels, channels, 1, 1), "v": (channels, outputs, kernel, kernel)}
    return Case((*nodes, node("Relu", ["b"], ["y"])), (1, channels, size, size), weights)


def _volume(channels: tuple[int, ...], size: tuple[int, int, int]) -> Case:
    """Convolutions k3, a ReLU behind each."""
    nodes, weights, last = [], {}, "x"
    for index, outputs in enumerate(channels[1:]):
        name = "y" if index == len(channels) - 2 else f"r{index}"
        weights[f"w{index}"] = (outputs, channels[index], 3, 3, 3)
        nodes.append(node("Conv", [last, f"w{index}"], [f"c{index}"], pads=[1] * 6))
        nodes.append(node("Relu", [f"c{index}"], [name]))
        last = name
    return Case(tuple(nodes), (1, channels[0], *size), weights)


def _recurrent(operator: Cell, steps: int, sequences: int, hidden: int, **how: Any) -> Case:
    """One layer of as many inputs as units."""
    gates, directions = GATES[operator], 2 if how.get("direction") == "bidirectional" else 1
    nodes = (node(operator, ["x", "w", "r", "b"], ["y"], hidden_size=hidden, **how),)
    matrix = (directions, gates * hidden, hidden)
    return Case(nodes, (steps, sequences, hidden), {"w": matrix, "r": matrix, "b": (directions, 2 * gates * hidden)})


_NEAREST: Mapping[str, Any] = {
    "mode": "nearest",
    "coordinate_transformation_mode": "asymmetric",
    "nearest_mode": "floor",
}
_POOL: Mapping[str, Any] = {"kernel_shape": [2, 2, 2], "strides": [2, 2, 2]}
CASES: Mapping[str, Case] = {
    "nearest x2 between convolutions": _resized(64, (56, 56), 2, **_NEAREST),
    "linear x2 between convolutions": _resized(64, (56, 56), 2, mode="linear"),
    "linear x4 between convolutions": _resized(128, (28, 28), 4, mode="linear"),
    "cubic x2 between convolutions": _resized(64, (56, 56), 2, mode="cubic"),
    "nearest x2 alone": _resized(3, (224, 224), 2, True, **_NEAREST),
    "linear x2 alone": _resized(3, (224, 224), 2, True, mode="linear"),
    "linear x8 alone": _resized(21, (65, 65), 8, True, mode="linear"),
    "linear x0.5 alone": _resized(3, (720, 1280), 0.5, True, mode="linear"),
    "transposed k2 s2": _transposed(64, 56, 32, 2),
    "transposed k4 s2": _transposed(64, 32, 64, 4, pads=[1] * 4),
    "transposed k3 s2": _transposed(64, 32, 64, 3, pads=[1] * 4, output_padding=[1, 1]),
    "volume 32 to 64 to 64": _volume((32, 64, 64), (8, 28, 28)),
    "volume 16 to 32": _volume((16, 32), (4, 14, 14)),
    "max pool of a volume": Case((node("MaxPool", ["x"], ["y"], **_POOL),), (1, 64, 8, 56, 56), {}),
    "average pool of a volume": Case((node("AveragePool", ["x"], ["y"], **_POOL),), (1, 64, 8, 56, 56), {}),
    **{
        f"GRU {units}, {sequences} x {steps}, reset {'after' if after else 'before'}": _recurrent(
            "GRU", steps, sequences, units, linear_before_reset=after
        )
        for units, sequences, steps in (
            (64, 1, 50),
            (256, 1, 50),
            (256, 8, 50),
            (512, 1, 50),
            (512, 8, 20),
            (1024, 1, 20),
        )
        for after in (0, 1)
    },
    "GRU 256, 1 x 50, both directions": _recurrent("GRU", 50, 1, 256, direction="bidirectional"),
    "GRU 512, 1 x 50, both directions": _recurrent("GRU", 50, 1, 512, direction="bidirectional"),
}


def _model(case: Case) -> bytes:
    random = np.random.default_rng(0)
    constants = {name: random.standard_normal(shape, np.float32) for name, shape in case.weights.items()}
    if case.scales:
        constants["scales"] = np.array(case.scales, np.float32)
    graph = helper.make_graph(
        case.nodes,
        "corner",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, case.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    serialised: bytes = model.SerializeToString()
    return serialised


def measure(name: str, case: Case, cores: Sequence[int], rounds: int) -> Row:
    """Both sides' lower quartiles: what else the machine does only adds to them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(_model(case))
        compiled = compile_model(path, name, Cache(Path(folder) / "cache"), detect(None), lambda *_: None)
        manifest = compiled.manifest
        options = ort.SessionOptions()
        options.intra_op_num_threads = len(cores)
        session = ort.InferenceSession(str(path), options)
        x = np.random.default_rng(1).random(case.shape, np.float32)
        peer_us, runs = [], []
        with ModelRunner(compiled.folder.parent, manifest, cores, 1) as runner:
            runner.run(1, len(cores))
            for _ in range(rounds):
                runs += [runner.run(1, len(cores)) for _ in range(RUNS)]
                peer_us += [elapsed_us(lambda: session.run(None, {"x": x})) for _ in range(RUNS)]
                time.sleep(SPIN_S)
        layers_us = [_quartile(times) for times in zip(*(run.layer_us for run in runs), strict=True)]
        ours, peer = _quartile([run.total_us for run in runs]), _quartile(peer_us)
        texts = [f"{layer.operator} {us:.0f}" for layer, us in zip(manifest.layers, layers_us, strict=True)]
        text = ", ".join(texts if len(texts) <= MOST_LAYERS else [f"{len(texts)} layers"])
        return {"network": name, "ours us": ours, "onnxruntime us": peer, "ratio": ours / peer, "the layers, us": text}


def _quartile(times: Sequence[float]) -> float:
    return statistics.quantiles(times, n=4)[0]


def main() -> int:
    """Run the benchmark."""
    parser = option_parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=15, help="of each network")
    parser.add_argument("--cores", type=int, default=2, help="of both sides")
    parser.add_argument("--match", default="", help="only networks whose names contain this")
    options = parser.parse_args()
    cores = available_cores()[: options.cores]
    report = start_report(f"Operators beside convolutions, float32, {len(cores)} cores")
    rows = [measure(name, case, cores, options.rounds) for name, case in CASES.items() if options.match in name]
    report.table("networks of one to three nodes", rows)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
