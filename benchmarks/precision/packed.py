"""Dense layers whose weights stay integers (MatMulNBits) beside those of float32, in processor time of one core.

Each network is a stack of layers, so that weights of float32 do not stay in a second level cache. Files differ in their
weights only: random integers with a scale for each 32 inputs, and what these stand for as float32. onnxruntime computes
the same files, with its default and with accuracy_level 4, by which it rounds activations to 8 bits, too.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.peers.onnxruntime_peer import onnxruntime_peer
from benchmarks.precision.processor_time import least_ms, ours
from gangway.artifact.format import WEIGHTS_FILE
from testing.reference import Example
from testing.report import Report, Row, option_parser, start_report
from testing.repository import compile_file

ROWS = (1, 8, 128)
BLOCK = 32
HEADS = 12
MANY_ROWS_AT_MOST = 1.1  # of the time of float32
SIZE_AT_MOST = 1.1  # of the file's integers and scales
OURS, OURS_FP32, PEER, ROUNDING_PEER = "gangway", "gangway fp32", "onnxruntime", "onnxruntime, level 4"


class Network:
    """A model that grows; `bits`: of its weights, 32 for float32."""

    def __init__(self, bits: int, accuracy_level: int = 0) -> None:
        self._bits, self._level = bits, accuracy_level
        self._random = np.random.default_rng(5)
        self._nodes: list[Any] = []
        self._tensors: list[Any] = []
        self.weight_bytes = 0  # of integers and scales, or of float32

    def node(self, operator: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Add a node; return its output."""
        output = f"t{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, list(inputs), [output], domain=domain, **attributes))
        return output

    def constant(self, value: Any) -> str:
        """Add a constant."""
        name = f"c{len(self._tensors)}"
        self._tensors.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def dense(self, x: str, inputs: int, outputs: int) -> str:
        """Add a product with a matrix, in float32 with that of 4 bits."""
        bits = 4 if self._bits == 32 else self._bits
        integers = self._random.integers(0, 1 << bits, (outputs, inputs), np.uint8)
        scales = self._random.uniform(0.5, 1.5, (outputs, inputs // BLOCK)).astype(np.float32)
        scales *= 2.0 / ((1 << bits) * inputs**0.5)
        if self._bits == 32:
            real = np.ascontiguousarray(((integers.astype(np.float32) - 8) * np.repeat(scales, BLOCK, 1)).T)
            self.weight_bytes += real.nbytes
            return self.node("MatMul", x, self.constant(real))
        stored = integers[:, ::2] | integers[:, 1::2] << 4 if bits == 4 else integers
        self.weight_bytes += stored.nbytes + scales.nbytes
        names = self.constant(stored.reshape(outputs, inputs // BLOCK, -1)), self.constant(scales)
        sizes = {"K": inputs, "N": outputs, "bits": bits, "block_size": BLOCK, "accuracy_level": self._level}
        return self.node("MatMulNBits", x, *names, domain="com.microsoft", **sizes)

    def save(self, path: Path, rows: int, width: int) -> Path:
        """Write the model; its output is that of the last node."""
        ends = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, rows, width])
            for name in ("x", self._nodes[-1].output[0])
        ]
        graph = helper.make_graph(self._nodes, "packed", ends[:1], ends[1:], self._tensors)
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
        return path


def stack(network: Network, rows: int, width: int, hidden: int, layers: int) -> int:
    """Dense layers, to a wider vector and back."""
    x = "x"
    for _ in range(layers):
        x = network.dense(network.node("Relu", network.dense(x, width, hidden)), hidden, width)
    return width


def blocks(network: Network, rows: int, width: int, count: int) -> int:
    """Blocks as GPT-2 has them, without masks."""
    x = "x"
    one, nothing = (network.constant(np.full(width, value, np.float32)) for value in (1, 0))
    for _ in range(count):
        normed = network.node("LayerNormalization", x, one, nothing)
        parts = network.node(
            "Reshape", network.dense(normed, width, 3 * width), network.constant([1, rows, 3, HEADS, -1])
        )
        query, key, value = (network.node("Gather", parts, network.constant(index), axis=2) for index in range(3))
        scores = network.node(
            "MatMul",
            network.node("Transpose", query, perm=[0, 2, 1, 3]),
            network.node("Transpose", key, perm=[0, 2, 3, 1]),
        )
        shares = network.node("Softmax", network.node("Mul", scores, network.constant(np.float32(0.125))), axis=-1)
        mixed = network.node("MatMul", shares, network.node("Transpose", value, perm=[0, 2, 1, 3]))
        flat = network.node(
            "Reshape", network.node("Transpose", mixed, perm=[0, 2, 1, 3]), network.constant([1, rows, width])
        )
        x = network.node("Add", x, network.dense(flat, width, width))
        normed = network.node("LayerNormalization", x, one, nothing)
        hidden = network.node("Gelu", network.dense(normed, width, 4 * width), approximate="tanh")
        x = network.node("Add", x, network.dense(hidden, 4 * width, width))
    return width


NETWORKS: dict[str, Callable[[Network, int], int]] = {
    "768 -> 3072 -> 768, 6 times": partial(stack, width=768, hidden=3072, layers=6),
    "1024 -> 4096 -> 1024, 4 times": partial(stack, width=1024, hidden=4096, layers=4),
    "4 blocks of GPT-2": partial(blocks, width=768, count=4),
}


def measure(name: str, bits: int, rows: int, turns: int) -> Row:
    """Let all sides compute one network by turns."""
    sides: dict[str, Callable[[], object]] = {}
    sizes: dict[str, tuple[int, int]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for side, given, level in ((OURS, bits, 0), (OURS_FP32, 32, 0), (PEER, bits, 0), (ROUNDING_PEER, bits, 4)):
            network = Network(given, level)
            width = NETWORKS[name](network, rows)
            path = network.save(Path(scratch) / f"{len(sides)}.onnx", rows, width)
            x = {"x": np.random.default_rng(1).standard_normal((1, rows, width)).astype(np.float32)}
            if side in (OURS, OURS_FP32):
                folder = compile_file(path)
                sides[side] = ours(path, folder, Example(x, {}, b""))
                sizes[side] = (folder / WEIGHTS_FILE).stat().st_size, network.weight_bytes
            else:
                sides[side] = onnxruntime_peer(path, x, 1)
        found = least_ms(sides, turns)
    ratios = {f"ratio to {side}": found[OURS] / found[side] for side in (OURS_FP32, PEER)}
    weights = {f"{side} weights MB": sizes[side][0] / 1e6 for side in (OURS, OURS_FP32)}
    size = {"weights / file": sizes[OURS][0] / sizes[OURS][1]}
    return {
        "network": name,
        "bits": bits,
        "rows": rows,
        **{f"{side} ms": ms for side, ms in found.items()},
        **ratios,
        **weights,
        **size,
    }


def run(report: Report, names: Sequence[str], turns: int) -> None:
    """Measure every network of all bits and rows."""
    rows = [measure(name, bits, count, turns) for name in names for bits in (4, 8) for count in ROWS]
    report.table("processor time of one thread, the least", rows)
    for row in rows:
        at_most = MANY_ROWS_AT_MOST if row["rows"] == max(ROWS) else 1.0
        what = f"{row['network']}, {row['bits']} bits, {row['rows']} rows"
        report.target(f"{what}: ratio to fp32", float(str(row[f"ratio to {OURS_FP32}"])), at_most)
        report.target(f"{what}: weights over the file's", float(str(row["weights / file"])), SIZE_AT_MOST)


def main() -> int:
    """Run the benchmark; return 1 when a target is missed."""
    parser = option_parser(__doc__ or "")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), metavar="NAME", choices=list(NETWORKS))
    parser.add_argument("--turns", type=int, default=20)
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    report = start_report("Packed weights, processor time")
    run(report, options.networks, options.turns)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
