"""The engines we compare with, each as a function that runs one query: onnxruntime and OpenVINO, fp32, pinned."""

from collections.abc import Callable, Mapping
from pathlib import Path

import openvino  # pyright: ignore[reportMissingImports]

from benchmarks.peers.onnxruntime_peer import RunOnce, onnxruntime_peer
from gangway.clients.inputs import Array


def openvino_peer(path: Path, inputs: Mapping[str, Array], threads: int) -> RunOnce:
    """Return a query of OpenVINO, told to compute in float32: its default is bfloat16 where the processor has it."""
    core = openvino.Core()
    model = core.read_model(path)
    model.reshape({name: list(values.shape) for name, values in inputs.items()})
    settings = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
    }
    request = core.compile_model(model, "CPU", settings).create_infer_request()
    for name, values in inputs.items():
        request.set_tensor(name, openvino.Tensor(values))

    def run_once() -> object:
        return request.infer()

    return run_once


PEERS: Mapping[str, Callable[[Path, Mapping[str, Array], int], RunOnce]] = {
    "onnxruntime": onnxruntime_peer,
    "OpenVINO": openvino_peer,
}
