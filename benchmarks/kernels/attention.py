"""A layer of BERT-base whose attention is one kernel, or several, beside onnxruntime, on one core.

Attention is written as torch's exporter does it: a mask of truth values, rows without keys made 0. "apart": the shares
are an output of the model, too, so that both products and the softmax stay layers of their own.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from benchmarks.kernels.timing import elapsed_us
from gangway.artifact.cache import Cache
from gangway.compiler.pipeline import compile_model
from gangway.compiler.target import detect
from gangway.executor.launch import available_cores
from gangway.measure.model_runner import ModelRunner
from testing.report import Row, option_parser, start_report

HEADS: Final = 12
SIZE: Final = 64
CHANNELS: Final = HEADS * SIZE
INNER: Final = 4 * CHANNELS
node = helper.make_node


def layer(tokens: int, apart: bool) -> bytes:
    """The model: x [1, tokens, channels] and a mask [1, 1, tokens, tokens]."""
    nodes = []
    for part in "qkv":
        nodes += [
            node("MatMul", ["x", f"w{part}"], [f"{part}0"]),
            node("Add", [f"{part}0", "bias"], [f"{part}1"]),
            node("Reshape", [f"{part}1", "split"], [f"{part}2"]),
            node("Transpose", [f"{part}2"], [f"{part}3"], perm=[0, 2, 3, 1] if part == "k" else [0, 2, 1, 3]),
        ]
    nodes += [
        node("Mul", ["q3", "root"], ["q4"]),
        node("Mul", ["k3", "root"], ["k4"]),
        node("MatMul", ["q4", "k4"], ["scores"]),
        node("Where", ["shown", "zero", "never"], ["mask"]),
        node("Add", ["scores", "mask"], ["masked"]),
        node("Softmax", ["masked"], ["shares"], axis=-1),
        node("IsNaN", ["shares"], ["empty"]),
        node("Where", ["empty", "zero", "shares"], ["kept"]),
        node("MatMul", ["kept", "v3"], ["context"]),
        node("Transpose", ["context"], ["turned"], perm=[0, 2, 1, 3]),
        node("Reshape", ["turned", "merge"], ["merged"]),
        node("MatMul", ["merged", "wo"], ["o0"]),
        node("Add", ["o0", "bias"], ["o1"]),
        node("Add", ["o1", "x"], ["o2"]),
        node("LayerNormalization", ["o2", "scale", "bias"], ["o3"]),
        node("MatMul", ["o3", "w1"], ["i0"]),
        node("Add", ["i0", "bias1"], ["i1"]),
        node("Gelu", ["i1"], ["i2"]),
        node("MatMul", ["i2", "w2"], ["i3"]),
        node("Add", ["i3", "bias"], ["i4"]),
        node("Add", ["i4", "o3"], ["i5"]),
        node("LayerNormalization", ["i5", "scale", "bias"], ["y"]),
    ]
    random = np.random.default_rng(0)
    shapes = {**{f"w{part}": (CHANNELS, CHANNELS) for part in "qkvo"}, "w1": (CHANNELS, INNER), "w2": (INNER, CHANNELS)}
    constants: dict[str, Any] = {
        name: random.standard_normal(shape, np.float32) / 28 for name, shape in shapes.items()
    } | {
        "bias": np.zeros(CHANNELS, np.float32),
        "bias1": np.zeros(INNER, np.float32),
        "scale": np.ones(CHANNELS, np.float32),
        "root": np.array(SIZE**-0.25, np.float32),
        "zero": np.array(0, np.float32),
        "never": np.array(-np.inf, np.float32),
        "split": np.array([1, tokens, HEADS, SIZE]),
        "merge": np.array([1, tokens, CHANNELS]),
    }
    graph = helper.make_graph(
        nodes,
        "layer",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, tokens, CHANNELS)),
            helper.make_tensor_value_info("shown", TensorProto.BOOL, (1, 1, tokens, tokens)),
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("y", "shares")[: 1 + apart]],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    serialised: bytes = model.SerializeToString()
    return serialised


def measure(tokens: int, core: int, rounds: int) -> Row:
    """The least time of each side, whose runs take turns: what else the machine does only adds to it."""
    times_us: dict[str, list[float]] = {"one kernel": [], "apart": [], "onnxruntime": []}
    attention_us: dict[str, list[float]] = {"one kernel": [], "apart": []}
    with tempfile.TemporaryDirectory() as folder:
        runners = {}
        for side, apart in (("one kernel", False), ("apart", True)):
            path = Path(folder) / f"{side}.onnx"
            path.write_bytes(layer(tokens, apart))
            compiled = compile_model(path, side, Cache(Path(folder) / "cache"), detect(None), lambda *_: None)
            runners[side] = (ModelRunner(compiled.folder.parent, compiled.manifest, [core], 1), compiled.manifest)
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        session = ort.InferenceSession(str(Path(folder) / "one kernel.onnx"), options)
        random = np.random.default_rng(1)
        shown = np.tril(np.ones((1, 1, tokens, tokens), np.bool_))
        feeds = {"x": random.standard_normal((1, tokens, CHANNELS), np.float32), "shown": shown}
        with runners["one kernel"][0], runners["apart"][0]:
            for _ in range(rounds):
                for side, (runner, manifest) in runners.items():
                    run = runner.run(1, 1)
                    times_us[side].append(run.total_us)
                    dense = [layer.operator.startswith(("Gemm", "MatMul+", "Layer")) for layer in manifest.layers]
                    others = [us for us, is_dense in zip(run.layer_us, dense, strict=True) if not is_dense]
                    attention_us[side].append(sum(others))
                times_us["onnxruntime"].append(elapsed_us(lambda: session.run(None, feeds)))
    least = {side: min(times) for side, times in times_us.items()}
    ours = least["one kernel"]
    return {
        "tokens": tokens,
        **{f"{side} us": time_us for side, time_us in least.items()},
        "over apart": ours / least["apart"],
        "over onnxruntime": ours / least["onnxruntime"],
        "between the products us": " / ".join(f"{min(times):.0f}" for times in attention_us.values()),
    }


def main() -> int:
    """Run the benchmark."""
    parser = option_parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=30, help="of each side")
    parser.add_argument("--tokens", type=int, nargs="+", default=[7, 128, 512], help="lengths")
    options = parser.parse_args()
    core = available_cores()[0]
    report = start_report("A layer of BERT-base, float32, one core")
    rows = [measure(tokens, core, options.rounds) for tokens in options.tokens]
    report.table("attention as one kernel and apart", rows)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
