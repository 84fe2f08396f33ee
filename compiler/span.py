"""One artifact for a span of sizes: the layers of all are the same, and what differs are numbers (`SizeInstances`).

Each size is lowered and placed like any other, so an instance is what the artifact of its size alone would be. Sizes
with other layers than most, and those that cannot be compiled, are left out.
"""

import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from gangway.artifact.format import ALIGNMENT_BYTES, BufferRef, Layer, Manifest, MemorySpace
from gangway.artifact.instances import NumberPlace, SizeInstance, SizeInstances, Varying
from gangway.artifact.writer import ArtifactWriter, temporary_prefix
from gangway.compiler.arguments import CompileOptions, ModelSource
from gangway.compiler.comparison.candidate import CompiledCandidate
from gangway.compiler.comparison.difference import difference_from_onnxruntime
from gangway.compiler.comparison.speed import is_doubtful, require_speed
from gangway.compiler.errors import MixedRowsError, ModelError, UnreadableModelError, UnsupportedModelError
from gangway.compiler.frontend.graph import Graph, TensorType
from gangway.compiler.frontend.importer import read_graph
from gangway.compiler.job import CompileJob, Lowered, ManifestFigures, lower_graph, write_layers
from gangway.compiler.kernels.codegen import WrittenWeights, choose_plans, with_batch_plans
from gangway.compiler.kernels.objects import KernelObjects, has_extents
from gangway.compiler.kernels.plain_specs import IslandSpec, ZerosSpec
from gangway.compiler.kernels.specs import ConvDepthwiseSpec, ConvSpec, ConvTransposeSpec, KernelSpec, VolumeConvSpec
from gangway.compiler.kernels.templates.registry import UnsupportedSpecError
from gangway.compiler.place.arena import keeps_zeros
from gangway.compiler.place.memory import Buffer, PlacedLayer
from gangway.compiler.progress import COMPARISON_PHASE, Phases
from gangway.compiler.target import detect

MOST_SECONDS: Final = 60.0  # of processor time for all sizes; those that come last are left out
_LEAST_WORDS = ALIGNMENT_BYTES // 4  # of memory that is set to zeros
_FIRST_STAMP = 2  # 0 is that of an arena that was never used, 1 would be a constant of the kernel


class EachSizeCostsError(UnsupportedModelError):
    """Sizes of a model are not compiled before it is known that requests have them."""


@dataclass(frozen=True)
class _Size:
    """What is known of one size: its graph without constants, its layers, and what a manifest says beside them."""

    value: int
    graph: Graph
    layers: tuple[Layer, ...]
    lowered: Lowered  # without steps
    figures: ManifestFigures

    @property
    def structure(self) -> object:
        """What is the same in all instances of a program."""
        return self.graph.batched, tuple(map(_structure, self.layers))


class SpanJob(CompileJob):
    """A compilation for the options' span of sizes, in float32; the other symbols have the sizes of `dimensions`."""

    def __init__(self, source: ModelSource, options: CompileOptions, phases: Phases) -> None:
        super().__init__(source, options, phases)
        assert options.span is not None
        self._span = options.span
        self._written = WrittenWeights()

    def run(self, folder: Path) -> Manifest:
        """Compile into `folder`, which appears at the very end. Raises ModelError, OSError."""
        prefix = temporary_prefix(Path(self._key))
        with (
            ArtifactWriter(folder, self._share_key()) as writer,
            tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as scratch,
        ):
            with self._phases.timed("kernels"):
                objects = KernelObjects(folder.parent, Path(scratch), self._target, self._share_key())
                sizes = _alike(list(self._sizes(objects, writer)))
                objects.link(writer.kernels_path)
            with self._phases.timed(COMPARISON_PHASE):
                difference = self._difference(sizes, writer)
                self._require_unchanged()
            with self._phases.timed("write"):
                base = sizes[0]
                arena_bytes = max(size.lowered.arena_bytes for size in sizes)
                lowered = replace(base.lowered, arena_bytes=arena_bytes)
                manifest = self._manifest(base.graph, base.layers, lowered, base.figures)
                instances = _instances([self._sizes_of(size) for size in sizes], tuple(self._dimensions), sizes)
                return writer.commit(replace(manifest, instances=instances, difference=difference))

    @property
    def _marked_dimensions(self) -> Mapping[str, int]:
        return self._span.marked(self._dimensions)

    def _sizes_of(self, size: _Size) -> dict[str, int]:
        return self._span.sizes(size.value, self._dimensions)

    def _sizes(self, objects: KernelObjects, writer: ArtifactWriter) -> Iterator[_Size]:
        """Yield what can be compiled, the largest first. Raises MixedRowsError, UnreadableModelError."""
        values = range(self._span.last, self._span.first - 1, -1)
        end = time.process_time() + MOST_SECONDS
        slow_nodes: Sequence[str] | None = None
        for done, value in enumerate(values):
            self._phases.report("kernels", done, len(values))
            if time.process_time() > end:
                return
            try:
                size = self._size(value, slow_nodes, objects, writer)
            except (MixedRowsError, UnreadableModelError, EachSizeCostsError):
                raise
            except (ModelError, UnsupportedSpecError):
                continue
            slow_nodes = size.lowered.slow_nodes
            yield size

    def _size(
        self, value: int, slow_nodes: Sequence[str] | None, objects: KernelObjects, writer: ArtifactWriter
    ) -> _Size:
        graph = read_graph(self._path, self._span.sizes(value, self._dimensions))
        self._require_unchanged()
        lowered = lower_graph(graph, self._target.lanes, slow_nodes, self._target)
        if any(isinstance(step.spec, IslandSpec) for step in lowered.steps):  # its file is of one size
            raise UnsupportedModelError("onnxruntime computes some layers")
        if self._span.ahead and any(_is_convolution(step.spec) for step in lowered.steps):
            raise EachSizeCostsError("each size of a convolution needs kernels")
        steps, arena_bytes = _with_zeros(lowered, _FIRST_STAMP + value, self._target.lanes)
        plans = choose_plans(steps, self._target)
        names = {step.spec: f"layer '{step.name}' ({step.operator})" for step in reversed(steps)}
        kernels = objects.build(with_batch_plans(plans, self._target, graph.batched), names, lambda done, total: None)
        layers, _ = write_layers(steps, plans, kernels, self._target, writer, self._written)
        kept = replace(lowered, steps=[], arena_bytes=arena_bytes)
        return _Size(value, replace(graph, constants={}), layers, kept, ManifestFigures.of(steps, self._target))

    def _difference(self, sizes: Sequence[_Size], writer: ArtifactWriter) -> str:
        """Compare so many sizes with onnxruntime that each kernel has been compared; return how answers differ."""
        weights_path, compared = writer.flushed_weights(), set[str]()
        for size in (*sizes[:1], *sizes[:0:-1]):
            symbols = set(_kernels(size.layers))
            if symbols <= compared:
                continue
            compared |= symbols
            arena_bytes = size.lowered.arena_bytes
            made = CompiledCandidate(size.graph, size.layers, writer.kernels_path, weights_path, arena_bytes)
            if is_doubtful(size.layers) and self._target.name == detect().name:
                require_speed(self._path, self._sizes_of(size), made)
            found = difference_from_onnxruntime(self._path, self._sizes_of(size), made, tail=False)
            if found:
                return f"with {self._span.symbol}={size.value}, {found}"
        return ""


def _with_zeros(lowered: Lowered, stamp: int, lanes: int) -> tuple[list[PlacedLayer], int]:
    """Return the steps behind one that renews what must be zero in their arena, and the arena's size in bytes.

    The stamp lies before all others.
    """
    buffers = {
        id(buffer): buffer for step in lowered.steps for buffer in step.buffers if buffer.space == MemorySpace.ARENA
    }
    end_bytes = lowered.arena_bytes + ALIGNMENT_BYTES
    begin_bytes = end_bytes
    for buffer in buffers.values():
        buffer.offset_bytes += ALIGNMENT_BYTES
    for buffer in buffers.values():
        if keeps_zeros(buffer.root, lanes):
            begin_bytes = min(begin_bytes, buffer.root.offset_bytes)
    words = max(_LEAST_WORDS, (end_bytes - begin_bytes) // 4)
    kind = TensorType((1,), "int32")
    stamp_buffer = Buffer(kind, "plain", None)
    zeros = Buffer(kind, "plain", None, offset_bytes=begin_bytes)
    first = PlacedLayer("zeros", "Zeros", ZerosSpec(words, stamp), (stamp_buffer,), zeros)
    return [first, *lowered.steps], max(end_bytes, begin_bytes + 4 * words)


def _is_convolution(spec: KernelSpec) -> bool:
    """Whether it slides a window over an image: such kernels decide much by the image's size."""
    match spec:
        case ConvSpec():
            return spec.kernel not in ((1, 1), (spec.height, spec.width))
        case _:
            return isinstance(spec, ConvDepthwiseSpec | ConvTransposeSpec | VolumeConvSpec)


def _alike(sizes: Sequence[_Size]) -> list[_Size]:
    """Return those with the layers that most have, the largest first. Raises UnsupportedModelError if it is one."""
    groups: dict[object, list[_Size]] = {}
    for size in sizes:
        groups.setdefault(size.structure, []).append(size)
    most = max(groups.values(), key=len, default=[])
    if len(most) < 2:
        raise UnsupportedModelError("each size has other layers")
    base = _tensor_bytes(most[0].graph)
    return [size for size in most if all(a <= b for a, b in zip(_tensor_bytes(size.graph), base, strict=True))]


def _tensor_bytes(graph: Graph) -> list[int]:
    return [graph.types[name].size_bytes for name in (*graph.inputs, *graph.outputs)]


def _fixed_arguments(layer: Layer) -> tuple[BufferRef, ...]:
    """The arguments without the extents, which not every kernel of a layer reads."""
    return layer.arguments[:-1] if has_extents(layer.versions[0].symbol) else layer.arguments


def _structure(layer: Layer) -> object:
    (version,) = layer.versions
    arguments = tuple((argument.space, argument.index) for argument in _fixed_arguments(layer))
    rows = version.batch.rows if version.batch else 0
    return arguments, rows, layer.checks, layer.flushes_subnormals


def _kernels(layers: Iterable[Layer]) -> Iterator[str]:
    for layer in layers:
        version = layer.versions[0]
        yield version.symbol
        if version.batch:
            yield version.batch.symbol


def _instances(
    dimensions: Sequence[Mapping[str, int]], symbols: tuple[str, ...], sizes: Sequence[_Size]
) -> SizeInstances:
    """Return the instances, with the numbers that are not the same in all of them."""
    kernels = tuple(dict.fromkeys(symbol for size in sizes for symbol in _kernels(size.layers)))
    places_of = {symbol: place for place, symbol in enumerate(kernels)}
    most = [
        max(map(len, each))
        for each in zip(*([layer.arguments for layer in size.layers] for size in sizes), strict=True)
    ]
    numbers = [dict(_numbers(size, places_of, most)) for size in sizes]
    places = tuple(place for place in numbers[0] if len({each[place] for each in numbers}) > 1)
    each = tuple(
        SizeInstance(
            tuple(given[symbol] for symbol in symbols),
            _shapes(size.graph, size.graph.inputs),
            _shapes(size.graph, size.graph.outputs),
            tuple(found[place] for place in places),
        )
        for given, size, found in zip(dimensions, sizes, numbers, strict=True)
    )
    return SizeInstances(symbols, kernels, places, each)


def _shapes(graph: Graph, names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    shapes = (graph.types[name].shape for name in names)
    return tuple((-1, *shape[1:]) if graph.batched else shape for shape in shapes)


def _numbers(size: _Size, kernels: Mapping[str, int], most: Sequence[int]) -> Iterator[tuple[NumberPlace, int]]:
    for number, layer in enumerate(size.layers):
        (version,) = layer.versions
        yield NumberPlace(Varying.ARGUMENTS, number), len(layer.arguments)
        offsets = [argument.offset_bytes for argument in layer.arguments]
        for index, offset in enumerate(offsets + [0] * (most[number] - len(offsets))):
            yield NumberPlace(Varying.OFFSET, number, index), offset
        yield NumberPlace(Varying.KERNEL, number), kernels[version.symbol]
        yield NumberPlace(Varying.TASKS, number), version.tasks
        if version.batch:
            yield NumberPlace(Varying.BATCH_KERNEL, number), kernels[version.batch.symbol]
            yield NumberPlace(Varying.BATCH_TASKS, number), version.batch.tasks
        yield NumberPlace(Varying.MAX_RANKS, number), layer.max_ranks
        yield NumberPlace(Varying.ROW_NS, number), layer.row_ns
    sides = (Varying.INPUT_BYTES, size.graph.inputs), (Varying.OUTPUT_BYTES, size.graph.outputs)
    for kind, names in sides:
        for index, name in enumerate(names):
            yield NumberPlace(kind, 0, index), size.graph.types[name].size_bytes
