"""What a model costs, from its shapes: parameters, multiply-adds, and the matrix products that it consists of.

The numbers in its weights are never read.
"""

import math
from dataclasses import dataclass
from typing import Any

from onnx import ModelProto, TensorProto, shape_inference

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
BATCH_NORM_STATISTICS = (3, 4)  # inputs that hold running mean and variance
MAX_CONSTANT_ELEMENTS = 4096  # shapes and indices that shape inference may need; more is a weight

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Counts:
    """What one sample (every symbolic dimension is 1) costs."""

    parameters: int  # trained numbers, each counted once, however often it is used
    multiply_adds: int  # of convolutions and matrix products that depend on an input

    @property
    def gflop(self) -> float:
        """Operations in 10^9; a multiplication and its addition are two."""
        return 2e-9 * self.multiply_adds


def count(model: ModelProto) -> Counts:
    """Count a model's parameters and multiply-adds.

    Parameters are floating-point initializers of rank >= 1 that are not statistics of a batch normalisation. Counted
    operators are Conv, ConvTranspose, Gemm and MatMul outside of subgraphs. Raises
    onnx.shape_inference.InferenceError when shapes contradict each other, ValueError when one stays unknown.
    """
    graph = _infer(model)
    shapes = {info.name: _known_shape(info) for info in (*graph.input, *graph.value_info, *graph.output)}
    shapes |= {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    constants = {tensor.name for tensor in graph.initializer} | {""}  # "" is an optional input left out
    multiply_adds = 0
    for node in graph.node:
        if constants.issuperset(node.input):
            constants.update(node.output)  # computed once, before the first query
        else:
            multiply_adds += _multiply_adds(node, shapes)
    return Counts(_parameters(graph), multiply_adds)


@dataclass(frozen=True)
class MatrixProduct:
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


def matrix_products(model: ModelProto) -> list[MatrixProduct]:
    """Return the Conv, MatMul and Gemm nodes that depend on an input, in the graph's order.

    Raises onnx.shape_inference.InferenceError when shapes contradict each other, ValueError when one is not known.
    """
    graph = _infer(model)
    shapes = {info.name: _known_shape(info) for info in (*graph.input, *graph.value_info, *graph.output)}
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


def _parameters(graph: Any) -> int:
    statistics = {
        node.input[position]
        for node in graph.node
        if node.op_type == "BatchNormalization"
        for position in BATCH_NORM_STATISTICS
    }
    return sum(
        math.prod(tensor.dims)
        for tensor in graph.initializer
        if tensor.dims and tensor.data_type in FLOATS and tensor.name not in statistics
    )


def _multiply_adds(node: Any, shapes: dict[str, Shape | None]) -> int:
    def shape(name: str) -> Shape:
        found = shapes.get(name)
        if found is None:
            raise ValueError(f"the shape of '{name}' ({node.op_type} '{node.name}') cannot be inferred")
        return found

    match node.op_type:
        case "Conv":
            return math.prod(shape(node.output[0])) * math.prod(shape(node.input[1])[1:])
        case "ConvTranspose":
            return math.prod(shape(node.input[0])) * math.prod(shape(node.input[1])[1:])
        case "MatMul":
            return math.prod(shape(node.output[0])) * shape(node.input[0])[-1]
        case "Gemm":
            transposed = any(attribute.name == "transA" and attribute.i for attribute in node.attribute)
            return math.prod(shape(node.output[0])) * shape(node.input[0])[0 if transposed else 1]
    return 0


def _convolution(node: Any, kernel: tuple[int, ...], output: tuple[int, ...], weighted: bool) -> MatrixProduct:
    groups = next((attribute.i for attribute in node.attribute if attribute.name == "group"), 1)
    return MatrixProduct(
        node.name or node.output[0],
        groups,
        inputs=kernel[1],
        outputs=kernel[0] // groups,
        taps=math.prod(kernel[2:]),
        positions=math.prod(output[2:]),
        weighted=weighted,
    )


def _matrix_product(node: Any, second: tuple[int, ...], output: tuple[int, ...], weighted: bool) -> MatrixProduct:
    transposed = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
    inputs = second[-1] if transposed else second[-2]
    rows = math.prod(output[:-1])
    groups = math.prod(second[:-2]) if not weighted else 1
    return MatrixProduct(
        node.name or node.output[0],
        groups,
        inputs=inputs,
        outputs=output[-1],
        taps=1,
        positions=rows // groups,
        weighted=weighted,
    )


def _infer(model: ModelProto) -> Any:
    """Return the graph with shapes for one sample, its larger initializers without their numbers.

    Raises onnx.shape_inference.InferenceError when shapes contradict each other.
    """
    light = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    source, graph = model.graph, light.graph
    graph.node.extend(source.node)
    graph.input.extend(source.input)
    graph.output.extend(source.output)
    graph.initializer.extend(
        t
        if math.prod(t.dims) <= MAX_CONSTANT_ELEMENTS
        else TensorProto(name=t.name, dims=t.dims, data_type=t.data_type)
        for t in source.initializer
    )
    for info in (*graph.input, *graph.output):
        for dimension in info.type.tensor_type.shape.dim:
            if not dimension.HasField("dim_value"):
                dimension.dim_value = 1
    return shape_inference.infer_shapes(light, check_type=True, strict_mode=True, data_prop=True).graph


def _known_shape(info: Any) -> Shape | None:
    """Return the dimensions of an ONNX ValueInfo; None if one is not known."""
    dims = info.type.tensor_type.shape.dim
    return tuple(d.dim_value for d in dims) if all(d.HasField("dim_value") for d in dims) else None
