"""The engines we compare with, each as a function that runs one query: onnxruntime and OpenVINO, pinned."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from benchmarks.peers.onnxruntime_peer import RunOnce, onnxruntime_peer
from gangway.artifact.format import Precision
from gangway.clients.inputs import Array

FLOAT32: Mapping[str, str] = {"INFERENCE_PRECISION_HINT": "f32"}


def openvino_peer(
    path: Path, inputs: Mapping[str, Array], threads: int, precision: Mapping[str, str] = FLOAT32
) -> RunOnce:
    """Return a query of OpenVINO, told to compute in float32: its default is bfloat16 where the processor has it."""
    import openvino  # noqa: PLC0415  # pyright: ignore[reportMissingImports] - of the extra `bench`

    core = openvino.Core()
    model = core.read_model(path)
    model.reshape({name: list(values.shape) for name, values in inputs.items()})
    settings = {**precision, "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    request = core.compile_model(model, "CPU", settings).create_infer_request()
    for name, values in inputs.items():
        request.set_tensor(name, openvino.Tensor(values))

    def run_once() -> object:
        return request.infer()

    return run_once


OpenPeer = Callable[[Path, Mapping[str, Array], int], RunOnce]
PEERS: Mapping[Precision, Mapping[str, OpenPeer]] = {
    "fp32": {"onnxruntime": onnxruntime_peer, "OpenVINO": openvino_peer},
    "bf16": {"OpenVINO f32": openvino_peer, "OpenVINO as it comes": partial(openvino_peer, precision={})},
}
"""Of float32, and of the lowest precision that is not integers."""
