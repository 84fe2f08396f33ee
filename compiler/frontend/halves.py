"""Models of float16 or bfloat16 become models of float32 whose inputs and outputs are what the file says.

Processors compute float32 as fast, or faster, and every float16 and bfloat16 number is one of float32. So weights are
widened once, and what is computed is rounded at the outputs alone. Models without products stay as they are: nothing is
gained. So do halves that only casts make: these say where to round.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from gangway.compiler.frontend.subgraphs import all_nodes, graphs_of, rename_captured
from gangway.compiler.kernels.specs import Array

HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_TYPE_ATTRIBUTES = ("to", "dtype", "output_dtype", "output_datatype", "stash_type", "softmax_precision")
_HALF_DTYPES = ("float16", "bfloat16")
_PRODUCTS = ("Attention", "Conv", "Gemm", "GRU", "LSTM", "MatMul", "RNN")  # parts of operators' names


def widen_halves(model: Any, constants: dict[str, Array]) -> None:
    """Make a model of halves one of float32, with its initializers, unless it passes sequences on.

    `constants`: all initializers; the large ones are inputs of the graph, too.
    """
    graph = model.graph
    if not _is_of_halves(graph, constants) or any(_is_nested_half(value) for value in (*graph.input, *graph.output)):
        return
    inputs = [value for value in graph.input if value.name not in constants and _is_half(value)]
    outputs = [value for value in graph.output if _is_half(value)]
    given = {value.name for value in graph.input} | constants.keys()
    if any(value.name in given for value in outputs):  # passed on as it is
        return
    taken = given | {name for node in graph.node for name in node.output}
    names = {value.name: _new_name(value.name, taken) for value in (*inputs, *outputs)}
    before = [_cast(value.name, names[value.name], TensorProto.FLOAT) for value in inputs]
    after = [_cast(names[value.name], value.name, value.type.tensor_type.elem_type) for value in outputs]
    _rename(graph, names)
    for node in all_nodes(graph.node):
        _widen_attributes(node)
        for inner in graphs_of(node):
            _widen_values(inner)
            _widen_initializers(inner)
    for name, value in constants.items():
        if value.dtype.name in _HALF_DTYPES:
            constants[name] = value.astype(np.float32)
    _widen_initializers(graph)
    for value in (*(value for value in graph.input if value.name in constants), *graph.value_info):
        _widen_type(value)
    nodes = [*before, *graph.node, *after]
    del graph.node[:]
    graph.node.extend(nodes)


def has_halves(graph: Any) -> bool:
    """Whether weights or inputs are halves."""
    return any(tensor.data_type in HALVES for tensor in graph.initializer) or any(map(_is_half, graph.input))


def _is_of_halves(graph: Any, constants: Mapping[str, Array]) -> bool:
    """Whether weights or inputs are halves, and products are computed."""
    halves = any(value.dtype.name in _HALF_DTYPES and value.size > 1 for value in constants.values())
    if not halves and not any(map(_is_half, graph.input)):
        return False
    return any(part in node.op_type for node in all_nodes(graph.node) for part in _PRODUCTS)


def _tensors_of(item: Any) -> Iterator[Any]:
    if item.HasField("t"):
        yield item.t
    yield from item.tensors


def _is_half(value: Any) -> bool:
    return value.type.tensor_type.elem_type in HALVES


def _is_nested_half(value: Any) -> bool:
    """Whether it is a sequence, or may be missing."""
    return value.type.WhichOneof("value") in ("sequence_type", "optional_type", "map_type")


def _new_name(name: str, taken: set[str]) -> str:
    found = f"{name}/float32"
    while found in taken:
        found += "_"
    taken.add(found)
    return found


def _cast(source: str, target: str, to: int) -> Any:
    return helper.make_node("Cast", [source], [target], f"{target}/cast", to=to)


def _rename(graph: Any, names: Mapping[str, str]) -> None:
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        rename_captured(node, names)


def _widen_attributes(node: Any) -> None:
    for item in node.attribute:
        if item.name in _TYPE_ATTRIBUTES and item.i in HALVES:
            item.i = TensorProto.FLOAT
        for tensor in _tensors_of(item):
            _widen_tensor(tensor)


def _widen_initializers(graph: Any) -> None:
    for tensor in graph.initializer:
        _widen_tensor(tensor)


def _widen_tensor(tensor: Any) -> None:
    if tensor.data_type in HALVES:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))


def _widen_values(graph: Any) -> None:
    for value in (*graph.input, *graph.output, *graph.value_info):
        _widen_type(value)


def _widen_type(value: Any) -> None:
    if _is_half(value):
        value.type.tensor_type.elem_type = TensorProto.FLOAT
