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
    ConvDepthwiseSpec,
    ConvSpec,
    KernelPlan,
    KernelSpec,
    PackedWeights,
    RawWeights,
    RecurrentSpec,
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
class _Template:
    """Code for one kind of spec: all plans, the default first; the kernel of a plan; its constant arguments."""

    candidates: Callable[[Any, TargetSpec], Iterator[KernelPlan]]
    emit: Callable[[KernelPlan, TargetSpec, str], Any]
    pack: Pack = _no_weights


@dataclass(frozen=True)
class _BatchTemplate:
    """Code for several rows of one kind of spec: the plan, if there is one; its kernel."""

    plan: Callable[[Any, TargetSpec], BatchPlan | None]
    emit: Callable[[BatchPlan, TargetSpec, str], Any]


def _call(spec: KernelSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    yield make_plan(spec, {}, 1, "onnxruntime", 0, 1)


def _no_kernel(plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    raise UnsupportedSpecError("an island has no kernel")


_PACKED_BATCH = _BatchTemplate(packed_dense.batch_plan, packed_dense.batch_emit)
_DENSE_BATCH = _BatchTemplate(convolution.batch_plan, convolution.batch_emit)
_BF16_BATCH = _BatchTemplate(bf16_dense.batch_plan, bf16_dense.batch_emit)
_BF16_DEPTHWISE = _Template(bf16_depthwise.candidates, bf16_depthwise.emit, bf16_depthwise.pack)
_BF16_ATTENTION = _Template(bf16_attention.candidates, bf16_attention.emit)
_RECURRENT_BATCH = _BatchTemplate(recurrent.batch_plan, recurrent.batch_emit)
_WINOGRAD_BATCH = _BatchTemplate(winograd.batch_plan, winograd.batch_emit)
_DEPTHWISE = _Template(depthwise.candidates, depthwise.emit, depthwise.pack)
_BF16 = _Template(bf16_convolution.candidates, bf16_convolution.emit, bf16_convolution.pack)
_WINOGRAD = _Template(winograd.candidates, winograd.emit, winograd.pack)
_LAYOUT = _Template(layout.candidates, layout.emit)
_TEMPLATES: dict[type[KernelSpec], _Template] = {
    specs.ConvSpec: _Template(convolution.candidates, convolution.emit, convolution.pack),
    specs.ConvDepthwiseSpec: _Template(depthwise.pair_candidates, depthwise.pair_emit, depthwise.pair_pack),
    specs.ConvTransposeSpec: _Template(transposed.candidates, transposed.emit, transposed.pack),
    specs.VolumeConvSpec: _Template(volumes.candidates, volumes.emit, volumes.pack),
    specs.VolumePadSpec: _Template(volumes.pad_candidates, volumes.pad_emit),
    specs.VolumePoolSpec: _Template(pooling.volume_candidates, pooling.volume_emit),
    plain_specs.PlainPoolSpec: _Template(plain_pooling.candidates, plain_pooling.emit),
    specs.PoolSpec: _Template(pooling.candidates, pooling.emit),
    specs.GlobalPoolSpec: _Template(pooling.global_candidates, pooling.global_emit),
    specs.ResizeSpec: _Template(resize.candidates, resize.emit, resize.pack),
    specs.PackSpec: _LAYOUT,
    specs.UnpackSpec: _LAYOUT,
    plain_specs.CopySpec: _Template(movements.copy_candidates, movements.copy_emit),
    plain_specs.ZerosSpec: _Template(movements.zeros_candidates, movements.zeros_emit),
    plain_specs.TensorProgramSpec: _Template(tensor_program.candidates, tensor_program.emit, tensor_program.pack),
    plain_specs.ScatterSpec: _Template(movements.scatter_candidates, movements.scatter_emit),
    plain_specs.SoftmaxSpec: _Template(normalisation.softmax_candidates, normalisation.softmax_emit),
    plain_specs.ReduceSpec: _Template(reduce.candidates, reduce.emit),
    plain_specs.RemapSpec: _Template(movements.remap_candidates, movements.remap_emit),
    plain_specs.PointwiseSpec: _Template(
        elementwise.pointwise_candidates, elementwise.pointwise_emit, elementwise.pack
    ),
    specs.BlockedElementwiseSpec: _Template(elementwise.blocked_candidates, elementwise.blocked_emit, elementwise.pack),
    specs.SequencePackSpec: _Template(layout.sequence_candidates, layout.sequence_emit),
    specs.LayerNormSpec: _Template(
        normalisation.layer_norm_candidates, normalisation.layer_norm_emit, normalisation.layer_norm_pack
    ),
    AttentionSpec: _Template(attention.candidates, attention.emit),
    plain_specs.IslandSpec: _Template(_call, _no_kernel),
    plain_specs.TailSpec: _Template(_call, _no_kernel),
    specs.RecurrentSpec: _Template(recurrent.candidates, recurrent.emit, recurrent.pack),
    plain_specs.MatMulSpec: _Template(matmul.candidates, matmul.emit),
    plain_specs.GridSampleSpec: _Template(grid_sample.candidates, grid_sample.emit),
    plain_specs.TopSpec: _Template(top.candidates, top.emit),
    plain_specs.TreeSpec: _Template(trees.candidates, trees.emit, trees.pack),
    plain_specs.GatherSpec: _Template(movements.gather_candidates, movements.gather_emit),
    plain_specs.GatherPlacesSpec: _Template(movements.gather_places_candidates, movements.gather_places_emit),
    packed_specs.PackedDenseSpec: _Template(packed_dense.candidates, packed_dense.emit, packed_dense.pack),
    int8_specs.Int8ConvSpec: _Template(int8_work.candidates, int8_convolution.emit, int8_work.pack),
    int8_specs.Int8DepthwiseSpec: _Template(int8_depthwise.candidates, int8_depthwise.emit, int8_depthwise.pack),
    int8_specs.Int8PoolSpec: _Template(int8_images.pool_candidates, int8_images.pool_emit),
    int8_specs.Int8GlobalPoolSpec: _Template(
        int8_images.global_candidates, int8_images.global_emit, int8_images.factors_pack
    ),
    int8_specs.Int8ElementwiseSpec: _Template(
        int8_images.elementwise_candidates, int8_images.elementwise_emit, int8_images.factors_pack
    ),
    int8_specs.Int8PackSpec: _Template(int8_images.pack_candidates, int8_images.pack_emit, int8_images.factors_pack),
    int8_specs.Int8TableSpec: _Template(int8_images.table_candidates, int8_images.table_emit, int8_images.table_pack),
    int8_specs.Int8RangeSpec: _Template(int8_dynamic.range_candidates, int8_dynamic.range_emit),
    int8_specs.Int8FactorsSpec: _Template(int8_dynamic.factors_candidates, int8_dynamic.factors_emit),
    int8_specs.Int8QuantiseSpec: _Template(int8_dynamic.quantise_candidates, int8_dynamic.quantise_emit),
    int8_specs.Int8HaloSpec: _Template(int8_images.halo_candidates, int8_images.halo_emit, int8_images.halo_pack),
}


def _template(spec: KernelSpec, target: TargetSpec) -> _Template:
    if isinstance(spec, ConvSpec) and spec.precision == "bf16":
        return _BF16
    if isinstance(spec, ConvDepthwiseSpec) and spec.conv.precision == "bf16":
        return _BF16_DEPTHWISE
    if isinstance(spec, AttentionSpec) and spec.precision == "bf16":
        return _BF16_ATTENTION
    if isinstance(spec, ConvSpec) and spec.groups == spec.in_channels > 1:
        return _DEPTHWISE
    if isinstance(spec, ConvSpec) and winograd.best_work(spec, target):
        return _WINOGRAD
    if type(spec) not in _TEMPLATES:
        raise UnsupportedSpecError(f"no template for {type(spec).__name__}")
    return _TEMPLATES[type(spec)]


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
    if isinstance(spec, ConvSpec) and _template(spec, target) is _TEMPLATES[ConvSpec]:
        return convolution.packing(spec, target)
    return spec


def _batch_template(spec: KernelSpec, target: TargetSpec) -> _BatchTemplate | None:
    if isinstance(spec, RecurrentSpec):
        return _RECURRENT_BATCH
    if isinstance(spec, packed_specs.PackedDenseSpec):
        return _PACKED_BATCH
    if not isinstance(spec, ConvSpec):
        return None
    if spec.precision == "bf16":
        return _BF16_BATCH
    return _WINOGRAD_BATCH if _template(spec, target) is _WINOGRAD else _DENSE_BATCH


def batch_plan(spec: KernelSpec, target: TargetSpec) -> BatchPlan | None:
    """The kernel for several rows in one call that all plans of a spec share; None where rows have nothing to share."""
    template = _batch_template(spec, target)
    return template.plan(spec, target) if template else None


def emit(plan: KernelPlan | BatchPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel of a plan as a `tirx.PrimFunc` named `symbol`, for `codegen.build_library`.

    That of a batch plan has one argument more, `batch`; see `artifact.format.BatchKernel`.
    """
    return emit_as(plan.spec, plan, target, symbol)


def emit_as(spec: KernelSpec, plan: KernelPlan | BatchPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel of a plan whose numbers may be extents, by the template that computes `spec`, the plan's own spec."""
    if isinstance(plan, BatchPlan):
        template = _batch_template(spec, target)
        assert template is not None  # it has made the plan
        return template.emit(plan, target, symbol)
    return _template(spec, target).emit(plan, target, symbol)
