"""Where pointwise layers and their constants lie: in plain memory, which has no halos."""

from dataclasses import replace

from gangway.artifact.format import Space
from gangway.compiler.activations import NONE
from gangway.compiler.buffers import Buffer
from gangway.compiler.expressions import Expression, Value
from gangway.compiler.graph import TensorType
from gangway.compiler.layers import Layer, Program, geometry_of
from gangway.compiler.memory import Memory
from gangway.compiler.placing import places
from gangway.compiler.remapping import Part
from gangway.compiler.specs import ElementwiseSpec, KernelSpec, PointwiseSpec, ReduceSpec, RemapSpec


@places(PointwiseSpec, RemapSpec, ReduceSpec)
def place_pointwise(memory: Memory, layer: Layer) -> None:
    """All operands plain."""
    assert isinstance(layer.spec, KernelSpec)
    memory.append(layer, layer.spec, tuple(plain_operand(memory, name) for name in layer.inputs), "plain")


@places(Part)
def _place_part(memory: Memory, layer: Layer) -> None:
    """Nothing is moved."""
    assert isinstance(layer.spec, Part)
    kind, whole = memory.program.type(layer.output), memory.plain(layer.inputs[0])
    memory.homes[layer.output] = Buffer(kind, "plain", geometry_of(kind), parent=whole, skipped=layer.spec.skipped)


def plain_operand(memory: Memory, name: str) -> Buffer:
    """Return a tensor in row-major order, which may be a constant of the program."""
    if name not in memory.program.constants:
        return memory.plain(name)
    value = memory.program.constants[name]
    return Buffer(TensorType(value.shape, value.dtype.name), "plain", None, Space.WEIGHTS, constant=value)


def as_pointwise(program: Program, layer: Layer) -> Layer:
    """Return the layer of an `ElementwiseSpec` as one over plain tensors; constants are repeated by strides."""
    spec = layer.spec
    assert isinstance(spec, ElementwiseSpec)
    expression = Expression(program.type(layer.output).shape)
    values: list[Value | None] = []
    for name in layer.inputs:
        value = program.constants.get(name)
        if value is not None and value.size == 1:
            values.append(None)
            continue
        kind = program.type(name) if value is None else TensorType(value.shape, value.dtype.name)
        values.append(expression.operand(name, kind))
    operands = [
        expression.constant(program.constants[name], spec.dtype) if value is None else value
        for name, value in zip(layer.inputs, values, strict=True)
    ]
    result = operands[0] if spec.operator == "copy" else expression.apply(spec.operator, *operands)
    if spec.activation != NONE:
        parameters = (spec.activation.alpha, spec.activation.beta)
        result = expression.apply(spec.activation.name, result, parameters=parameters)
    return replace(layer, spec=expression.spec(), inputs=tuple(expression.names))
