"""Read an ONNX file as a message without its large weights, and write it again with another graph around them."""

from collections.abc import Iterable, Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError

from gangway.compiler.errors import UnreadableModelError
from gangway.compiler.frontend.onnx_file import Stretch, fields, message, split
from gangway.compiler.frontend.subgraphs import all_nodes, captured_tensors, graphs_of
from gangway.compiler.key import external_files
from gangway.compiler.locales import state_locales
from gangway.compiler.opsets import domain_of, restamp

_GRAPH, _INITIALIZER = 7, 5  # fields of ModelProto and GraphProto
_MOST_NAMED = 4  # nodes of a circle


def parse(path: Path) -> tuple[Any, dict[str, Stretch]]:
    """Return the model without its large weights, and where those are.

    Raises UnreadableModelError; ModelError for what refers to other files than its own (`external_files`); OSError.
    """
    external_files(path)
    content, weights = split(path)
    size_bytes, model = path.stat().st_size, onnx.ModelProto()
    try:
        model.ParseFromString(content)
    except DecodeError as error:
        why = f"{path.name} is not an ONNX file, or it is truncated ({size_bytes} bytes)"
        raise UnreadableModelError(why) from error
    if not model.HasField("graph") or not model.graph.output:
        raise UnreadableModelError(f"{path.name} holds no ONNX graph ({size_bytes} bytes)")
    for nodes in _bodies(model):
        _refuse_lacking(nodes)
    return model, weights


def put_in_order(model: Any) -> bool:
    """Put each node behind those whose results it reads, in place; return whether that changes anything.

    Some exporters write casts at the end. onnxruntime does not mind, unless they are in a graph inside of a node.
    Raises UnreadableModelError for nodes that read each other, or what does not exist.
    """
    changes = [_sort(nodes) for nodes in _bodies(model)]
    _refuse_unknown(model.graph)
    return any(changes)


def make_readable(model: Any) -> bool:
    """Let onnxruntime read a model, in place; return whether that changes it. Raises ModelError."""
    return any([put_in_order(model), restamp(model), state_locales(model)])


def _bodies(model: Any) -> Iterator[Any]:
    """Yield the nodes of a model, and of its functions."""
    yield model.graph.node
    yield from (function.node for function in model.functions)


def _refuse_lacking(nodes: Sequence[Any]) -> None:
    """Raise UnreadableModelError for a Split that has more outputs than it says."""
    for node in all_nodes(nodes):
        parts = next((item.i for item in node.attribute if item.name == "num_outputs"), 0)
        if node.op_type == "Split" and not domain_of(node) and 0 < parts < len(node.output):
            raise UnreadableModelError(f"{_title(node)}: num_outputs is {parts}, but it has {len(node.output)} outputs")


def _refuse_unknown(graph: Any) -> None:
    """Raise UnreadableModelError for a node, of a graph in order, that reads what does not exist."""
    known = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    known |= {tensor.values.name for tensor in graph.sparse_initializer}
    for node in graph.node:
        known.update(node.output)
    for node in graph.node:
        if unknown := [name for name in _read_by(node) if name not in known]:
            raise UnreadableModelError(f"{_title(node)} reads '{unknown[0]}', which no input, weight or node makes")


def _sort(nodes: Any) -> bool:
    """Put nodes, and those of graphs inside of them, behind those that they read; return whether they were not."""
    changes = [_sort(graph.node) for node in nodes for graph in graphs_of(node)]
    makers = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    sources = [{makers[name] for name in _read_by(node) if name in makers} for node in nodes]
    if all(max(found, default=-1) < index for index, found in enumerate(sources)):
        return any(changes)
    order = TopologicalSorter(dict(enumerate(sources)))
    try:
        ordered = [nodes[index] for index in order.static_order()]
    except CycleError as error:
        titles = ", ".join(_title(nodes[index]) for index in error.args[1][:_MOST_NAMED])
        raise UnreadableModelError(f"nodes read each other's results in a circle: {titles}") from error
    del nodes[:]
    nodes.extend(ordered)
    return True


def _read_by(node: Any) -> tuple[str, ...]:
    """Return the names of tensors that a node reads, graphs inside of it included."""
    return (*filter(None, node.input), *captured_tensors(node))


def _title(node: Any) -> str:
    return f"node '{node.name or next(iter(node.output), '')}' ({node.op_type})"


def with_weights(model: Any, path: Path) -> Iterator[bytes]:
    """Yield the parts of a file of a model that `parse` has returned, and that has been changed, with its initializers.

    Those are read one by one.
    """
    rest = onnx.ModelProto()
    rest.CopyFrom(model)
    del rest.graph.initializer[:]
    return with_initializers(rest, _initializers(path))


def _initializers(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        for graph in fields(file, 0, path.stat().st_size):
            if graph.number == _GRAPH:
                for field in fields(file, graph.content, graph.end):
                    if field.number == _INITIALIZER:
                        file.seek(field.begin)
                        yield file.read(field.end - field.begin)


def with_initializers(model: Any, initializers: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the parts of a file of a model with further initializers, which are fields of its graph.

    Each comes with a graph of its own: parsers join the graphs of a file.
    """
    yield model.SerializeToString()
    for field in initializers:
        yield message(_GRAPH, field)


def initializer_field(tensor: Any) -> bytes:
    """Return a tensor as a field of a graph."""
    return message(_INITIALIZER, tensor.SerializeToString())


def open_model(path: Path) -> Any:
    """Return a session of the ONNX file `path`, as `make_readable` makes it.

    Raises what onnxruntime raises; ModelError; OSError.
    """
    from gangway.artifact.onnx_session import open_session  # noqa: PLC0415 - most readers of a file need no session

    model, _ = parse(path)
    if not make_readable(model):
        return open_session(path)
    return open_session(b"".join(with_weights(model, path)), beside=path.parent)
