"""Graphs inside of nodes, the bodies of If, Loop and Scan: their nodes, and the tensors that they read from outside."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def graphs_of(node: Any) -> Iterator[Any]:
    """Yield the graphs in a node's attributes."""
    for item in node.attribute:
        if item.HasField("g"):
            yield item.g
        yield from item.graphs


def all_nodes(nodes: Iterable[Any]) -> Iterator[Any]:
    """Yield nodes, and those of graphs inside of them."""
    for node in nodes:
        yield node
        for graph in graphs_of(node):
            yield from all_nodes(graph.node)


def captured_tensors(node: Any) -> tuple[str, ...]:
    """Return the names that graphs inside of a node read, but do not have, in the order in which they read them."""
    found: dict[str, None] = {}
    for graph in graphs_of(node):
        known = {value.name for value in (*graph.input, *graph.initializer)}
        for inner in graph.node:
            found.update(dict.fromkeys(name for name in inner.input if name and name not in known))
            found.update(dict.fromkeys(name for name in captured_tensors(inner) if name not in known))
            known.update(inner.output)
        found.update(dict.fromkeys(value.name for value in graph.output if value.name not in known))
    return tuple(found)


def rename_captured(node: Any, names: Mapping[str, str]) -> None:
    """Rename tensors in the graphs inside of a node, which see them unless they have their own of that name."""
    for graph in graphs_of(node):
        own = {value.name for value in (*graph.input, *graph.initializer)}
        own |= {name for inner in graph.node for name in inner.output}
        seen = {name: new for name, new in names.items() if name not in own}
        for inner in graph.node:
            inner.input[:] = [seen.get(name, name) for name in inner.input]
            rename_captured(inner, seen)
        for value in graph.output:
            value.name = seen.get(value.name, value.name)


def copy_of(message: Any) -> Any:
    """Return a copy of a message of protobuf."""
    copy = type(message)()
    copy.CopyFrom(message)
    return copy
