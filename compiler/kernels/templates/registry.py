"""The interface of the templates: which template computes a spec, with which knobs, and its code and weights.

A kernel is `void symbol(arguments..., int32 begin, int32 end)`, arguments in the order of its spec, none overlapping.
It writes the interior of y only, surplus channels included, and relies on zeros in its inputs' halos. Surplus channels
hold any finite number.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels import int8_specs, packed_specs, plain_specs, specs
from gangway.compiler.kernels.attention_specs import AttentionSpec
from gangway.compiler.kernels.specs import (
    BatchPlan,
    KernelPlan,
    KernelSpec,
    PackedWeights,
    RawWeights,
)
from gangway.compiler.kernels.templates import (
    attention,
    convolution,
    depthwise,
    elementwise,
    layout,
    matmul,
    movements,
    normalisation,
    plain_pooling,
    pooling,
    recurrent,
    reduce,
    resize,
    tensor_program,
    transposed,
    volumes,
    winograd,
)
from gangway.compiler.kernels.templates.bf16 import attention as bf16_attention
from gangway.compiler.kernels.templates.bf16 import convolution as bf16_convolution
from gangway.compiler.kernels.templates.bf16 import dense as bf16_dense
from gangway.compiler.kernels.templates.bf16 import depthwise as bf16_depthwise
from gangway.compiler.kernels.templates.branching import grid_sample, top, trees
from gangway.compiler.kernels.templates.int8 import convolution as int8_convolution
from gangway.compiler.kernels.templates.int8 import depthwise as int8_depthwise
from gangway.compiler.kernels.templates.int8 import dynamic as int8_dynamic
from gangway.compiler.kernels.templates.int8 import images as int8_images
from gangway.compiler.kernels.templates.int8 import work as int8_work
from gangway.compiler.kernels.templates.packed import dense as packed_dense
from gangway.compiler.kernels.templates.tiling import UnsupportedSpecError, make_plan

__all__ = ["UnsupportedSpecError", "batch_plan", "emit", "pack", "plan", "versions"]

Pack = Callable[[Any, TargetSpec, RawWeights], PackedWeights]


def _no_weights(spec: KernelSpec, target: TargetSpec, raw: RawWeights) -> PackedWeights:
    return ()


@dataclass(frozen=True)
class _Batch:
    """Code for several rows of one kind of spec: the plan, if there is one; its kernel."""

    plan: Callable[[Any, TargetSpec], BatchPlan | None]
    emit: Callable[[Any, BatchPlan, TargetSpec, str], Any]


@dataclass(frozen=True)
class _Template:
    """Code for one kind of spec: all plans, the default first; the kernel of a plan; its constant arguments."""

    candidates: Callable[[Any, TargetSpec], Iterator[KernelPlan]]
    emit: Callable[[Any, KernelPlan, TargetSpec, str], Any]
    pack: Pack = _no_weights
    batch: _Batch | None = None
    serves: Callable[[Any, TargetSpec], object] = lambda spec, target: True  # which specs of its kind


def _call(spec: KernelSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    yield make_plan(spec, {}, 1, "onnxruntime", 0, 1)


def _no_kernel(spec: KernelSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    raise UnsupportedSpecError("an island has no kernel")


def _has_bytes(spec: KernelSpec, target: TargetSpec) -> bool:
    return spec.has("bytes", "pixels")


_CALL = _Template(_call, _no_kernel)
_LAYOUT = _Template(layout.candidates, layout.emit)
_DENSE_BATCH = _Batch(convolution.batch_plan, convolution.batch_emit)
_DIRECT = _Template(convolution.candidates, convolution.emit, convolution.pack, _DENSE_BATCH)
_CONVOLUTIONS = (
    _Template(
        int8_depthwise.candidates,
        int8_depthwise.emit,
        int8_depthwise.pack,
        serves=lambda spec, target: spec.precision == "int8" and spec.is_depthwise,
    ),
    _Template(
        int8_work.candidates,
        int8_convolution.emit,
        int8_work.pack,
        serves=lambda spec, target: spec.precision == "int8",
    ),
    _Template(
        bf16_convolution.candidates,
        bf16_convolution.emit,
        bf16_convolution.pack,
        _Batch(bf16_dense.batch_plan, bf16_dense.batch_emit),
        lambda spec, target: spec.precision == "bf16",
    ),
    _Template(
        depthwise.candidates,
        depthwise.emit,
        depthwise.pack,
        _DENSE_BATCH,
        lambda spec, target: spec.groups == spec.in_channels > 1,
    ),
    _Template(
        winograd.candidates,
        winograd.emit,
        winograd.pack,
        _Batch(winograd.batch_plan, winograd.batch_emit),
        winograd.best_work,
    ),
    _DIRECT,
)
_TEMPLATES: dict[type[KernelSpec], tuple[_Template, ...]] = {
    specs.ConvSpec: _CONVOLUTIONS,
    specs.ConvDepthwiseSpec: (
        _Template(
            bf16_depthwise.candidates,
            bf16_depthwise.emit,
            bf16_depthwise.pack,
            serves=lambda spec, target: spec.conv.precision == "bf16",
        ),
        _Template(depthwise.pair_candidates, depthwise.pair_emit, depthwise.pair_pack),
    ),
    AttentionSpec: (
        _Template(bf16_attention.candidates, bf16_attention.emit, serves=lambda spec, target: spec.precision == "bf16"),
        _Template(attention.candidates, attention.emit),
    ),
    specs.ConvTransposeSpec: (_Template(transposed.candidates, transposed.emit, transposed.pack),),
    specs.VolumeConvSpec: (_Template(volumes.candidates, volumes.emit, volumes.pack),),
    specs.VolumePadSpec: (_Template(volumes.pad_candidates, volumes.pad_emit),),
    specs.VolumePoolSpec: (_Template(pooling.volume_candidates, pooling.volume_emit),),
    plain_specs.PlainPoolSpec: (_Template(plain_pooling.candidates, plain_pooling.emit),),
    specs.PoolSpec: (
        _Template(int8_images.pool_candidates, int8_images.pool_emit, serves=_has_bytes),
        _Template(pooling.candidates, pooling.emit),
    ),
    specs.GlobalPoolSpec: (
        _Template(int8_images.global_candidates, int8_images.global_emit, int8_images.factors_pack, serves=_has_bytes),
        _Template(pooling.global_candidates, pooling.global_emit),
    ),
    specs.ResizeSpec: (_Template(resize.candidates, resize.emit, resize.pack),),
    specs.PackSpec: (
        _Template(int8_images.pack_candidates, int8_images.pack_emit, int8_images.factors_pack, serves=_has_bytes),
        _LAYOUT,
    ),
    specs.UnpackSpec: (_LAYOUT,),
    plain_specs.CopySpec: (_Template(movements.copy_candidates, movements.copy_emit),),
    plain_specs.ZerosSpec: (_Template(movements.zeros_candidates, movements.zeros_emit),),
    plain_specs.TensorProgramSpec: (_Template(tensor_program.candidates, tensor_program.emit, tensor_program.pack),),
    plain_specs.ScatterSpec: (_Template(movements.scatter_candidates, movements.scatter_emit),),
    plain_specs.SoftmaxSpec: (_Template(normalisation.softmax_candidates, normalisation.softmax_emit),),
    plain_specs.ReduceSpec: (_Template(reduce.candidates, reduce.emit),),
    plain_specs.RemapSpec: (_Template(movements.remap_candidates, movements.remap_emit),),
    plain_specs.PointwiseSpec: (
        _Template(elementwise.pointwise_candidates, elementwise.pointwise_emit, elementwise.pack),
    ),
    specs.BlockedElementwiseSpec: (
        _Template(
            int8_images.elementwise_candidates,
            int8_images.elementwise_emit,
            int8_images.factors_pack,
            serves=_has_bytes,
        ),
        _Template(elementwise.blocked_candidates, elementwise.blocked_emit, elementwise.pack),
    ),
    specs.SequencePackSpec: (_Template(layout.sequence_candidates, layout.sequence_emit),),
    specs.LayerNormSpec: (
        _Template(normalisation.layer_norm_candidates, normalisation.layer_norm_emit, normalisation.layer_norm_pack),
    ),
    plain_specs.IslandSpec: (_CALL,),
    plain_specs.TailSpec: (_CALL,),
    specs.RecurrentSpec: (
        _Template(
            recurrent.candidates, recurrent.emit, recurrent.pack, _Batch(recurrent.batch_plan, recurrent.batch_emit)
        ),
    ),
    plain_specs.MatMulSpec: (_Template(matmul.candidates, matmul.emit),),
    plain_specs.GridSampleSpec: (_Template(grid_sample.candidates, grid_sample.emit),),
    plain_specs.TopSpec: (_Template(top.candidates, top.emit),),
    plain_specs.TreeSpec: (_Template(trees.candidates, trees.emit, trees.pack),),
    plain_specs.GatherSpec: (_Template(movements.gather_candidates, movements.gather_emit),),
    plain_specs.GatherPlacesSpec: (_Template(movements.gather_places_candidates, movements.gather_places_emit),),
    packed_specs.PackedDenseSpec: (
        _Template(
            packed_dense.candidates,
            packed_dense.emit,
            packed_dense.pack,
            _Batch(packed_dense.batch_plan, packed_dense.batch_emit),
        ),
    ),
    int8_specs.Int8TableSpec: (
        _Template(int8_images.table_candidates, int8_images.table_emit, int8_images.table_pack),
    ),
    int8_specs.Int8RangeSpec: (_Template(int8_dynamic.range_candidates, int8_dynamic.range_emit),),
    int8_specs.Int8FactorsSpec: (_Template(int8_dynamic.factors_candidates, int8_dynamic.factors_emit),),
    int8_specs.Int8QuantiseSpec: (_Template(int8_dynamic.quantise_candidates, int8_dynamic.quantise_emit),),
    int8_specs.Int8HaloSpec: (_Template(int8_images.halo_candidates, int8_images.halo_emit, int8_images.halo_pack),),
}


def _template(spec: KernelSpec, target: TargetSpec) -> _Template:
    """The first template of the spec's kind that serves it."""
    found = next((one for one in _TEMPLATES.get(type(spec), ()) if one.serves(spec, target)), None)
    if found is None:
        raise UnsupportedSpecError(f"no template for {type(spec).__name__}")
    return found


def plan(spec: KernelSpec, target: TargetSpec) -> KernelPlan:
    """The default plan, chosen by a static cost model. Raises `UnsupportedSpecError`."""
    return next(_template(spec, target).candidates(spec, target))


def versions(spec: KernelSpec, target: TargetSpec, most: int | None = None) -> tuple[KernelPlan, ...]:
    """All plans worth measuring, or the first `most` of them, the default first; they share weights and layouts.

    Raises `UnsupportedSpecError`.
    """
    return tuple(dict.fromkeys(islice(_template(spec, target).candidates(spec, target), most)))


def pack(plan: KernelPlan, target: TargetSpec, raw: RawWeights) -> PackedWeights:
    """The kernel's constant arguments, padded with zeros; empty for kernels without weights.

    `raw` holds what the spec names: of a convolution "weights" [out][in/groups][kh][kw] and "bias" [out].
    """
    return _template(plan.spec, target).pack(plan.spec, target, raw)


def packing(spec: KernelSpec, target: TargetSpec) -> object:
    """What decides how raw weights are packed: of equal ones, and equal raw weights, the result is the same."""
    return convolution.packing(spec, target) if _template(spec, target) is _DIRECT else spec  # type: ignore[arg-type]


def batch_plan(spec: KernelSpec, target: TargetSpec) -> BatchPlan | None:
    """The kernel for several rows in one call that all plans of a spec share; None where rows have nothing to share."""
    batch = _template(spec, target).batch
    return batch.plan(spec, target) if batch else None


def emit(plan: KernelPlan | BatchPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel of a plan as a `tirx.PrimFunc` named `symbol`, for `codegen.build_library`.

    That of a batch plan has one argument more, `batch`; see `artifact.format.BatchKernel`.
    """
    return emit_as(plan.spec, plan, target, symbol)


def emit_as(spec: KernelSpec, plan: KernelPlan | BatchPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel of a plan whose numbers may be extents, by the template that computes `spec`, the plan's own spec."""
    template = _template(spec, target)
    if isinstance(plan, BatchPlan):
        assert template.batch is not None  # it has made the plan
        return template.batch.emit(plan.spec, plan, target, symbol)
    return template.emit(plan.spec, plan, target, symbol)
