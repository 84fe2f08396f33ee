"""The compiler's door to the templates: which template computes a spec, with which knobs, and what its code and weights
are.

A kernel is `void symbol(arguments..., int32 begin, int32 end)`, arguments in the order of its spec, none overlapping.
It writes the interior of y only, surplus channels included, and relies on zeros in its inputs' halos. Surplus channels
hold any finite number.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from gangway.artifact.format import TargetSpec
from gangway.compiler import specs
from gangway.compiler.specs import BatchPlan, ConvSpec, KernelPlan, KernelSpec, PackedWeights, RawWeights
from gangway.compiler.templates import (
    attention,
    conv_depthwise,
    convolution,
    copying,
    dense_batch,
    depthwise,
    elementwise,
    gather,
    gather_places,
    global_pool,
    layer_norm,
    layout,
    matmul,
    pointwise,
    pooling,
    reduce,
    remap,
    scatter,
    sequence_layout,
    softmax,
    tensor_program,
    winograd,
    winograd_batch,
)
from gangway.compiler.templates.base import UnsupportedSpecError

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


_DENSE_BATCH = _BatchTemplate(dense_batch.plan, dense_batch.emit)
_WINOGRAD_BATCH = _BatchTemplate(winograd_batch.plan, winograd_batch.emit)
_DEPTHWISE = _Template(depthwise.candidates, depthwise.emit, depthwise.pack)
_WINOGRAD = _Template(winograd.candidates, winograd.emit, winograd.pack)
_LAYOUT = _Template(layout.candidates, layout.emit)
_TEMPLATES: dict[type[KernelSpec], _Template] = {
    specs.ConvSpec: _Template(convolution.candidates, convolution.emit, convolution.pack),
    specs.ConvDepthwiseSpec: _Template(conv_depthwise.candidates, conv_depthwise.emit, conv_depthwise.pack),
    specs.PoolSpec: _Template(pooling.candidates, pooling.emit),
    specs.GlobalPoolSpec: _Template(global_pool.candidates, global_pool.emit),
    specs.PackSpec: _LAYOUT,
    specs.UnpackSpec: _LAYOUT,
    specs.CopySpec: _Template(copying.candidates, copying.emit),
    specs.TensorProgramSpec: _Template(tensor_program.candidates, tensor_program.emit, tensor_program.pack),
    specs.ScatterSpec: _Template(scatter.candidates, scatter.emit),
    specs.SoftmaxSpec: _Template(softmax.candidates, softmax.emit),
    specs.ReduceSpec: _Template(reduce.candidates, reduce.emit),
    specs.RemapSpec: _Template(remap.candidates, remap.emit),
    specs.PointwiseSpec: _Template(pointwise.candidates, pointwise.emit),
    specs.BlockedElementwiseSpec: _Template(elementwise.candidates, elementwise.emit),
    specs.SequencePackSpec: _Template(sequence_layout.candidates, sequence_layout.emit),
    specs.LayerNormSpec: _Template(layer_norm.candidates, layer_norm.emit, layer_norm.pack),
    specs.AttentionSpec: _Template(attention.candidates, attention.emit),
    specs.MatMulSpec: _Template(matmul.candidates, matmul.emit),
    specs.GatherSpec: _Template(gather.candidates, gather.emit),
    specs.GatherPlacesSpec: _Template(gather_places.candidates, gather_places.emit),
}


def _template(spec: KernelSpec, target: TargetSpec) -> _Template:
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


def _batch_template(spec: KernelSpec, target: TargetSpec) -> _BatchTemplate | None:
    if not isinstance(spec, ConvSpec):
        return None
    return _WINOGRAD_BATCH if _template(spec, target) is _WINOGRAD else _DENSE_BATCH


def batch_plan(spec: KernelSpec, target: TargetSpec) -> BatchPlan | None:
    """The kernel for several rows in one call that all plans of a spec share; None where rows have nothing to share."""
    template = _batch_template(spec, target)
    return template.plan(spec, target) if template else None


def emit(plan: KernelPlan | BatchPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel of a plan as a `tirx.PrimFunc` named `symbol`, for `codegen.build_library`.

    That of a batch plan has one argument more, `batch`; see `artifact.format.BatchKernel`.
    """
    if isinstance(plan, BatchPlan):
        template = _batch_template(plan.spec, target)
        assert template is not None  # it has made the plan
        return template.emit(plan, target, symbol)
    return _template(plan.spec, target).emit(plan, target, symbol)
