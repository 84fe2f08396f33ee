"""ScatterElements, ScatterND, GatherElements and GatherND: an index for each number, or for each slice."""

import math
from typing import Literal, cast

import numpy as np

from gangway.compiler.graph import Node, TensorType
from gangway.compiler.layers import Program
from gangway.compiler.operators.registry import lowers
from gangway.compiler.specs import GatherPlacesSpec, Picked, ScatterReduction, ScatterSpec, contiguous


@lowers("Scatter", "ScatterElements")
def scatter_elements(program: Program, node: Node) -> None:
    """Each update goes to its own place, but along `axis`, where the index says it."""
    data, indices, updates = (_type(program, name) for name in node.inputs)
    axis = node.attributes.get("axis", 0) % len(data.shape)
    strides = contiguous(data.shape)
    picked = (Picked(data.shape[axis], strides[axis], 0),)
    fixed = tuple(0 if at == axis else stride for at, stride in enumerate(strides))
    _add(program, node, (data, indices), updates.shape, fixed, contiguous(indices.shape), picked)


@lowers("ScatterND")
def scatter_nd(program: Program, node: Node) -> None:
    """The last axis of the indices says where a slice of data begins."""
    data, indices, updates = (_type(program, name) for name in node.inputs)
    outer, depth = len(indices.shape) - 1, indices.shape[-1]
    strides = contiguous(data.shape)
    picked = tuple(Picked(data.shape[axis], strides[axis], axis) for axis in range(depth))
    places = (0,) * outer + strides[depth:]
    index_strides = contiguous(indices.shape)[:outer] + (0,) * (len(updates.shape) - outer)
    _add(program, node, (data, indices), updates.shape, places, index_strides, picked)


@lowers("GatherElements")
def gather_elements(program: Program, node: Node) -> None:
    """Each number is from its own place, but along `axis`, where the index says it."""
    data, indices = (_type(program, name) for name in node.inputs)
    axis = node.attributes.get("axis", 0) % len(data.shape)
    strides = contiguous(data.shape)
    picked = (Picked(data.shape[axis], strides[axis], 0),)
    fixed = tuple(0 if at == axis else stride for at, stride in enumerate(strides))
    _add_gather(program, node, (data, indices), fixed, contiguous(indices.shape), picked)


@lowers("GatherND")
def gather_nd(program: Program, node: Node) -> None:
    """The last axis of the indices says where a slice of data begins, behind the first `batch_dims` axes."""
    data, indices = (_type(program, name) for name in node.inputs)
    outer, depth, batch = len(indices.shape) - 1, indices.shape[-1], node.attributes.get("batch_dims", 0)
    strides = contiguous(data.shape)
    picked = tuple(Picked(data.shape[axis], strides[axis], axis - batch) for axis in range(batch, batch + depth))
    places = (*strides[:batch], *(0 for _ in range(outer - batch)), *strides[batch + depth :])
    index_strides = (*contiguous(indices.shape)[:outer], *(0 for _ in strides[batch + depth :]))
    _add_gather(program, node, (data, indices), places, index_strides, picked)


def _add_gather(
    program: Program,
    node: Node,
    kinds: tuple[TensorType, TensorType],
    strides: tuple[int, ...],
    index_strides: tuple[int, ...],
    picked: tuple[Picked, ...],
) -> None:
    data, indices = kinds
    shape = program.type(node.outputs[0]).shape
    spec = GatherPlacesSpec(
        np.dtype(data.dtype).itemsize,
        _index_dtype(node, indices),
        math.prod(data.shape),
        shape or (1,),
        strides or (0,),
        index_strides or (0,),
        picked,
    )
    program.add(node, spec, node.inputs)


def _add(
    program: Program,
    node: Node,
    kinds: tuple[TensorType, TensorType],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    index_strides: tuple[int, ...],
    picked: tuple[Picked, ...],
) -> None:
    data, indices = kinds
    index_dtype = _index_dtype(node, indices)
    reduction = cast(ScatterReduction, node.attributes.get("reduction", b"none").decode())
    count = math.prod(data.shape)
    spec = ScatterSpec(data.dtype, index_dtype, count, shape, strides, index_strides, picked, reduction)
    program.add(node, spec, node.inputs)


def _index_dtype(node: Node, indices: TensorType) -> Literal["int32", "int64"]:
    if indices.dtype not in ("int32", "int64"):
        raise node.unsupported(f"indices of type {indices.dtype}")
    return cast(Literal["int32", "int64"], indices.dtype)


def _type(program: Program, name: str) -> TensorType:
    value = program.graph.constants.get(name)
    return program.type(name) if value is None else TensorType(value.shape, value.dtype.name)
