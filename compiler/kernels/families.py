"""Which kernels are one kernel: plans that differ only in numbers that it can read at run time."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gangway.compiler.kernels import plain_specs, specs
from gangway.compiler.kernels.attention_specs import PLAIN_AXES, AttentionSpec, HeadStrides
from gangway.compiler.kernels.specs import BatchPlan, ConvSpec, KernelPlan, KernelSpec

_IMAGE = ("height", "width")
_STRIDES = ("a_batch_strides", "b_batch_strides", "a_strides", "b_strides")
# Fields of specs. Not here are templates that are slower with numbers read at run time (the fused depthwise pair).
_VARYING: Mapping[type[KernelSpec], tuple[str, ...]] = {
    specs.ConvSpec: _IMAGE,
    specs.PoolSpec: _IMAGE,
    specs.GlobalPoolSpec: ("channels", *_IMAGE),
    specs.PackSpec: ("channels", *_IMAGE),
    specs.UnpackSpec: ("channels", *_IMAGE),
    specs.BlockedElementwiseSpec: ("channels", *_IMAGE),
    specs.SequencePackSpec: ("positions", "channels", "position_stride"),
    specs.LayerNormSpec: ("positions",),
    AttentionSpec: ("queries", "keys", "windows"),
    plain_specs.CopySpec: ("shape", "input_strides", "output_strides"),
    plain_specs.PointwiseSpec: ("shape", "operands"),
    plain_specs.MatMulSpec: ("batch_shape", "rows", "inner", "columns", *_STRIDES),
    plain_specs.SoftmaxSpec: ("rows", "columns", "inner"),
    plain_specs.ReduceSpec: ("shape",),
    plain_specs.ZerosSpec: ("words", "stamp"),
    plain_specs.GatherSpec: ("outer", "inner", "count"),
    specs.RecurrentSpec: ("steps", "positions"),
}
# Kinds whose kernels for several rows read the same numbers; those of others are constants, so both kernels are.
VARYING_IN_ROWS = (specs.RecurrentSpec,)
_CONSTANT_KNOBS = {"tile_pixels"}
# Numbers up to these stay constants: short loops are unrolled, and neither grow nor shrink with a request.
_MOST_CONSTANT = {plain_specs.CopySpec: 16, plain_specs.MatMulSpec: 16}
_DIGITS = 32  # of a key: as good as unique

Change = Callable[[int], Any]
AnyPlan = KernelPlan | BatchPlan


@dataclass(frozen=True)
class Family:
    """A plan as one of many: `key` is that of its whole family, `parameters` are the numbers that tell it apart."""

    key: str
    parameters: tuple[int, ...]


def family_of(plan: AnyPlan, context: str, varying: bool) -> Family:
    """Return the family of a plan. `context` is what else decides the code: the target and the compiler.

    Unless `varying`, and for kinds whose numbers are all constants, a family has a single member without parameters.
    So it is with products of low precision, whose tiles have numbers that are constants.
    """
    parameters: list[int] = []
    low = isinstance(plan.spec, ConvSpec | AttentionSpec) and plan.spec.precision != "fp32"
    low = low or plan.spec.has("bytes", "pixels")
    if varying and type(plan.spec) in (_VARYING if isinstance(plan, KernelPlan) else VARYING_IN_ROWS) and not low:
        plan = _changed(plan, lambda number: parameters.append(number) or "?")  # type: ignore[func-returns-value]
    text = f"{context} {plan!r}"
    return Family(hashlib.sha256(text.encode()).hexdigest()[:_DIGITS], tuple(parameters))


def with_extents(plan: AnyPlan, extents: Sequence[Any]) -> AnyPlan:
    """Return the plan with extents in the places of its parameters, for a template's `emit` only."""
    numbers: Iterator[Any] = iter(extents)
    return _changed(plan, lambda _: next(numbers))


def _changed(plan: AnyPlan, change: Change) -> AnyPlan:
    """Return the plan with its varying numbers changed, and without what its code does not depend on.

    Kernels for one row and for several ones read the same numbers: those of the spec.
    """
    kind = type(plan.spec)
    if isinstance(plan, BatchPlan):
        return replace(plan, spec=_changed_spec(plan.spec, change), description="")
    knobs = plan.knobs
    if kind not in VARYING_IN_ROWS:
        knobs = tuple(
            (name, change(value) if isinstance(value, int) and name not in _CONSTANT_KNOBS else value)
            for name, value in knobs
        )
    return replace(
        plan, spec=_changed_spec(plan.spec, change), knobs=knobs, tasks=0, description="", blocking_bytes=0,
        parallelism=0,
    )  # fmt: skip


def _changed_spec(spec: KernelSpec, change: Change) -> KernelSpec:
    kind = type(spec)
    fields = {name: _varied(getattr(spec, name), _MOST_CONSTANT.get(kind, 1), change) for name in _VARYING[kind]}
    if isinstance(spec, AttentionSpec):
        fields["strides"] = tuple(_varied_strides(item, change) for item in spec.strides)
    return replace(spec, **fields)


def _varied_strides(strides: HeadStrides, change: Change) -> HeadStrides:
    """Those of windows and heads grow with a request; those within a head are in the innermost loops."""
    if len(strides) < PLAIN_AXES:
        return strides
    return (*_varied(strides[:2], 1, change), *strides[2:])


def _varied(value: Any, most_constant: int, change: Change) -> Any:
    match value:
        case int():
            return change(value) if value > most_constant else value
        case tuple():
            return tuple(_varied(item, most_constant, change) for item in value)
        case plain_specs.Operand():
            return replace(value, strides=_varied(value.strides, most_constant, change))
    return value
