"""The whole compilation: an ONNX file becomes an artifact in the cache."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gangway.artifact.cache import Cache
from gangway.artifact.format import BufferRef, Layer, Manifest, Space, TargetSpec, TensorSpec, Version
from gangway.artifact.writer import ArtifactWriter
from gangway.compiler.key import compiler_version, model_key

if TYPE_CHECKING:  # imported when something is compiled, so that asking the cache takes milliseconds
    from gangway.compiler.graph import Graph
    from gangway.compiler.layout import Step
    from gangway.compiler.specs import KernelPlan

Progress = Callable[[str, int, int], None]
"""`progress(phase, done, total)`; the phases are those of PHASES, in this order."""

PHASES = ("key", "read", "graph", "weights", "kernels", "write")

_DATATYPES = {
    "float32": "FP32",
    "int32": "INT32",
    "int64": "INT64",
}


@dataclass(frozen=True)
class Compiled:
    """The result: where the artifact lies, and whether the cache had it already."""

    manifest: Manifest
    folder: Path
    cached: bool


def compile_model(path: Path, model_name: str, cache: Cache, target: TargetSpec, progress: Progress) -> Compiled:
    """Return the artifact of the ONNX file `path`, compiled unless the cache holds it.

    Raises ModelError (UnsupportedModelError is one), and OSError when files cannot be read or written.
    """
    start_ns = time.monotonic_ns()
    progress("key", 0, 1)
    key = model_key(path, target)
    if manifest := cache.lookup(key):
        return Compiled(manifest, cache.folder(key), True)
    with cache.lock(key):
        if manifest := cache.lookup(key):  # somebody else compiled it meanwhile
            return Compiled(manifest, cache.folder(key), True)
        job = _Job(path, model_name, key, target, progress)
        job.phase_us["key"] = (time.monotonic_ns() - start_ns) // 1000
        return Compiled(job.run(cache.folder(key)), cache.folder(key), False)


class _Job:
    """One compilation, phase by phase."""

    def __init__(self, path: Path, model_name: str, key: str, target: TargetSpec, progress: Progress) -> None:
        self._path = path
        self._model_name = model_name
        self._key = key
        self._target = target
        self._progress = progress
        self.phase_us: dict[str, int] = {}

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._progress(name, 0, 1)
        start_ns = time.monotonic_ns()
        yield
        self.phase_us[name] = (time.monotonic_ns() - start_ns) // 1000

    def run(self, folder: Path) -> Manifest:
        """Compile into `folder`, which appears at the very end."""
        with self._phase("read"):
            from gangway.compiler.importer import read_graph  # noqa: PLC0415

            graph = read_graph(self._path)
        with self._phase("graph"):
            from gangway.compiler import kernels  # noqa: PLC0415

            steps, arena_bytes = lower_graph(graph, self._target.lanes)
            plans = kernels.choose_plans(steps, self._target)
            symbols = kernels.name_symbols(plans)
        with ArtifactWriter(folder) as writer:
            with self._phase("weights"):
                offsets = kernels.write_weights(steps, plans, self._target, writer)
            with self._phase("kernels"):
                kernels.build_kernels(
                    symbols,
                    self._target,
                    writer.kernels_path,
                    lambda done, total: self._progress("kernels", done, total),
                )
            with self._phase("write"):
                layers = tuple(
                    _layer(step, plan, symbols[plan], weights)
                    for step, plan, weights in zip(steps, plans, offsets, strict=True)
                )
                manifest = writer.commit(self._manifest(graph, layers, arena_bytes, steps))
        return manifest

    def _manifest(self, graph: "Graph", layers: tuple[Layer, ...], arena_bytes: int, steps: "list[Step]") -> Manifest:
        return Manifest(
            key=self._key,
            model_name=self._model_name,
            batched=graph.batched,
            inputs=_tensors(graph, graph.inputs),
            outputs=_tensors(graph, graph.outputs),
            layers=layers,
            arena_bytes=arena_bytes,
            target=self._target,
            files={},
            phase_us=self.phase_us,
            parameters=sum(array.size for step in steps for array in step.weights.values()),
            compiler_version=compiler_version(),
        )


def lower_graph(graph: "Graph", lanes: int) -> "tuple[list[Step], int]":
    """Return the placed steps of a model and the size of its arena in bytes. Raises ModelError."""
    from gangway.compiler.arena import plan_arena  # noqa: PLC0415
    from gangway.compiler.fusion import fuse  # noqa: PLC0415
    from gangway.compiler.layout import place  # noqa: PLC0415
    from gangway.compiler.operators import lower  # noqa: PLC0415
    from gangway.compiler.simplify import simplify  # noqa: PLC0415

    program = lower(simplify(graph))
    steps = place(program, fuse(program), lanes)
    return steps, plan_arena(steps, lanes)


def _tensors(graph: "Graph", names: tuple[str, ...]) -> tuple[TensorSpec, ...]:
    specs = []
    for name in names:
        kind = graph.types[name]
        shape = (-1, *kind.shape[1:]) if graph.batched else kind.shape
        specs.append(TensorSpec(name, _DATATYPES[kind.dtype], shape, kind.size_bytes))
    return tuple(specs)


def _layer(step: "Step", plan: "KernelPlan", symbol: str, weights: tuple[int, ...]) -> Layer:
    from gangway.compiler.describe import activation_bytes, flops, max_ranks, shape_text, weight_bytes  # noqa: PLC0415

    buffers = [BufferRef(buffer.space, buffer.offset_bytes, buffer.index) for buffer in (*step.inputs, step.output)]
    constants = [BufferRef(Space.WEIGHTS, offset_bytes) for offset_bytes in weights]
    return Layer(
        name=step.name,
        operator=step.operator,
        shape=shape_text(step),
        arguments=(buffers[0], *constants, *buffers[1:]),
        versions=(Version(symbol, plan.tasks, plan.description, plan.blocking_bytes, plan.parallelism),),
        flops=flops(step),
        bytes=activation_bytes(step) + weight_bytes(step),
        max_ranks=max_ranks(step, plan.tasks),
    )
