"""The compiler's door to the templates: which template computes a spec, with which knobs, and what its code and weights
are.

A kernel is `void symbol(arguments..., int32 begin, int32 end)`, arguments in the order of its spec, none overlapping.
It writes the interior of y only, surplus channels included, and relies on zeros in its inputs' halos. Surplus channels
hold any finite number.
"""

from collections.abc import Iterator
from typing import Any

from gangway.artifact.format import TargetSpec

from ..specs import (
    BlockedElementwiseSpec,
    ConvSpec,
    CopySpec,
    ElementwiseSpec,
    GlobalPoolSpec,
    KernelPlan,
    KernelSpec,
    PackedWeights,
    PackSpec,
    PoolSpec,
    RawWeights,
    SoftmaxSpec,
    UnpackSpec,
)
from . import convolution, copying, depthwise, elementwise, global_pool, layout, pooling, softmax
from .base import UnsupportedSpecError

__all__ = ["UnsupportedSpecError", "emit", "pack", "plan", "versions"]


def _candidates(spec: KernelSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    match spec:
        case ConvSpec():
            plans: Iterator[KernelPlan] = _convolution(spec).candidates(spec, target)
            return plans
        case PoolSpec():
            return pooling.candidates(spec, target)
        case GlobalPoolSpec():
            return global_pool.candidates(spec, target)
        case PackSpec() | UnpackSpec():
            return layout.candidates(spec, target)
        case CopySpec():
            return copying.candidates(spec, target)
        case SoftmaxSpec():
            return softmax.candidates(spec, target)
        case ElementwiseSpec():
            return elementwise.candidates(spec, target)
        case BlockedElementwiseSpec():
            return elementwise.blocked_candidates(spec, target)


def _convolution(spec: ConvSpec) -> Any:
    """The module that computes a convolution."""
    return depthwise if spec.groups == spec.in_channels > 1 else convolution


def plan(spec: KernelSpec, target: TargetSpec) -> KernelPlan:
    """The default plan, chosen by a static cost model. Raises `UnsupportedSpecError`."""
    return next(_candidates(spec, target))


def versions(spec: KernelSpec, target: TargetSpec) -> tuple[KernelPlan, ...]:
    """All plans worth measuring, the default first; they share weights and layouts. Raises `UnsupportedSpecError`."""
    return tuple(dict.fromkeys(_candidates(spec, target)))


def pack(plan: KernelPlan, target: TargetSpec, raw: RawWeights) -> PackedWeights:
    """The kernel's constant arguments (weights, bias), padded with zeros; empty for kernels without weights.

    `raw` holds "weights" [out][in/groups][kh][kw] and "bias" [out].
    """
    if isinstance(plan.spec, ConvSpec):
        packed: PackedWeights = _convolution(plan.spec).pack(plan.spec, target, raw)
        return packed
    return ()


def emit(plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel of a plan as a `tirx.PrimFunc` named `symbol`, for `codegen.build_library`."""
    match plan.spec:
        case ConvSpec():
            return _convolution(plan.spec).emit(plan, target, symbol)
        case PoolSpec():
            return pooling.emit(plan, target, symbol)
        case GlobalPoolSpec():
            return global_pool.emit(plan, target, symbol)
        case PackSpec() | UnpackSpec():
            return layout.emit(plan, target, symbol)
        case CopySpec():
            return copying.emit(plan, target, symbol)
        case SoftmaxSpec():
            return softmax.emit(plan, target, symbol)
        case ElementwiseSpec():
            return elementwise.emit(plan, target, symbol)
        case BlockedElementwiseSpec():
            return elementwise.emit_blocked(plan, target, symbol)
