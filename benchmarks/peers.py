"""The engines we compare with, each as a function that runs one query: onnxruntime and OpenVINO, fp32, pinned."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import openvino
from gangway.clients.tensors import Array

from benchmarks.reference import open_session

RunOnce = Callable[[], object]


@contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """Keep this thread, and the threads it makes meanwhile, on some cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def onnxruntime_peer(path: Path, inputs: Mapping[str, Array], threads: int) -> RunOnce:
    """Return a query of onnxruntime; its threads spin between queries, as they do by default."""
    session = open_session(path, threads, rows=len(next(iter(inputs.values()))))
    feeds = dict(inputs)
    return lambda: session.run(None, feeds)


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
