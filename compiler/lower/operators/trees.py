"""Ensembles of decision trees, as `frontend/tree_ensembles.py` writes them."""

import math
from dataclasses import replace

import numpy as np

from gangway.compiler.frontend.graph import Node, TensorType
from gangway.compiler.frontend.tree_ensembles import TREE_SUMS
from gangway.compiler.kernels.plain_specs import ReduceSpec, Reduction, TreeSpec
from gangway.compiler.kernels.specs import Array
from gangway.compiler.lower.layers import LoweredLayer, Program, lowers

_GROUP_STEPS = 1024  # of one row, that are worth a task of their own
_MOST_GROUPS = 16
_REDUCTIONS: dict[str, Reduction] = {"add": "sum", "min": "min", "max": "max"}


@lowers(TREE_SUMS)
def tree_sums(program: Program, node: Node) -> None:
    """One layer; where a row has many trees, one that computes groups of them apart, and one that adds those up."""
    thresholds, links, roots, weights, places = (program.constant(node, index) for index in range(1, 6))
    kind = program.type(node.inputs[0])
    if kind.dtype not in ("float32", "float64"):
        raise node.unsupported(f"element type {kind.dtype}")
    rows, columns = math.prod(kind.shape[:-1]), kind.shape[-1]
    inner, targets = len(links) - len(weights), node.attributes["outputs"]
    depths = _mean_depths(node, links, inner)
    steps = int(depths[roots].sum()) + len(roots)
    groups = min(_MOST_GROUPS, max(1, steps // _GROUP_STEPS)) if rows < _MOST_GROUPS else 1
    operator = node.attributes["reduction"].decode()
    spec = TreeSpec(
        dtype="float32" if kind.dtype == "float32" else "float64",
        rows=rows,
        columns=columns,
        trees=len(roots),
        inner=inner,
        leaves=len(weights),
        targets=targets,
        groups=groups,
        operator=operator,
        dense=weights.ndim == 2,
        missing=bool(links[:, 3].any()),
        steps=steps,
    )
    # Trees of similar depth are done together.
    order = np.argsort(-depths[roots], kind="stable")
    raw = {"thresholds": thresholds, "links": links, "roots": roots[order], "weights": weights, "targets": places}
    if groups == 1:
        program.add(node, spec, node.inputs[:1], raw)
        return
    output = f"{node.outputs[0]}:groups"
    program.add_types({output: TensorType((rows, groups, targets), kind.dtype)})
    program.layers.append(LoweredLayer(node.name, node.operator, spec, node.inputs[:1], output, raw))
    total = ReduceSpec(kind.dtype, (rows, groups, targets), (False, True, False), _REDUCTIONS[operator])
    program.add(replace(node, name=f"{node.name}:sum"), total, (output,))


def _mean_depths(node: Node, links: Array, inner: int) -> Array:
    """How many steps it takes from each node to a leaf, if both children are as likely.

    Raises UnsupportedModelError for a node that leads back to itself.
    """
    depths, known = np.zeros(len(links)), np.arange(len(links)) >= inner
    while not known.all():
        first, second = links[:, 1], links[:, 2]
        found = ~known & known[first] & known[second]
        if not found.any():
            raise node.unsupported("its nodes are no trees: one leads back to itself")
        depths[found] = 1 + (depths[first[found]] + depths[second[found]]) / 2
        known |= found
    return depths
