"""Scales of float32 tensors that are rounded to what integers would leave of them, as data: so kernels are shared."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gangway.compiler.kernels.plain_specs import Instruction, PointwiseSpec
from gangway.compiler.kernels.specs import Activation, BlockedElementwiseSpec
from gangway.compiler.place.integers import Quantisation, quantisation
from gangway.compiler.place.memory import PlacedLayer


def with_limits(steps: Sequence[PlacedLayer]) -> list[PlacedLayer]:
    """Return the steps, of which those that only compute elementwise read scales and limits."""
    return [_with_limits(step) for step in steps]


def _with_limits(step: PlacedLayer) -> PlacedLayer:
    if isinstance(step.spec, PointwiseSpec) and step.spec.operands:
        found = [_of(item) for item in step.spec.program]
        program = tuple(
            item if known is None else replace(item, operator="quantise", parameters=())
            for item, known in zip(step.spec.program, found, strict=True)
        )
        return _reading(step, replace(step.spec, program=program), [known for known in found if known])
    if isinstance(step.spec, BlockedElementwiseSpec):
        activation = step.spec.activation
        known = quantisation(activation.name, (activation.alpha, activation.beta))
        return _reading(step, replace(step.spec, activation=Activation("quantise")), [known]) if known else step
    return step


def _of(item: Instruction) -> Quantisation | None:
    return quantisation(item.operator, item.parameters) if item.dtype == "float32" else None


def _reading(
    step: PlacedLayer, spec: PointwiseSpec | BlockedElementwiseSpec, found: Sequence[Quantisation]
) -> PlacedLayer:
    if not found:
        return step
    limits = np.array([[known.scale, *known.limits[:2]] for known in found], np.float32)
    return replace(step, spec=spec, weights={"limits": limits})
