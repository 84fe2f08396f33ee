"""Put the branch that an If takes in its place, where shapes and constants alone decide which one that is.

Exporters write such nodes for code that asks for a size or a rank. What depends on the number of rows decides nothing:
values in a batch of one and in a larger one tell what does.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import helper, shape_inference

from gangway.compiler.frontend.shape_inference import known_values
from gangway.compiler.frontend.subgraphs import all_nodes, copy_of, rename_captured
from gangway.compiler.kernels.specs import Array

_PICKS = {
    "Gather",
    "Reshape",
    "Shape",
    "Size",
    "Slice",
    "Split",
    "Squeeze",
    "Unsqueeze",
}  # parts of what they are given
_ROUNDS = 64  # of branches in branches, and of conditions on the shapes of what branches compute


def has_branches(model: Any) -> bool:
    """Whether the model has an If that is in no other node."""
    return any(node.op_type == "If" for node in model.graph.node)


def inline_branches(*models: Any) -> bool:
    """Replace If nodes in place, in models that differ in their batch only; return whether there were any to replace.

    What is left depends on numbers of a request, or on how many rows it has.
    """
    for done in range(_ROUNDS):
        if not has_branches(models[0]):
            return done > 0
        try:
            decisions = _decisions(models[0].graph, [known_values(model) for model in models])
        except shape_inference.InferenceError:  # which says more about the whole model, later
            return done > 0
        if not decisions:
            return done > 0
        for model in models:
            _inline(model.graph, decisions)
    return True


def _decisions(graph: Any, known: Sequence[Mapping[str, Array]]) -> dict[str, bool]:
    """Whether the condition holds, for each If where that is known, by its first output.

    `known`: values in batches of several sizes.
    """
    changing = varying(graph, known)
    found = {}
    for node in graph.node:
        condition = node.input[0] if node.op_type == "If" else ""
        if condition in known[0] and condition not in changing and known[0][condition].size == 1:
            found[_key(node)] = bool(known[0][condition].reshape(()))
    return found


def varying(graph: Any, known: Sequence[Mapping[str, Array]]) -> set[str]:
    """Return the values that may depend on the batch: two batches may be equally odd, or both smaller than a limit."""
    first, *others = known
    found: set[str] = set()
    for node in graph.node:
        is_made = not found.isdisjoint(node.input[1:] if node.op_type in _PICKS else node.input)
        for name in node.output:
            values = [first[name], *(other[name] for other in others if name in other)] if name in first else []
            is_same = len(values) in (0, len(known)) and all(np.array_equal(values[0], value) for value in values)
            if is_made or not is_same:
                found.add(name)
    return found


def _inline(graph: Any, decisions: Mapping[str, bool]) -> None:
    nodes = []
    taken = {name for node in all_nodes(graph.node) for name in (*node.input, *node.output)}
    for node in graph.node:
        branch = _branch(node, decisions[_key(node)]) if node.op_type == "If" and _key(node) in decisions else None
        if branch is None:
            nodes.append(node)
            continue
        inside, initial = _body(node, branch, taken)
        nodes.extend(inside)
        graph.initializer.extend(initial)
    nodes = [copy_of(node) for node in nodes]  # deleting the field ends those that it has
    del graph.node[:]
    graph.node.extend(nodes)


def _branch(node: Any, is_then: bool) -> Any:
    """Return the graph; None if it has weights of a kind that is not read."""
    name = "then_branch" if is_then else "else_branch"
    graph = next((item.g for item in node.attribute if item.name == name), None)
    return None if graph is None or graph.sparse_initializer else graph


def _body(node: Any, branch: Any, taken: set[str]) -> tuple[list[Any], list[Any]]:
    """Return the nodes and weights of a branch, under names that are not `taken`; the nodes compute the If's outputs.

    Several of its outputs may be one tensor, or one that the branch does not compute: those are copied.
    """
    inside, initial = [copy_of(inner) for inner in branch.node], [copy_of(tensor) for tensor in branch.initializer]
    computed = {name for inner in inside for name in inner.output if name}
    own = computed.union(tensor.name for tensor in initial)
    prefix = f"{_key(node)}/"
    while not taken.isdisjoint(f"{prefix}{name}" for name in own):
        prefix += "/"
    names: dict[str, str] = {name: f"{prefix}{name}" for name in own}
    copied: list[tuple[str, str]] = []
    for value, output in zip(branch.output, node.output, strict=False):
        if value.name in computed:
            computed.remove(value.name)
            names[value.name] = output or names[value.name]
        elif output:
            copied.append((value.name, output))
    rename(inside, names)
    for tensor in initial:
        tensor.name = names[tensor.name]
    copies = [helper.make_node("Identity", [names.get(name, name)], [output], name=output) for name, output in copied]
    return [*inside, *copies], initial


def rename(nodes: Iterable[Any], names: Mapping[str, str]) -> None:
    """Rename tensors in nodes and in graphs inside of them."""
    for node in nodes:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        rename_captured(node, names)


def _key(node: Any) -> str:
    return next(filter(None, node.output), "")
