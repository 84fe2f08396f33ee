"""Layers for a node that no template computes: by Relax, checked against onnxruntime before they are believed."""

import math

import numpy as np

from gangway.artifact.format import MAX_ARGUMENTS
from gangway.compiler.errors import UnsupportedModelError
from gangway.compiler.graph import Node
from gangway.compiler.layers import Layer, Program
from gangway.compiler.relax.check import check
from gangway.compiler.relax.legalise import Call, legalise
from gangway.compiler.relax.schedule import schedule
from gangway.compiler.specs import Array, Role, TensorProgramSpec

MOST_ELEMENTS = 1 << 22
ELEMENT_TYPES = {"float32", "bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))}


def lower_by_relax(program: Program, node: Node) -> None:
    """Add the layers of one node. Raises UnsupportedModelError that says what Relax cannot or does wrongly."""
    if node.operator == "GridSample":
        raise node.one_engine("onnxruntime has its own answers to coordinates that are no numbers, or beyond integers")
    constants = {name: program.graph.constants[name] for name in node.inputs if name in program.graph.constants}
    inputs = {name: program.type(name) for name in node.inputs if name and name not in constants}
    outputs = {name: program.type(name) for name in node.outputs if name}
    if foreign := {kind.dtype for kind in (*inputs.values(), *outputs.values())} - ELEMENT_TYPES:
        raise UnsupportedModelError(f"Relax: element type {', '.join(sorted(foreign))}")
    if any(math.prod(kind.shape) > MOST_ELEMENTS for kind in (*inputs.values(), *outputs.values())):
        raise UnsupportedModelError(f"Relax: not for tensors of more than {MOST_ELEMENTS} numbers, which nobody checks")
    try:
        line = legalise(node, inputs, outputs, constants, program.graph.opset)
        layers = [_layer(node, index, call) for index, call in enumerate(line.calls)]
        check(node, layers, line, {**inputs, **outputs, **line.between}, constants, program.graph.opset)
    except UnsupportedModelError:
        raise
    except Exception as error:  # the importer asserts, and TVM raises whatever its passes check
        raise UnsupportedModelError(f"Relax: {_last_line(error)}") from error
    program.add_types(line.between)
    program.layers += layers
    program.views |= line.same


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:200]


def _layer(node: Node, index: int, call: Call) -> Layer:
    inputs = tuple(item for item in call.operands if isinstance(item, str))
    weights = [item for item in call.operands if not isinstance(item, str)]
    scheduled = schedule(call.function)
    roles: list[Role] = ["input" if isinstance(item, str) else "weight" for item in call.operands]
    roles += ["output"] * len(call.outputs)
    roles += ["scratch"] * len(scheduled.scratch)
    if not inputs:
        raise UnsupportedModelError("Relax: a function of constants only")
    if len(roles) > MAX_ARGUMENTS:
        raise UnsupportedModelError(f"Relax: a function of {len(roles)} tensors; {MAX_ARGUMENTS} are possible")
    spec = TensorProgramSpec(scheduled.function, tuple(roles), scheduled.scratch, scheduled.tasks, scheduled.operations)
    raw: dict[str, Array] = {str(place): np.ascontiguousarray(item) for place, item in enumerate(weights)}
    name = node.name if not index else f"{node.name}:{index}"
    return Layer(name, node.operator, spec, inputs, call.outputs[0], raw, more_outputs=call.outputs[1:])
