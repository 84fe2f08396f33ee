"""Operators beside convolutions, each in a network of one to three layers, beside onnxruntime, on one core.

"ours" are all kernels of the compiled network, packing at its edges included; "the layers" are its kernels one by one.
Both sides take turns.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import NodeProto, TensorProto, helper, numpy_helper

from benchmarks.lib.report import Row, option_parser, start_report
from gangway.artifact.format import Space
from gangway.compiler.frontend.importer import read_graph
from gangway.compiler.job import lower_graph
from gangway.compiler.kernels import codegen
from gangway.compiler.kernels.codegen import Library, aligned
from gangway.compiler.kernels.specs import Array
from gangway.compiler.kernels.templates import registry
from gangway.compiler.place.memory import Buffer
from gangway.compiler.target import detect

Weights = Mapping[str, tuple[int, ...]]
node = helper.make_node


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


def _calls(path: Path, x: Array, folder: Path) -> list[tuple[str, Callable[[], None]]]:
    """A call of each kernel of a model."""
    target = detect(None)
    lowered = lower_graph(read_graph(path), target.lanes)
    steps = lowered.steps
    plans = codegen.choose_plans(steps, target)
    symbols = {plan: f"k{index}" for index, plan in enumerate(dict.fromkeys(plans))}
    functions = {symbol: registry.emit(plan, target, symbol) for plan, symbol in symbols.items()}
    codegen.build_library(functions, target, folder / "kernels.so")
    library = Library(folder / "kernels.so")
    arena = aligned(np.zeros(lowered.arena_bytes, np.uint8))
    y = aligned(np.zeros(steps[-1].output.kind.size_bytes, np.uint8))

    def memory(buffer: Buffer) -> Array:
        if buffer.constant is not None:
            return aligned(buffer.constant)
        space = {Space.ARENA: arena, Space.INPUT: x.reshape(-1).view(np.uint8), Space.OUTPUT: y}[buffer.space]
        return space[buffer.offset_bytes :]

    calls: list[tuple[str, Callable[[], None]]] = []
    for step, plan in zip(steps, plans, strict=True):
        packed = registry.pack(plan, target, step.weights) if step.weights else ()
        first, *others = (memory(buffer) for buffer in step.buffers)
        arguments = [first, *(aligned(array) for array in packed), *others]
        calls.append((step.operator, partial(_run, library.bind(symbols[plan], arguments), plan.tasks, arguments)))
    return calls


def _run(kernel: Callable[[int, int], None], tasks: int, arguments: Sequence[Array]) -> None:
    """Run all tasks; the kernel has only the arguments' addresses."""
    kernel(0, tasks)


def _us(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


def measure(name: str, case: Case, rounds: int) -> Row:
    """Both sides' medians."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(_model(case))
        x = aligned(np.random.default_rng(1).standard_normal(case.shape, np.float32))
        calls = _calls(path, x, Path(folder))
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        session = ort.InferenceSession(str(path), options)
        times: dict[int, list[float]] = {index: [] for index in range(-1, len(calls))}
        for _ in range(rounds):
            times[-1].append(_us(lambda: session.run(None, {"x": x})))
            for index, (_, call) in enumerate(calls):
                times[index].append(_us(call))
        peer, *layers = (statistics.median(found) for found in times.values())
        text = ", ".join(f"{operator} {us:.0f}" for (operator, _), us in zip(calls, layers, strict=True))
        ours = sum(layers)
        return {"network": name, "ours us": ours, "onnxruntime us": peer, "ratio": ours / peer, "the layers, us": text}


def main() -> int:
    """Run the benchmark."""
    parser = option_parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=15, help="of each network; medians count")
    parser.add_argument("--match", default="", help="only networks whose names contain this")
    options = parser.parse_args()
    report = start_report("Operators beside convolutions, float32, one core")
    rows = [measure(name, case, options.rounds) for name, case in CASES.items() if options.match in name]
    report.table("networks of one to three layers", rows)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
