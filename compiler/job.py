"""One compilation, phase by phase, from the ONNX file to the committed artifact."""

import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from onnx.external_data_helper import set_external_data

from gangway.artifact.format import (
    ISLAND_SUFFIX,
    LEAST_MAPPED_BYTES,
    MAX_LAYERS,
    MAX_TENSORS,
    WEIGHTS_FILE,
    BufferRef,
    Layer,
    Manifest,
    MemorySpace,
    Precision,
    TargetSpec,
    Version,
)
from gangway.artifact.writer import ArtifactWriter, temporary_prefix
from gangway.base.host_limits import allocated_by
from gangway.compiler.arguments import CompileOptions, ModelSource
from gangway.compiler.comparison.candidate import CompiledCandidate
from gangway.compiler.comparison.difference import difference_from_onnxruntime
from gangway.compiler.comparison.speed import is_doubtful, require_speed
from gangway.compiler.errors import UnreadableModelError, UnsupportedModelError
from gangway.compiler.frontend.graph import Graph
from gangway.compiler.frontend.importer import read_graph
from gangway.compiler.kernels.codegen import (
    Plan,
    WrittenWeights,
    append_array,
    choose_plans,
    make_version,
    with_batch_plans,
    write_weights,
)
from gangway.compiler.kernels.objects import CompiledKernel, KernelObjects
from gangway.compiler.kernels.plain_specs import IslandSpec, TailSpec
from gangway.compiler.kernels.specs import KernelPlan, KernelSpec
from gangway.compiler.key import SIZED, compiler_version, model_key
from gangway.compiler.lower.lowering import lower_model
from gangway.compiler.lower.signature import signature_of
from gangway.compiler.place.arena import plan_arena
from gangway.compiler.place.costs import (
    Passes,
    activation_bytes,
    choose_passes,
    max_ranks,
    row_ns,
    shape_text,
    weight_bytes,
)
from gangway.compiler.place.fusion import fuse
from gangway.compiler.place.int8 import integers_of
from gangway.compiler.place.layout import place
from gangway.compiler.place.memory import PlacedLayer
from gangway.compiler.place.precision import with_precision
from gangway.compiler.place.written import require_whole_outputs
from gangway.compiler.progress import COMPARISON_PHASE, Phases
from gangway.compiler.target import detect


@dataclass(frozen=True)
class Lowered:
    """The placed steps of a model, the size of its arena (of one row), and nodes that became islands for speed."""

    steps: list[PlacedLayer]
    arena_bytes: int
    slow_nodes: tuple[str, ...]


@dataclass(frozen=True)
class ManifestFigures:
    """What a manifest says of all steps together."""

    passes: Passes
    parameters: int
    integers: str

    @classmethod
    def of(cls, steps: Sequence[PlacedLayer], target: TargetSpec) -> "ManifestFigures":
        """Return the figures of a model."""
        arrays = {id(array): array for step in steps for array in step.weights.values()}
        parameters = sum(array.size for array in arrays.values())
        return cls(choose_passes(steps), parameters, integers_of(steps, target))


class CompileJob:
    """Everything that the phases of one compilation share."""

    def __init__(self, source: ModelSource, options: CompileOptions, phases: Phases) -> None:
        self._path, self._model_name = source.path, source.model_name
        self._key, self._target = source.key, source.target
        self._precision: Precision = options.precision
        self._keep_fp32 = tuple(sorted(options.keep_fp32))
        self._dimensions = options.dimensions
        self._phases = phases

    def run(self, folder: Path) -> Manifest:
        """Compile into `folder`, which appears at the very end. Raises ModelError, OSError."""
        with self._phases.timed("read"):
            graph = read_graph(self._path, self._dimensions)
            self._require_unchanged()
        with self._phases.timed("graph"):
            lowered = lower_graph(graph, self._target.lanes, target=self._target)
            if self._precision != "fp32":
                lowered = self._with_precision(lowered)
            steps = lowered.steps
            graph = replace(graph, constants={})  # as the file has them: the steps' weights are other arrays by now
            plans = choose_plans(steps, self._target)
            distinct = with_batch_plans(plans, self._target, graph.batched)
        with ArtifactWriter(folder, self._share_key()) as writer:
            with self._phases.timed("kernels"):
                names = {step.spec: f"layer '{step.name}' ({step.operator})" for step in reversed(steps)}
                kernels = self._build(distinct, names, folder.parent, writer.kernels_path)
            with self._phases.timed("weights"):
                layers, session_bytes = write_layers(steps, plans, kernels, self._target, writer)
            difference = ""
            with self._phases.timed(COMPARISON_PHASE):
                weights_path = writer.flushed_weights()
                compiled = CompiledCandidate(graph, layers, writer.kernels_path, weights_path, lowered.arena_bytes)
                # onnxruntime uses all that this machine has: a lesser target is not compared with it.
                if is_doubtful(layers) and self._target.name == detect().name:
                    require_speed(self._path, self._dimensions, compiled)
                if self._precision == "fp32":
                    is_tail = isinstance(steps[-1].spec, TailSpec)
                    difference = difference_from_onnxruntime(self._path, self._dimensions, compiled, is_tail)
                self._require_unchanged()
            with self._phases.timed("write"):
                tail = last if isinstance(last := steps[-1].spec, TailSpec) else None
                manifest = self._manifest(graph, layers, lowered, ManifestFigures.of(steps, self._target), tail)
                return writer.commit(replace(manifest, session_bytes=session_bytes, difference=difference))

    def _with_precision(self, lowered: Lowered) -> Lowered:
        steps = with_precision(lowered.steps, self._precision, self._target, self._keep_fp32)
        return replace(lowered, steps=steps, arena_bytes=plan_arena(steps, self._target.lanes))

    def _require_unchanged(self) -> None:
        """Raise UnreadableModelError if the file, which has been read, is not what the key stands for."""
        if self._model_key(self._marked_dimensions) != self._key:
            raise UnreadableModelError(f"{self._path.name} changed while it was read")

    @property
    def _marked_dimensions(self) -> Mapping[str, int]:
        """The sizes of all dimensions as the artifact's key has them."""
        return self._dimensions

    def _share_key(self) -> str:
        """What artifacts for different sizes of one model have in common; empty if there are no sizes."""
        return self._model_key(SIZED) if self._dimensions else ""

    def _model_key(self, dimensions: Mapping[str, int]) -> str:
        return model_key(self._path, self._target, dimensions, precision=self._precision, keep_fp32=self._keep_fp32)

    def _build(
        self, plans: Sequence[Plan], names: Mapping[KernelSpec, str], root: Path, library: Path
    ) -> dict[Plan, CompiledKernel]:
        """Write the library with the kernels of the plans."""
        with tempfile.TemporaryDirectory(prefix=temporary_prefix(Path(self._key)), dir=root) as scratch:
            objects = KernelObjects(root, Path(scratch), self._target, self._share_key())
            kernels = objects.build(plans, names, lambda *count: self._phases.report("kernels", *count))
            objects.link(library)
        return kernels

    def _manifest(
        self,
        graph: Graph,
        layers: tuple[Layer, ...],
        lowered: Lowered,
        figures: ManifestFigures,
        tail: TailSpec | None = None,
    ) -> Manifest:
        inputs, outputs = signature_of(graph, self._path, tail)
        return Manifest(
            key=self._key,
            model_name=self._model_name,
            batched=graph.batched,
            inputs=inputs,
            outputs=outputs,
            layers=layers,
            arena_bytes=lowered.arena_bytes,
            target=self._target,
            files={},  # the writer knows them
            phase_us=self._phases.times_us,
            pass_layers=figures.passes.layers,
            pass_rows=figures.passes.rows,
            parameters=figures.parameters,
            tail=tail is not None,
            slow_nodes=lowered.slow_nodes,
            compiler_version=compiler_version(),
            precision=self._precision,
            integers=figures.integers,
            keep_fp32=self._keep_fp32 if self._precision != "fp32" else (),
        )


def lower_graph(
    graph: Graph, lanes: int, slow_nodes: Collection[str] | None = None, target: TargetSpec | None = None
) -> Lowered:
    """Return the steps of a model; `slow_nodes` as an earlier call found them, None: by measurement.

    `target`: its instructions for 8-bit numbers are used.

    Raises ModelError.
    """
    for side, names in (("inputs", graph.inputs), ("outputs", graph.outputs)):
        if not 1 <= len(names) <= MAX_TENSORS:
            raise UnsupportedModelError(f"the model has {len(names)} {side}; 1 to {MAX_TENSORS} are possible")
    program = lower_model(graph, slow_nodes)
    steps = place(program, fuse(program), lanes, target)
    if not steps:
        raise UnsupportedModelError("there is nothing to compute")
    if len(steps) > MAX_LAYERS:
        raise UnsupportedModelError(f"the model has {len(steps)} layers; {MAX_LAYERS} are possible")
    arena_bytes = plan_arena(steps, lanes)
    require_whole_outputs(steps, [program.type(name) for name in program.graph.outputs])
    return Lowered(steps, arena_bytes, tuple(sorted(program.slow)))


def steps_of(path: Path, dimensions: Mapping[str, int], manifest: Manifest) -> list[PlacedLayer]:
    """Return the steps that an artifact was made of. Raises ModelError."""
    target = manifest.target
    steps = lower_graph(read_graph(path, dimensions), target.lanes, manifest.slow_nodes, target).steps
    return with_precision(steps, manifest.precision, manifest.target, manifest.keep_fp32)


def write_layers(
    steps: Sequence[PlacedLayer],
    plans: Sequence[KernelPlan],
    kernels: Mapping[Plan, CompiledKernel],
    target: TargetSpec,
    writer: ArtifactWriter,
    written: WrittenWeights | None = None,
) -> tuple[tuple[Layer, ...], int]:
    """Append weights and islands; return the layers, and the bytes that sessions of islands need.

    `written`: what the file has of other sizes.

    Raises UnsupportedModelError.
    """
    symbols = {plan: kernel.symbol for plan, kernel in kernels.items()}
    offsets = write_weights(steps, plans, target, writer, written)
    extents = [_write_extents(kernels[plan].extents if plan in kernels else (), writer) for plan in plans]
    islands, session_bytes = _write_islands(steps, writer)
    versions = [make_version(plan, symbols, target) for plan in plans]
    layers = tuple(
        _layer(step, plan, version, places, islands.get(step.spec, ""))
        for step, plan, version, *places in zip(steps, plans, versions, offsets, extents, strict=True)
    )
    return layers, session_bytes


def _write_islands(steps: Sequence[PlacedLayer], writer: ArtifactWriter) -> tuple[dict[KernelSpec, str], int]:
    """Write the ONNX files of islands, equal ones once; return their names, and what sessions of all need of memory.

    Raises UnsupportedModelError where onnxruntime does not open them as they are now.
    """
    paths: dict[KernelSpec, Path] = {}
    for step in steps:
        if isinstance(step.spec, IslandSpec) and step.spec not in paths:
            name = f"island{len(paths)}{ISLAND_SUFFIX}"
            paths[step.spec] = writer.add_island(name, _with_mapped_weights(step.spec.model, writer))
    if not paths:
        return {}, 0
    from gangway.artifact.onnx_session import open_session, reason_of  # noqa: PLC0415 - most models have no island

    writer.flushed_weights()
    try:
        _, session_bytes = allocated_by(lambda: [open_session(path) for path in paths.values()])
    except Exception as error:  # onnxruntime's own exceptions have no common base
        raise UnsupportedModelError(f"onnxruntime does not open a layer: {reason_of(error)}") from error
    return {spec: path.name for spec, path in paths.items()}, session_bytes


def _with_mapped_weights(content: bytes, writer: ArtifactWriter) -> bytes:
    """Return the ONNX file of an island whose large weights are in weights.bin, where all sessions map them."""
    model = onnx.ModelProto.FromString(content)
    for tensor in model.graph.initializer:
        size_bytes = len(tensor.raw_data)
        if size_bytes >= LEAST_MAPPED_BYTES:
            offset_bytes = append_array(np.frombuffer(tensor.raw_data, np.uint8), writer)
            set_external_data(tensor, WEIGHTS_FILE, offset=offset_bytes, length=size_bytes)
            tensor.ClearField("raw_data")
    return model.SerializeToString()


def _write_extents(extents: Sequence[int], writer: ArtifactWriter) -> tuple[int, ...]:
    """Append what a kernel reads at run time to weights.bin; return the offset, if there is anything."""
    return (append_array(np.array(extents, np.int32), writer),) if extents else ()


def _layer(
    step: PlacedLayer, plan: KernelPlan, version: Version, offsets: Sequence[tuple[int, ...]], onnx_file: str
) -> Layer:
    """Return the layer; `offsets`: of its weights, and of the numbers that its kernel reads at run time."""
    placed = step.inputs if isinstance(step.spec, TailSpec) else step.buffers
    buffers = [BufferRef(buffer.space, buffer.offset_bytes, buffer.index) for buffer in placed]
    constants, sizes = ([BufferRef(MemorySpace.WEIGHTS, offset_bytes) for offset_bytes in some] for some in offsets)
    return Layer(
        name=step.name,
        operator=step.operator,
        shape=shape_text(step),
        arguments=(buffers[0], *constants, *buffers[1:], *sizes),
        versions=(version,),
        flops=step.spec.flops,
        bytes=activation_bytes(step) + weight_bytes(step),
        max_ranks=max_ranks(step, plan.tasks),
        row_ns=row_ns(step),
        checks=step.checks,
        flushes_subnormals=step.spec.flushes_subnormals and not step.spec.has("bytes", "pixels"),
        onnx_file=onnx_file,
    )
