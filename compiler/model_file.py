"""Read an ONNX file as a message without its large weights, and write it again with another graph around them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError

from gangway.compiler.errors import UnreadableModelError
from gangway.compiler.frontend.onnx_file import Stretch, fields, message, split
from gangway.compiler.opsets import restamp

_GRAPH, _INITIALIZER = 7, 5  # fields of ModelProto and GraphProto


def parse(path: Path) -> tuple[Any, dict[str, Stretch]]:
    """Return the model without its large weights, and where those are. Raises UnreadableModelError, OSError."""
    content, weights = split(path)
    size_bytes, model = path.stat().st_size, onnx.ModelProto()
    try:
        model.ParseFromString(content)
    except DecodeError as error:
        why = f"{path.name} is not an ONNX file, or it is truncated ({size_bytes} bytes)"
        raise UnreadableModelError(why) from error
    if not model.HasField("graph") or not model.graph.output:
        raise UnreadableModelError(f"{path.name} holds no ONNX graph ({size_bytes} bytes)")
    return model, weights


def with_weights(model: Any, path: Path) -> Iterator[bytes]:
    """Yield the parts of a file of a model that `parse` has returned, and that has been changed, with its initializers.

    Those are read one by one. Each comes with a graph of its own: parsers join the graphs of a file.
    """
    rest = onnx.ModelProto()
    rest.CopyFrom(model)
    del rest.graph.initializer[:]
    yield rest.SerializeToString()
    with path.open("rb") as file:
        for graph in fields(file, 0, path.stat().st_size):
            if graph.number == _GRAPH:
                for field in fields(file, graph.content, graph.end):
                    if field.number == _INITIALIZER:
                        file.seek(field.begin)
                        yield message(_GRAPH, file.read(field.end - field.begin))


def open_model(path: Path) -> Any:
    """Return a session of the ONNX file `path`, in operator sets that onnxruntime reads.

    Raises what onnxruntime raises; ModelError if a node is another one in these sets; OSError.
    """
    from gangway.artifact.onnx_session import open_session  # noqa: PLC0415 - most readers of a file need no session

    model, _ = parse(path)
    if not restamp(model):
        return open_session(path)
    return open_session(b"".join(with_weights(model, path)), beside=path.parent)
