"""Products whose operand is rounded to integers at run time: see `frontend/dynamic_quantisation.py`.

The layers are those of float32 numbers. Their weights come with the integers that they were, for `place/int8.py`.
Other products have integers only, as `frontend/packed` finds them.
"""

import math
from dataclasses import replace

import numpy as np

from gangway.compiler.frontend.graph import Node, TensorType
from gangway.compiler.frontend.packed import PACKED_MATMUL
from gangway.compiler.kernels.packed_specs import PackedDenseSpec
from gangway.compiler.kernels.plain_specs import ReduceSpec, Reduction
from gangway.compiler.lower.layers import Expression, LoweredLayer, Program, Value, lowers
from gangway.compiler.lower.operators.dense import dense
from gangway.compiler.lower.operators.elementwise import lower_pointwise
from gangway.compiler.lower.operators.images import conv

DYNAMIC = "DynamicFakeQuantise"
STEPS = 255.0  # between the ends of uint8


@lowers(DYNAMIC)
def dynamic_fake_quantise(program: Program, node: Node) -> None:
    """What is left of numbers that were uint8; scale and zero point follow from the least and the largest one."""
    (x,), output = node.inputs, node.outputs[0]
    length = math.prod(program.type(x).shape)
    limits: dict[str, Reduction] = {f"{output}:least": "min", f"{output}:largest": "max"}
    program.add_types({name: TensorType((1,), "float32") for name in limits})
    for name, operator in limits.items():
        spec = ReduceSpec("float32", (length,), (True,), operator)
        program.layers.append(LoweredLayer(name, f"Reduce{operator.capitalize()}", spec, (x,), name))
    lower_pointwise(program, node, _rounded, (x, *limits))


def _rounded(expression: Expression, node: Node, values: list[Value], dtype: str) -> Value:
    x, least, largest = values
    zero, steps = (expression.constant(number, dtype) for number in (0.0, STEPS))
    least, largest = expression.apply("min", least, zero), expression.apply("max", largest, zero)
    width = expression.apply("sub", largest, least)
    empty = expression.apply("equal", width, zero, dtype="bool")
    one, scale = expression.constant(1.0, dtype), expression.apply("div", width, steps)
    scale = expression.apply("where", empty, one, scale)
    begin = expression.apply("sub", zero, expression.apply("div", least, scale))
    zero_point = expression.apply("round", _limited(expression, begin, zero, steps))
    shifted = expression.apply("add", expression.apply("round", expression.apply("div", x, scale)), zero_point)
    rounded = expression.apply("sub", _limited(expression, shifted, zero, steps), zero_point)
    return expression.apply("mul", rounded, scale)


def _limited(expression: Expression, x: Value, least: Value, largest: Value) -> Value:
    return expression.apply("min", expression.apply("max", x, least), largest)


@lowers("QuantisedConv")
def quantised_conv(program: Program, node: Node) -> None:
    """A convolution."""
    conv(program, replace(node, inputs=node.inputs[: 3 if node.inputs[2] else 2]))
    _keep_integers(program, node)


@lowers("QuantisedMatMul")
def quantised_matmul(program: Program, node: Node) -> None:
    """A dense layer."""
    dense(program, node, program.constant(node, 1).T, program.optional(node, 2))
    _keep_integers(program, node)


def _keep_integers(program: Program, node: Node) -> None:
    layer = program.layers[-1]
    integers, scales, zeros = (program.constant(node, index) for index in (3, 4, 5))
    integers = integers.T if integers.ndim == 2 else integers
    if integers.size == layer.weights["weights"].size:  # not so of groups that have been merged
        shaped = np.ascontiguousarray(integers).reshape(layer.weights["weights"].shape)
        known = {"integers": shaped, "scales": scales, "zeros": zeros}
        program.layers[-1] = replace(layer, weights={**layer.weights, **known})


@lowers(PACKED_MATMUL)
def packed_matmul(program: Program, node: Node) -> None:
    """A dense layer; x may have any number of axes before the last one."""
    kind = program.type(node.inputs[0])
    inputs, outputs, bits = kind.shape[-1], node.attributes["outputs"], node.attributes["bits"]
    zeros, bias = program.optional(node, 3), program.optional(node, 4)
    weights = {"integers": program.constant(node, 1), "scales": program.constant(node, 2)}
    weights |= {} if zeros is None else {"zeros": zeros}
    weights["bias"] = np.zeros(outputs, np.float32) if bias is None else np.broadcast_to(bias, (outputs,))
    if kind.dtype != "float32" or weights["integers"].shape[1] != -(-inputs * bits // 8):
        raise node.unsupported(f"weights do not fit '{node.inputs[0]}', {kind.dtype}{list(kind.shape)}")
    positions, block = math.prod(kind.shape[:-1]), node.attributes["block"]
    spec = PackedDenseSpec(inputs, positions, outputs, bits, block, zeros=zeros is not None)
    program.add(node, spec, (node.inputs[0],), weights)
