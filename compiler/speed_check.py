"""Whether a quantised model is compiled to its advantage: kernels compute it in float32, onnxruntime in integers.

Which of the two is faster depends on the processor, so both are measured. A model that onnxruntime computes faster is
left to it.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gangway.artifact.format import Layer, Space
from gangway.artifact.onnx_session import bind_static, element_type, open_session
from gangway.compiler.errors import UnsupportedModelError
from gangway.compiler.frontend.graph import Graph
from gangway.compiler.kernels.codegen import Library, aligned
from gangway.compiler.kernels.specs import Array
from gangway.compiler.lower.reference import best_us, example

MOST_RATIO = 1.1  # of times
MOST_RATIO_OF_ISLANDS = 0.9  # if onnxruntime computes layers anyway: on several cores a whole model gains more
LEAST_GAIN_US = 100  # less is gained by a compiled model elsewhere: it needs no Python
ROUNDS = 4  # of both, by turns
_QUANTISED = ("Quantise", "Quantize", "Integer", "QLinear", "QGemm")  # parts of operators' names

Call = Callable[[], object]


@dataclass(frozen=True)
class Candidate:
    """A model that has been compiled: its layers, and the files and memory that they work with."""

    graph: Graph
    layers: Sequence[Layer]
    kernels: Path
    weights: Path
    arena_bytes: int


def is_doubtful(layers: Sequence[Layer]) -> bool:
    """Whether a model is quantised."""
    return any(part in layer.operator for layer in layers for part in _QUANTISED)


def require_speed(path: Path, dimensions: Mapping[str, int], candidate: Candidate) -> None:
    """Raise UnsupportedModelError if a row of a quantised model takes 1.1 times onnxruntime's time, and 0.1 ms more.

    With layers that onnxruntime computes, 0.9 times are too much. Nothing is said of models that onnxruntime cannot
    compute with random numbers.
    """
    graph, layers = candidate.graph, candidate.layers
    feeds = {name: example(graph.types[name], seed) for seed, name in enumerate(graph.inputs)}
    feeds |= {name: np.full_like(feeds[name], dimensions[name]) for name in feeds.keys() & dimensions.keys()}
    try:
        session = open_session(path)
        session.run(None, feeds)
    except Exception:  # onnxruntime's own exceptions have no common base
        return
    calls = _calls(candidate, feeds)
    ours_us = theirs_us = float("inf")
    for _ in range(ROUNDS):
        theirs_us = min(theirs_us, best_us(lambda: session.run(None, feeds)))
        ours_us = min(ours_us, best_us(lambda: [call() for call in calls]))
    slowest = _slowest(layers, calls)
    if any(layer.onnx_file for layer in layers):
        if ours_us > MOST_RATIO_OF_ISLANDS * theirs_us:
            raise UnsupportedModelError(f"onnxruntime computes most of this quantised model, such as {slowest}")
    elif ours_us > max(MOST_RATIO * theirs_us, theirs_us + LEAST_GAIN_US):
        raise UnsupportedModelError(
            f"onnxruntime computes this quantised model {ours_us / theirs_us:.1f} times as fast as kernels of float32,"
            f" which need most time for {slowest}"
        )


def _slowest(layers: Sequence[Layer], calls: Sequence[Call]) -> str:
    """Return the operator whose layers take the most time together."""
    times = Counter[str]()
    for layer, call in zip(layers, calls, strict=True):
        begin_ns = time.perf_counter_ns()
        call()
        times[layer.operator.partition("+")[0]] += time.perf_counter_ns() - begin_ns
    return times.most_common(1)[0][0]


def _calls(candidate: Candidate, feeds: Mapping[str, Array]) -> list[Call]:
    """Return a call of all tasks of each layer, on one row of memory of its own."""
    graph, kernels = candidate.graph, Library(candidate.kernels)
    memory = {
        Space.WEIGHTS: [aligned(np.fromfile(candidate.weights, np.uint8))],
        Space.ARENA: [aligned(np.zeros(max(candidate.arena_bytes, 1), np.uint8))],
        Space.INPUT: [aligned(np.ascontiguousarray(feeds[name])).reshape(-1).view(np.uint8) for name in graph.inputs],
        Space.OUTPUT: [  # which a tail does not need
            aligned(np.zeros(graph.types[name].size_bytes if name in graph.types else 0, np.uint8))
            for name in graph.outputs
        ],
    }

    def call(layer: Layer) -> Call:
        arguments: list[Any] = [memory[ref.space][ref.index][ref.offset_bytes :] for ref in layer.arguments]
        if layer.onnx_file:
            return _island_call(candidate.kernels.with_name(layer.onnx_file), arguments)
        if layer.checks:
            arguments.append(np.zeros(2, np.int64))
        version = layer.versions[0]
        kernel = kernels.bind(version.symbol, arguments)
        return lambda: (kernel(0, version.tasks), arguments)  # of which the kernel has only addresses

    return [call(layer) for layer in candidate.layers]


def _island_call(path: Path, arguments: Sequence[Array]) -> Call:
    """Return a run of onnxruntime for a layer, whose inputs and outputs stay where they are, those of a tail aside."""
    session = open_session(path)
    if len(arguments) == len(session.get_inputs()):
        feeds = {}
        for tensor, array in zip(session.get_inputs(), arguments, strict=True):
            dtype = np.dtype(element_type(tensor.type))
            content = array[: math.prod(tensor.shape) * dtype.itemsize]
            feeds[tensor.name] = content.view(dtype).reshape(tensor.shape)
        return lambda: session.run(None, feeds)
    binding = bind_static(session, [array.ctypes.data for array in arguments])
    return lambda: (session.run_with_iobinding(binding), arguments)
