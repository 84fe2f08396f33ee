"""Gather: rows of a table, or one item of an axis."""

import math
from typing import Literal, cast

import numpy as np

from gangway.compiler.graph import Node
from gangway.compiler.layers import Pick, Program
from gangway.compiler.operators.registry import lowers
from gangway.compiler.operators.remaps import gather_constant
from gangway.compiler.specs import GatherSpec


@lowers("Gather")
def gather(program: Program, node: Node) -> None:
    """Items of data along `axis`, whose numbers are an activation or constant."""
    data, indices = node.inputs
    constants = program.graph.constants
    kinds = [constants[name] if name in constants else program.type(name) for name in node.inputs]
    shape, positions = kinds[0].shape, kinds[1].shape
    axis = node.attributes.get("axis", 0) % len(shape)
    outer, length, inner = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    if indices in constants and math.prod(positions) == 1:
        index = int(constants[indices].reshape(()))
        if not -length <= index < length:
            raise node.unsupported(f"index {index} of {length}")
        program.add(node, Pick(outer, length, inner, index % length), (data,))
        return
    if indices in constants and data not in constants:
        gather_constant(program, node, axis, constants[indices])
        return
    index_dtype = np.dtype(kinds[1].dtype).name
    if index_dtype not in ("int32", "int64"):
        raise node.unsupported(f"indices of type {index_dtype}")
    item_bytes = np.dtype(kinds[0].dtype).itemsize
    dtype = cast(Literal["int32", "int64"], index_dtype)
    program.add(node, GatherSpec(outer, length, inner, math.prod(positions), item_bytes, dtype), node.inputs)
