"""A single layer in onnxruntime, one thread: the time of its operators alone, without the conversions at the layer's
edges.
"""

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from benchmarks.kernels.sequence_peer import SequenceSpec, is_dense, sequence_model
from gangway.compiler.kernels.attention_specs import AttentionSpec
from gangway.compiler.kernels.plain_specs import MatMulSpec
from gangway.compiler.kernels.specs import RELU, RELU6, ConvSpec, GlobalPoolSpec, LayerNormSpec, PoolSpec

RUNS = 12
PeerSpec = SequenceSpec | PoolSpec | GlobalPoolSpec


def onnxruntime_us(spec: PeerSpec, runs: int = RUNS) -> float:
    """Median time of the layer by onnxruntime's own profiler, which counts whole microseconds."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.enable_profiling = True
    with tempfile.TemporaryDirectory() as folder:
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = ort.InferenceSession(_model(spec), options, providers=["CPUExecutionProvider"])
        rng = np.random.default_rng(0)
        feeds = {i.name: rng.standard_normal(i.shape, np.float32) for i in session.get_inputs()}
        for _ in range(runs):
            session.run(None, feeds)
        events = json.loads(Path(session.end_profiling()).read_text())
    times: dict[str, list[float]] = {}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            times.setdefault(event["name"], []).append(event["dur"])
    return sum(statistics.median(found[2:]) for name, found in times.items() if "Reorder" not in name)


def _model(spec: PeerSpec) -> bytes:
    """The layer as an ONNX model: Conv [+ Add] [+ Relu or Clip], a pooling, or a layer of a transformer."""
    if isinstance(spec, AttentionSpec | LayerNormSpec | MatMulSpec) or (isinstance(spec, ConvSpec) and is_dense(spec)):
        return sequence_model(spec)
    rng = np.random.default_rng(0)
    channels = spec.in_channels if isinstance(spec, ConvSpec) else spec.channels
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, channels, spec.height, spec.width])]
    constants, nodes, last = [], [], "x"
    if isinstance(spec, GlobalPoolSpec):
        nodes.append(helper.make_node("GlobalAveragePool", ["x"], ["y"]))
    elif isinstance(spec, PoolSpec):
        operator = "MaxPool" if spec.mode == "max" else "AveragePool"
        window: dict[str, Any] = {"kernel_shape": spec.kernel, "strides": spec.stride, "pads": spec.pads}
        nodes.append(helper.make_node(operator, ["x"], ["y"], **window))
    else:
        shape = (spec.out_channels, channels // spec.groups, *spec.kernel)
        constants.append(numpy_helper.from_array(rng.standard_normal(shape, np.float32), "weights"))
        constants.append(numpy_helper.from_array(rng.standard_normal(shape[0], np.float32), "bias"))
        window = {"strides": spec.stride, "pads": spec.pads, "dilations": spec.dilation}
        nodes.append(helper.make_node("Conv", ["x", "weights", "bias"], ["conv"], group=spec.groups, **window))
        last = "conv"
        if spec.residual:
            size = [1, spec.out_channels, *spec.output_size]
            inputs.append(helper.make_tensor_value_info("residual", TensorProto.FLOAT, size))
            nodes.append(helper.make_node("Add", [last, "residual"], ["sum"]))
            last = "sum"
        if spec.activation == RELU:
            nodes.append(helper.make_node("Relu", [last], ["relu"]))
        elif spec.activation == RELU6:
            constants += [numpy_helper.from_array(np.array(v, np.float32), n) for v, n in ((0, "low"), (6, "high"))]
            nodes.append(helper.make_node("Clip", [last, "low", "high"], ["relu"]))
        nodes[-1].output[0] = "y"
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "layer", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    serialised: bytes = model.SerializeToString()
    return serialised
