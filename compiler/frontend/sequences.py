"""Sequences of tensors that are only taken apart again, as exporters write them before they optimise.

A sequence has no place in memory; a part whose number is a constant is a Slice.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from onnx import helper, numpy_helper

from gangway.compiler.frontend.subgraphs import all_nodes, copy_of
from gangway.compiler.kernels.specs import Array
from gangway.compiler.opsets import OWN_DOMAINS

_MAKERS = {"SplitToSequence", "SequenceConstruct"}
_READERS = {"SequenceAt", "ConcatFromSequence"}


def replace_sequences(model: Any, constants: Mapping[str, Array]) -> None:
    """Let readers of such sequences read the tensors that these are made of, in place."""
    graph = model.graph
    makers = {node.output[0]: node for node in graph.node if node.op_type in _MAKERS and node.domain in OWN_DOMAINS}
    if not makers:
        return
    known = {**constants, **_constants_of(graph.node)}
    nodes: list[Any] = []
    for node in graph.node:
        maker = makers.get(node.input[0]) if node.op_type in _READERS and node.domain in OWN_DOMAINS else None
        nodes += [] if maker is None else _instead(maker, node, known)
        if maker is None or not nodes or nodes[-1].output[0] != node.output[0]:
            nodes.append(copy_of(node))
    read = {name for node in all_nodes(nodes) for name in node.input} | {value.name for value in graph.output}
    read |= {value.name for node in all_nodes(nodes) for item in node.attribute for value in item.g.output}
    kept = [node for node in nodes if node.op_type not in _MAKERS or node.output[0] in read]
    del graph.node[:]
    graph.node.extend(kept)


def _constants_of(nodes: Any) -> dict[str, Array]:
    found = {}
    for node in nodes:
        for item in node.attribute if node.op_type == "Constant" else ():
            if item.name == "value":
                found[node.output[0]] = numpy_helper.to_array(item.t)
            elif item.name in ("value_int", "value_ints"):
                found[node.output[0]] = np.array(helper.get_attribute_value(item), np.int64)
    return found


def _instead(maker: Any, node: Any, known: Mapping[str, Array]) -> Iterator[Any]:
    """Yield nodes for one that reads a sequence; none if they are not known."""
    output = node.output[0]
    if node.op_type == "ConcatFromSequence":
        if maker.op_type == "SequenceConstruct" and not _attribute(node, "new_axis", 0):
            yield helper.make_node("Concat", maker.input, [output], node.name, axis=_attribute(node, "axis", 0))
        return
    if node.input[1] not in known:
        return
    place = int(known[node.input[1]].reshape(()))
    if maker.op_type == "SequenceConstruct":
        if -len(maker.input) <= place < len(maker.input):
            yield helper.make_node("Identity", [maker.input[place]], [output], node.name)
        return
    lengths = known.get(maker.input[1], np.zeros(())) if maker.input[1:] and maker.input[1] else np.array(1)
    if lengths.ndim:
        ends = np.cumsum(lengths).tolist()
        if not -len(ends) <= place < len(ends):
            return
        end = ends[place]
        begin = end - int(lengths[place])
    elif place < 0 or not lengths:
        return
    else:
        begin, end = place * int(lengths), (place + 1) * int(lengths)
    axis = _attribute(maker, "axis", 0)
    if not maker.input[1:] and not _attribute(maker, "keepdims", 1):
        yield _constant(np.array(begin), f"{output}/place")
        yield helper.make_node("Gather", [maker.input[0], f"{output}/place"], [output], node.name, axis=axis)
        return
    for name, value in (("begin", begin), ("end", end), ("axis", axis)):
        yield _constant(np.array([value]), f"{output}/{name}")
    inputs = [maker.input[0], *(f"{output}/{name}" for name in ("begin", "end", "axis"))]
    yield helper.make_node("Slice", inputs, [output], node.name)


def _attribute(node: Any, name: str, default: int) -> int:
    return next((item.i for item in node.attribute if item.name == name), default)


def _constant(value: Array, name: str) -> Any:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(value.astype(np.int64)))
