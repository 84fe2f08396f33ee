"""A model as the matrix products it consists of: what an accelerator's array executes."""

import math
from dataclasses import dataclass
from typing import Any

from onnx import ModelProto

from gangway.zoo.count import infer, known_shape


@dataclass(frozen=True)
class Product:
    """One convolution or matrix product of one sample.

    For each of `positions` (pixels, tokens) and `groups`: `outputs` sums over `inputs` x `taps` products. The weights
    are groups x inputs x outputs x taps numbers; `weighted` is false where both factors are activations.
    """

    name: str
    groups: int
    inputs: int  # channels of a group
    outputs: int  # channels of a group
    taps: int  # of the kernel; 1 for matrix products
    positions: int
    weighted: bool


def products(model: ModelProto) -> list[Product]:
    """Return the Conv, MatMul and Gemm nodes that depend on an input, in the graph's order.

    Raises onnx.shape_inference.InferenceError when shapes contradict each other, ValueError when one is not known.
    """
    graph = infer(model)
    shapes = {info.name: known_shape(info) for info in (*graph.input, *graph.value_info, *graph.output)}
    shapes |= {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    constants = {tensor.name for tensor in graph.initializer} | {""}  # "" is an optional input left out
    found = []
    for node in graph.node:
        if constants.issuperset(node.input):
            constants.update(node.output)  # computed once, before the first query
        elif node.op_type in ("Conv", "MatMul", "Gemm"):
            first, second, output = (shapes.get(name) for name in (*node.input[:2], node.output[0]))
            if first is None or second is None or output is None:
                raise ValueError(f"the shapes of {node.op_type} '{node.name}' cannot be inferred")
            weighted = node.input[1] in constants or node.input[0] in constants
            make = _convolution if node.op_type == "Conv" else _matrix_product
            found.append(make(node, second, output, weighted))
    return found


def _convolution(node: Any, kernel: tuple[int, ...], output: tuple[int, ...], weighted: bool) -> Product:
    groups = next((attribute.i for attribute in node.attribute if attribute.name == "group"), 1)
    return Product(
        node.name or node.output[0],
        groups,
        inputs=kernel[1],
        outputs=kernel[0] // groups,
        taps=math.prod(kernel[2:]),
        positions=math.prod(output[2:]),
        weighted=weighted,
    )


def _matrix_product(node: Any, second: tuple[int, ...], output: tuple[int, ...], weighted: bool) -> Product:
    transposed = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
    inputs = second[-1] if transposed else second[-2]
    rows = math.prod(output[:-1])
    groups = math.prod(second[:-2]) if not weighted else 1
    return Product(
        node.name or node.output[0],
        groups,
        inputs=inputs,
        outputs=output[-1],
        taps=1,
        positions=rows // groups,
        weighted=weighted,
    )
