"""A compiled model called in this process, layer by layer: to time it, and to compare its numbers."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gangway.artifact.format import KERNELS_FILE, WEIGHTS_FILE, Layer, Manifest, MemorySpace
from gangway.artifact.onnx_session import bind_static, element_type, open_session
from gangway.compiler.frontend.graph import Graph
from gangway.compiler.kernels.codegen import Library, aligned
from gangway.compiler.kernels.specs import Array
from gangway.compiler.lower.reference import example

Call = Callable[[], object]


@dataclass(frozen=True)
class CompiledCandidate:
    """A model that has been compiled: its layers, and the files and memory that they work with."""

    graph: Graph
    layers: Sequence[Layer]
    kernels: Path
    weights: Path
    arena_bytes: int

    @classmethod
    def of(cls, graph: Graph, manifest: Manifest, folder: Path) -> "CompiledCandidate":
        """Return a model of the cache."""
        return cls(graph, manifest.layers, folder / KERNELS_FILE, folder / WEIGHTS_FILE, manifest.arena_bytes)

    def examples(self, dimensions: Mapping[str, int]) -> dict[str, Array]:
        """Return random numbers for the inputs; `dimensions` has the values of those that it names."""
        kinds = {name: self.graph.types[name] for name in self.graph.inputs}
        feeds = {name: _fractions(example(kind, seed), seed) for seed, (name, kind) in enumerate(kinds.items())}
        return feeds | {name: np.full_like(feeds[name], dimensions[name]) for name in feeds.keys() & dimensions.keys()}

    def answers(self, memory: "CandidateMemory") -> list[Array]:
        """Return the outputs as they are in memory."""
        kinds = [self.graph.types[name] for name in self.graph.outputs]
        return [
            numbers.view(kind.dtype).reshape(kind.shape) for numbers, kind in zip(memory.outputs, kinds, strict=True)
        ]

    def calls(self, memory: "CandidateMemory", weights: Array | None = None) -> list[Call]:
        """Return a call of all tasks of each layer, on one row; `weights`: the bytes of others than its own."""
        library = Library(self.kernels)
        own = [aligned(np.fromfile(self.weights, np.uint8) if weights is None else weights)]
        return [self._call(layer, memory.spaces | {MemorySpace.WEIGHTS: own}, library) for layer in self.layers]

    def _call(self, layer: Layer, spaces: Mapping[MemorySpace, Sequence[Array]], library: Library) -> Call:
        arguments: list[Any] = [spaces[ref.space][ref.index][ref.offset_bytes :] for ref in layer.arguments]
        if layer.onnx_file:
            return _island_call(self.kernels.with_name(layer.onnx_file), arguments)
        if layer.checks:
            arguments.append(np.zeros(2, np.int64))
        version = layer.versions[0]
        kernel = library.bind(version.symbol, arguments)
        return lambda: (kernel(0, version.tasks), arguments)  # of which the kernel has only addresses


@dataclass(frozen=True)
class CandidateMemory:
    """Inputs, outputs and arena of one row, which calls of several candidates may share."""

    spaces: dict[MemorySpace, list[Array]]

    @classmethod
    def of(cls, candidate: CompiledCandidate, feeds: Mapping[str, Array]) -> "CandidateMemory":
        """Return memory whose inputs have these numbers."""
        graph = candidate.graph
        inputs = [aligned(np.ascontiguousarray(feeds[name])).reshape(-1).view(np.uint8) for name in graph.inputs]
        sizes = [  # which a tail does not need
            graph.types[name].size_bytes if name in graph.types else 0 for name in graph.outputs
        ]
        return cls(
            {
                MemorySpace.ARENA: [aligned(np.zeros(max(candidate.arena_bytes, 1), np.uint8))],
                MemorySpace.INPUT: inputs,
                MemorySpace.OUTPUT: [aligned(np.zeros(size_bytes, np.uint8)) for size_bytes in sizes],
            }
        )

    def feed(self, feeds: Sequence[Array]) -> None:
        """Give the inputs other numbers."""
        for memory, numbers in zip(self.spaces[MemorySpace.INPUT], feeds, strict=True):
            memory[:] = np.ascontiguousarray(numbers).reshape(-1).view(np.uint8)

    @property
    def outputs(self) -> Sequence[Array]:
        """The bytes of the outputs."""
        return self.spaces[MemorySpace.OUTPUT]


def _fractions(values: Array, seed: int) -> Array:
    """Return an example that has fractions where its type has them."""
    if values.dtype.kind != "f" or values.dtype == np.float32:
        return values
    return np.random.default_rng(seed).standard_normal(values.shape).astype(values.dtype)


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
